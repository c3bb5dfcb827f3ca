"""DDPM (epsilon prediction, 100 steps, linear schedule) on two moons with EMA weights for sampling.
Odd at first sight: after a quick start the loss sits on a noisy plateau far from zero - that is the irreducible part of the noise.
Returns the mean distance of generated points to their nearest held-out data point (pure noise: about 0.5)."""
import copy
import math
import torch
from torch import nn


def moons(n, g):
    t = math.pi * torch.rand(n, generator=g)
    up = torch.rand(n, generator=g) < 0.5
    x = torch.where(up, t.cos(), 1 - t.cos())
    y = torch.where(up, t.sin(), 0.5 - t.sin())
    pts = torch.stack([x - 0.5, y - 0.25], 1) + 0.04 * torch.randn(n, 2, generator=g)
    return pts * 2


class Eps(nn.Module):
    def __init__(self, h=128):
        super().__init__()
        self.freq = nn.Parameter(torch.exp(torch.linspace(0, 2.5, 16)), requires_grad=False)
        self.dirs = nn.Parameter(torch.randn(2, 24) * 1.5, requires_grad=False)          # random Fourier features of the position
        self.net = nn.Sequential(nn.Linear(2 + 48 + 32, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        e = t[:, None].float() / 100 * self.freq
        f = x @ self.dirs
        return self.net(torch.cat([x, f.sin(), f.cos(), e.sin(), e.cos()], 1))


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    T = 100
    beta = torch.linspace(1e-4, 0.1, T)
    abar = torch.cumprod(1 - beta, 0)
    g = torch.Generator().manual_seed(2)
    model = Eps()
    ema = copy.deepcopy(model).eval()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * s / 800)))
    monitor = watch(model, opt)
    for step in range(800):
        x0 = moons(256, g)
        t = torch.randint(0, T, (256,))
        noise = torch.randn_like(x0)
        xt = abar[t, None].sqrt() * x0 + (1 - abar[t, None]).sqrt() * noise
        loss = (model(xt, t) - noise).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        monitor.log_scalar("loss", loss.detach())
        with torch.no_grad():
            decay = min(0.99, (step + 1) / (step + 10))
            for a, b in zip(ema.parameters(), model.parameters()):
                a.mul_(decay).add_(b, alpha=1 - decay)
    with torch.no_grad():
        x = torch.randn(1000, 2)
        for i in reversed(range(T)):
            t = torch.full((1000,), i)
            e = ema(x, t)
            a = 1 - beta[i]
            x = (x - beta[i] / (1 - abar[i]).sqrt() * e) / a.sqrt()
            if i:
                x = x + beta[i].sqrt() * torch.randn_like(x)
    return torch.cdist(x, moons(3000, g)).min(1).values.mean().item()
