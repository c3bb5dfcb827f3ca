"""A small patch transformer forecasts several related sensors jointly, with reversible instance normalisation.
Ordinary; AdamW, warmup and cosine, mean squared error against the seasonal naive forecast."""
from dataclasses import dataclass
import math
import torch
import torch.nn as nn


@dataclass
class Cfg:
    look: int = 64
    patch: int = 8
    horizon: int = 16
    dim: int = 40
    heads: int = 4
    layers: int = 2
    steps: int = 400
    batch: int = 48
    lr: float = 2e-3


def sensors(t=4000, c=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = torch.arange(t)
    out = []
    common = torch.zeros(t)
    e = torch.randn(t, generator=g)
    for i in range(1, t): common[i] = .98 * common[i - 1] + .1 * e[i]
    for _ in range(c):
        a, b, p, q = torch.rand(4, generator=g)
        out.append((.5 + a) * torch.sin(k * 6.2832 / 16 + 6.28 * p) + .6 * b * torch.sin(k * 6.2832 / 40 + 6.28 * q) + common + .15 * torch.randn(t, generator=g))
    return torch.stack(out)


class PatchTST(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.emb = nn.Linear(c.patch, c.dim)
        self.pos = nn.Parameter(torch.randn(c.look // c.patch, c.dim) * .02)
        layer = nn.TransformerEncoderLayer(c.dim, c.heads, 2 * c.dim, .1, "gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, c.layers, norm=nn.LayerNorm(c.dim), enable_nested_tensor=False)
        self.head = nn.Linear(c.dim * c.look // c.patch, c.horizon)

    def forward(self, x):
        mu, sd = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-4
        z = ((x - mu) / sd).unfold(1, self.c.patch, self.c.patch)
        z = self.enc(self.emb(z) + self.pos)
        return self.head(z.flatten(1)) * sd + mu


def draw(s, lo, hi, n, c):
    i, t = torch.randint(0, len(s), (n,)), torch.randint(lo, hi - c.look - c.horizon, (n,))
    w = torch.stack([s[a, b:b + c.look + c.horizon] for a, b in zip(i, t)])
    return w[:, :c.look], w[:, c.look:]


def train(watch):
    torch.manual_seed(5)
    c = Cfg()
    s = sensors()
    model = PatchTST(c)
    opt = torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1, (k + 1) / 40) * .5 * (1 + math.cos(math.pi * k / c.steps)))
    monitor = watch(model, opt)
    for step in range(c.steps):
        x, y = draw(s, 0, 3200, c.batch, c)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("mse", loss.detach())
    model.eval()
    with torch.no_grad():
        x, y = draw(s, 3200, 4000, 1000, c)
        return float(1 - ((model(x) - y) ** 2).mean() / ((x[:, -16:] - y) ** 2).mean())
