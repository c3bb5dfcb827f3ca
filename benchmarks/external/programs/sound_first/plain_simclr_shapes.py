"""SimCLR (NT-Xent) on synthetic 1-D waveforms with random augmentations, then a linear probe on the frozen encoder.
Odd at first sight: the contrastive loss levels out well above zero (there are always confusable negatives) although the features keep being useful.
Returns the accuracy of the linear probe on held-out signals (four wave shapes, chance 0.25)."""
import math
import torch
from torch import nn
import torch.nn.functional as F


def waves(n, g):
    y = torch.randint(0, 4, (n,), generator=g)
    f = 2 + 2 * torch.rand(n, 1, generator=g)
    ph = torch.rand(n, 1, generator=g)
    u = (torch.linspace(0, 1, 64)[None] * f + ph) % 1
    forms = torch.stack([torch.sin(2 * math.pi * u), torch.sign(u - 0.5), 2 * u - 1, 4 * (u - 0.5).abs() - 1], 1)
    x = forms[torch.arange(n), y]
    return x + 0.05 * torch.randn(n, 64, generator=g), y


def augment(x):
    n = len(x)
    shift = torch.randint(0, 64, (n, 1))
    x = x.gather(1, (torch.arange(64)[None] + shift) % 64)
    x = x * (0.7 + 0.6 * torch.rand(n, 1)) + 0.15 * torch.randn_like(x)
    return torch.where(torch.rand(n, 1) < 0.5, x, -x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 24, 7, 2, 3), nn.BatchNorm1d(24), nn.ReLU(), nn.Conv1d(24, 48, 5, 2, 2), nn.BatchNorm1d(48), nn.ReLU(),
                                  nn.Conv1d(48, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.proj = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.proj(self.conv(x[:, None]))


def nt_xent(a, b, tau=0.2):
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = z @ z.T / tau
    sim.fill_diagonal_(float("-inf"))
    n = len(a)
    return F.cross_entropy(sim, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def train(watch):
    torch.manual_seed(10)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    x, y = waves(3000, g)
    xt, yt = waves(1000, g)
    enc = Encoder()
    opt = torch.optim.AdamW(enc.parameters(), lr=2e-3, weight_decay=1e-3)
    steps = 200
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    monitor = watch(enc, opt)
    for i in range(steps):
        b = x[torch.randint(0, len(x), (160,))]
        loss = nt_xent(enc(augment(b)), enc(augment(b)))
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        monitor.log_scalar("loss", loss.detach())
    enc.eval()
    with torch.no_grad():
        f, ft = enc.conv(x[:, None]), enc.conv(xt[:, None])
    mu, sd = f.mean(0), f.std(0) + 1e-5
    f, ft = (f - mu) / sd, (ft - mu) / sd
    probe = nn.Linear(64, 4)
    popt = torch.optim.Adam(probe.parameters(), 0.02)
    pm = watch(probe, popt)
    for _ in range(150):
        l = F.cross_entropy(probe(f), y)
        popt.zero_grad(); l.backward(); popt.step()
        pm.log_scalar("loss", l.detach())
    return (probe(ft).argmax(1) == yt).float().mean().item()
