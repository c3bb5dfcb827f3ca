"""A small N-BEATS (trend and seasonality stacks with fixed bases) forecasts hourly power demand.
Ordinary forecasting with a per-window scale and a smoothed absolute loss; held-out measure is the skill against the seasonal naive forecast."""
import math
import numpy as np
import torch
import torch.nn as nn

LOOK, HOR = 72, 24


def demand(n_series=20, n=1500, seed=0):
    r = np.random.default_rng(seed)
    t = np.arange(n)
    out = []
    for _ in range(n_series):
        day = np.sin(2 * np.pi * (t / 24 + r.random())) + .4 * np.sin(4 * np.pi * (t / 24 + r.random()))
        week = .3 * np.sin(2 * np.pi * (t / 168 + r.random()))
        ar = np.zeros(n)
        e = r.normal(0, .12, n)
        for k in range(1, n): ar[k] = .95 * ar[k - 1] + e[k]
        out.append(r.uniform(50, 400) * (3 + (1 + .3 * week) * day + week + ar + .0003 * t * r.normal()))
    return torch.tensor(np.stack(out), dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, basis_back, basis_fore, h=64):
        super().__init__()
        self.register_buffer("bb", basis_back); self.register_buffer("bf", basis_fore)
        self.fc = nn.Sequential(nn.Linear(LOOK, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.tb, self.tf = nn.Linear(h, len(basis_back), bias=False), nn.Linear(h, len(basis_fore), bias=False)

    def forward(self, x):
        z = self.fc(x)
        return self.tb(z) @ self.bb, self.tf(z) @ self.bf


def trend(p=3):
    tb, tf = torch.linspace(-1, 0, LOOK), torch.linspace(0, HOR / LOOK, HOR)
    return torch.stack([tb ** k for k in range(p)]), torch.stack([tf ** k for k in range(p)])


def season(k=6):
    tb, tf = torch.arange(-LOOK, 0).float(), torch.arange(HOR).float()
    f = lambda t: torch.cat([torch.stack([torch.cos(2 * math.pi * j * t / 24) for j in range(1, k)]), torch.stack([torch.sin(2 * math.pi * j * t / 24) for j in range(1, k)])])
    return f(tb), f(tf)


class NBeats(nn.Module):
    def __init__(self):
        super().__init__()
        eye = (torch.eye(LOOK), torch.eye(HOR))
        self.blocks = nn.ModuleList([Block(*trend()), Block(*trend()), Block(*season()), Block(*season()), Block(*eye)])

    def forward(self, x):
        mu, sd = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-3
        x = (x - mu) / sd
        total = 0
        for b in self.blocks:
            back, fore = b(x)
            x = x - back
            total = total + fore
        return total * sd + mu, sd


def windows(s, lo, hi, n, gen):
    i = torch.randint(0, len(s), (n,), generator=gen)
    t = torch.randint(lo, hi - LOOK - HOR, (n,), generator=gen)
    w = torch.stack([s[a, b:b + LOOK + HOR] for a, b in zip(i, t)])
    return w[:, :LOOK], w[:, LOOK:]


def train(watch):
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    s = demand()
    model = NBeats()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
    lossf = nn.SmoothL1Loss(beta=0.1)
    monitor = watch(model, opt)
    for step in range(600):
        x, y = windows(s, 0, 1200, 128, gen)
        f, sd = model(x)
        loss = lossf(f / sd, y / sd)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
        if step % 100 == 99: print(step, loss.item())
    with torch.no_grad():
        x, y = windows(s, 1200, 1500, 1000, gen)
        f, sd = model(x)
        mase = ((f - y).abs() / sd).mean() / ((x[:, -24:] - y).abs() / sd).mean()
    return float(1 - mase)
