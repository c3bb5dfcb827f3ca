"""A causal temporal convolution net predicts three quantiles of the next values by the pinball loss.
Looks odd: the pinball loss soon rests on a floor set by the noise, while the coverage of the quantiles is what improves; weight norm splits each kernel in two parameters."""
import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm

Q = torch.tensor([.1, .5, .9])


def traffic(n, seed):
    r = np.random.default_rng(seed)
    t = np.arange(n)
    level = 1 + .6 * np.sin(2 * np.pi * t / 24) + .25 * np.sin(2 * np.pi * t / 12 + 1)
    x = np.zeros(n)
    for k in range(1, n): x[k] = .7 * x[k - 1] + .12 * (1 + level[k]) * r.normal()       # noise grows with the level
    return torch.tensor(level + x, dtype=torch.float32)


class Causal(nn.Module):
    def __init__(self, i, o, d):
        super().__init__()
        self.pad = 2 * d
        self.c1, self.c2 = weight_norm(nn.Conv1d(i, o, 3, dilation=d)), weight_norm(nn.Conv1d(o, o, 3, dilation=d))
        self.skip = nn.Conv1d(i, o, 1) if i != o else nn.Identity()
        self.drop = nn.Dropout(.05)

    def forward(self, x):
        h = self.drop(torch.relu(self.c1(nn.functional.pad(x, (self.pad, 0)))))
        h = self.drop(torch.relu(self.c2(nn.functional.pad(h, (self.pad, 0)))))
        return torch.relu(h + self.skip(x))


class TCN(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        self.body = nn.Sequential(Causal(1, c, 1), Causal(c, c, 2), Causal(c, c, 4))
        self.out = nn.Conv1d(c, 3, 1)

    def forward(self, x):
        o = self.out(self.body(x[:, None]))
        mid, lo, hi = o[:, 1], nn.functional.softplus(o[:, 0]), nn.functional.softplus(o[:, 2])
        return torch.stack([mid - lo, mid, mid + hi], -1)          # quantiles cannot cross


def pinball(f, y):
    e = y[..., None] - f
    return torch.maximum(Q * e, (Q - 1) * e).mean()


def train(watch):
    torch.manual_seed(9)
    s, v = traffic(8000, 0), traffic(3000, 1)
    net = TCN()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=400)
    monitor = watch(net, opt)
    for step in range(400):
        i = torch.randint(0, len(s) - 80, (32,))
        w = torch.stack([s[k:k + 80] for k in i])
        f = net(w[:, :-1])[:, 24:]
        loss = pinball(f, w[:, 25:])
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        monitor.log_scalar("pinball", loss.detach())
    net.eval()
    with torch.no_grad():
        f = net(v[None, :-1])[0, 24:]
        y = v[25:]
        cover = ((y > f[:, 0]) & (y < f[:, 2])).float().mean()
        print("coverage (0.8 wanted)", cover.item())
        return float(pinball(f, y))
