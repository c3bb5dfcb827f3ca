"""A noise-conditional score network learns a 2-D spiral by denoising score matching over ten noise levels.
Looks odd: the weighted loss never comes near zero (most of it is irreducible noise) and it is very noisy; samples are judged instead."""
import math
import torch
import torch.nn as nn

SIGMAS = torch.logspace(0.3, -1.3, 10)


def spiral(n):
    t = torch.sqrt(torch.rand(n)) * 3 * math.pi
    return torch.stack([t * t.cos(), t * t.sin()], 1) / 5 + 0.02 * torch.randn(n, 2)


class Film(nn.Module):
    def __init__(self, h, c):
        super().__init__()
        self.lin, self.mod = nn.Linear(h, h), nn.Linear(c, 2 * h)
        self.norm = nn.LayerNorm(h, elementwise_affine=False)

    def forward(self, x, c):
        g, b = self.mod(c).chunk(2, -1)
        return x + torch.nn.functional.silu(self.norm(self.lin(x)) * (1 + g) + b)


class ScoreNet(nn.Module):
    def __init__(self, h=96, c=16):
        super().__init__()
        self.inp = nn.Linear(2, h)
        self.level = nn.Embedding(len(SIGMAS), c)
        self.blocks = nn.ModuleList(Film(h, c) for _ in range(3))
        self.out = nn.Linear(h, 2)

    def forward(self, x, k):
        s = SIGMAS[k][:, None]
        c = self.level(k)
        z = self.inp(x / torch.sqrt(1 + s ** 2))
        for b in self.blocks: z = b(z, c)
        return self.out(z) / s


def dsm_loss(net, x):
    k = torch.randint(0, len(SIGMAS), (len(x),))
    s = SIGMAS[k][:, None]
    eps = torch.randn_like(x)
    return 0.5 * ((s * net(x + s * eps, k) + eps) ** 2).sum(1).mean()


@torch.no_grad()
def anneal(net, n=500, steps=20):
    x = torch.randn(n, 2) * SIGMAS[0]
    for k, s in enumerate(SIGMAS):
        a = 0.1 * s ** 2
        for _ in range(steps):
            x = x + a * net(x, torch.full((n,), k)) + torch.sqrt(2 * a) * torch.randn_like(x)
    return x


def train(watch):
    torch.manual_seed(31)
    net = ScoreNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    monitor = watch(net, opt)
    for step in range(800):
        loss = dsm_loss(net, spiral(256))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        ema.update_parameters(net)
        monitor.log_scalar("loss", loss.detach())
        if step % 200 == 0: print(step, float(loss))
    real, fake = spiral(2000), anneal(ema.module)
    return float(torch.cdist(fake, real).min(1).values.mean())     # mean distance of samples from the spiral
