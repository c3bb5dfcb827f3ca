"""A small Glow on 4x4 patches of smooth textures: actnorm with data-dependent initialisation, invertible 1x1 mixing (LU) and affine couplings.
Looks odd: bits per dimension are reported and the underlying log-likelihood is large; actnorm is set by the first batch before any step."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

D = 16


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc, self.log_scale = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0)); self.log_scale.copy_(-(x.std(0) + 1e-4).log())
                self.ready.fill_(True)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class InvLinear(nn.Module):
    def __init__(self):
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(D, D))
        p, l, u = torch.linalg.lu(q)
        self.register_buffer("p", p)
        s = torch.diagonal(u)
        self.register_buffer("sign", s.sign())
        self.l, self.u, self.log_s = nn.Parameter(l.tril(-1)), nn.Parameter(u.triu(1)), nn.Parameter(s.abs().log())

    def forward(self, x):
        w = self.p @ (self.l.tril(-1) + torch.eye(D)) @ (self.u.triu(1) + torch.diag(self.sign * self.log_s.exp()))
        return x @ w.T, self.log_s.sum()


class AffineHalf(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D // 2, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, D))
        nn.init.zeros_(self.net[-1].weight); nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.sigmoid(s + 0.0)                          # scale in (0, 2), one at the start
        return torch.cat([a, (b + t) * s], 1), s.log().sum(1)


class Glow(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.steps = nn.ModuleList(m for _ in range(depth) for m in (ActNorm(), InvLinear(), AffineHalf()))

    def log_prob(self, x):
        ld = 0
        for s in self.steps:
            x, d = s(x)
            ld = ld + d
        return ld - .5 * (x ** 2).sum(1) - .5 * D * math.log(2 * math.pi)


def patches(n, g):
    a, b = torch.rand(2, n, 1, 1, generator=g)
    y, x = torch.meshgrid(torch.linspace(0, 1, 4), torch.linspace(0, 1, 4), indexing="ij")
    edge = torch.sigmoid(8 * ((x - a) * torch.cos(6.28 * b) + (y - a) * torch.sin(6.28 * b)))
    img = (.15 + .7 * edge + .04 * torch.randn(n, 4, 4, generator=g)).clamp(0, .999)
    v = (img * 32).floor() + torch.rand(n, 4, 4, generator=g)    # uniform dequantisation
    return v.flatten(1) / 32 - .5


def bits(model, x): return (-model.log_prob(x).mean() / D + math.log(32)) / math.log(2)


def train(watch):
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(0)
    model = Glow()
    with torch.no_grad(): model.log_prob(patches(512, g))        # initialises actnorm
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 40) * (1 - s / 605))
    monitor = watch(model, opt)
    for step in range(600):
        loss = bits(model, patches(128, g))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.)
        opt.step()
        sched.step()
        monitor.log_scalar("bits_per_dim", loss.detach())
    with torch.no_grad(): return bits(model, patches(4000, torch.Generator().manual_seed(5))).item()
