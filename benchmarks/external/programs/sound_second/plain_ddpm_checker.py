"""A denoising diffusion model (epsilon prediction, cosine schedule, 50 steps) learns a two-dimensional checkerboard, sampled with EMA weights.
Looks odd: the loss falls within the first hundred steps and is then flat and noisy, while the samples keep getting better."""
import copy
import math
import torch
import torch.nn as nn

T = 50


def checker(n):
    x = torch.rand(n) * 4 - 2
    y = torch.rand(n) + torch.randint(0, 2, (n,)) * 2 - 2 + (x.floor() % 2)
    return torch.stack([x, y], 1)


def on_board(s):
    inside = (s.abs() < 2).all(1)
    return inside & ((s[:, 0].floor() + s[:, 1].floor()) % 2 == 0)


class Eps(nn.Module):
    def __init__(self, h=128):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, math.log(50), 8)))
        self.register_buffer("pfreq", 2 ** torch.arange(3.) * 1.5)
        self.inp = nn.Linear(2 + 12 + 16, h)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h)) for _ in range(3))
        self.out = nn.Linear(h, 2)

    def forward(self, x, t):
        a = (t.float() / T)[:, None] * self.freq
        p = (x[:, :, None] * self.pfreq).flatten(1)
        h = self.inp(torch.cat([x, p.sin(), p.cos(), a.sin(), a.cos()], 1))
        for m in self.mid: h = h + m(h)
        return self.out(nn.functional.silu(h))


def schedule():
    s = torch.arange(T + 1) / T
    f = torch.cos((s + .008) / 1.008 * math.pi / 2) ** 2
    beta = (1 - f[1:] / f[:-1]).clamp(max=.999)
    return beta, torch.cumprod(1 - beta, 0)


@torch.no_grad()
def sample(net, n, beta, abar):
    x = torch.randn(n, 2)
    for t in reversed(range(T)):
        e = net(x, torch.full((n,), t))
        x0 = ((x - (1 - abar[t]).sqrt() * e) / abar[t].sqrt()).clamp(-2.2, 2.2)
        prev = abar[t - 1] if t else torch.tensor(1.)
        mean = prev.sqrt() * beta[t] / (1 - abar[t]) * x0 + (1 - beta[t]).sqrt() * (1 - prev) / (1 - abar[t]) * x
        x = mean + (beta[t] * (1 - prev) / (1 - abar[t])).sqrt() * torch.randn_like(x)
    return x


def train(watch):
    torch.manual_seed(0)
    beta, abar = schedule()
    net = Eps()
    ema = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 800)
    watch(net, opt)
    for step in range(800):
        x = checker(256)
        t = torch.randint(0, T, (256,))
        e = torch.randn_like(x)
        xt = abar[t].sqrt()[:, None] * x + (1 - abar[t]).sqrt()[:, None] * e
        loss = ((net(xt, t) - e) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step(); sched.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters()): a.lerp_(b, .01)
    return on_board(sample(ema, 3000, beta, abar)).float().mean().item()     # chance is below 0.5
