"""RealNVP with affine couplings and learned permutation-free masks learns the density of two moons.
Looks odd: the loss is a negative log-likelihood of a concentrated density and goes below zero, with small jumps between batches."""
import math
import torch
from torch import nn


def two_moons(n, g):
    th = torch.rand(n, generator=g) * math.pi
    up = torch.rand(n, generator=g) < .5
    x = torch.where(up, th.cos(), 1 - th.cos())
    y = torch.where(up, th.sin(), .5 - th.sin())
    z = torch.stack([x - .5, y - .25], 1) + .04 * torch.randn(n, 2, generator=g)
    return z * torch.tensor([.5, .6])


class Coupling(nn.Module):
    def __init__(self, mask, h=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(2, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 4))
        nn.init.zeros_(self.net[-1].weight); nn.init.zeros_(self.net[-1].bias)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, 1)
        s = torch.tanh(s) * self.scale * (1 - self.mask)
        t = t * (1 - self.mask)
        return x * s.exp() + t, s.sum(1)


class RealNVP(nn.Module):
    def __init__(self, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(torch.tensor([1., 0.]) if i % 2 else torch.tensor([0., 1.])) for i in range(depth))
        self.log_scale = nn.Parameter(torch.zeros(2))

    def log_prob(self, x):
        ld = 0
        for l in self.layers:
            x, d = l(x)
            ld = ld + d
        x = x * self.log_scale.exp()
        return -0.5 * (x ** 2).sum(1) - math.log(2 * math.pi) + ld + self.log_scale.sum()


def train(watch):
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(5)
    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 700, eta_min=1e-5)
    monitor = watch(flow, opt)
    test = two_moons(4000, torch.Generator().manual_seed(77))
    for i in range(700):
        loss = -flow.log_prob(two_moons(256, g)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.)
        opt.step()
        sched.step()
        monitor.log_scalar("nll", loss.detach())
        if i % 100 == 0: print(i, loss.item())
    with torch.no_grad():
        return -flow.log_prob(test).mean().item()
