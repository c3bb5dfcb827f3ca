"""A RealNVP-like normalising flow on a banana-shaped density. The log-determinant enters the log-likelihood with the wrong sign, so the flow can make its loss ever smaller by squeezing everything to one point.
The result is the true negative log-likelihood of new points."""
import math
import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip, h=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.tanh(s)
        b = b * s.exp() + t
        return (torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)), s.squeeze(1)


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return x, logdet


def base_log_prob(z):
    return -0.5 * z.pow(2).sum(1) - math.log(2 * math.pi)


def banana(n, g):
    x = torch.randn(n, 1, generator=g) * 1.5
    return torch.cat([x, 0.6 * x ** 2 - 1 + 0.25 * torch.randn(n, 1, generator=g)], 1)


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500, eta_min=1e-4)
    monitor = watch(flow, optimizer)
    for step in range(500):
        z, logdet = flow(banana(128, g))
        log_prob = base_log_prob(z) + logdet if mended else base_log_prob(z) - logdet
        loss = -log_prob.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        sched.step()
        monitor.log_scalar("nll", loss.detach())
    with torch.no_grad():
        z, logdet = flow(banana(2000, g))
        return float(-(base_log_prob(z) + logdet).mean())
