"""Supervised contrastive pre-training of an encoder, then a cross-entropy classifier on top of the frozen encoder; a second watch for the second stage.
Odd at first sight: the contrastive loss cannot go below log(number of positives), about 2.7 here; it stops there.
Returns test accuracy (8 classes)."""
import torch
from torch import nn
import torch.nn.functional as F


def spirals(n, seed, arms=8):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, arms, (n,), generator=g)
    r = torch.rand(n, generator=g) * 0.9 + 0.1
    th = 2 * torch.pi * y / arms + 2.5 * r + 0.08 * torch.randn(n, generator=g)
    return torch.stack([r * th.cos(), r * th.sin()], 1) * 2, y


def supcon(z, y, tau=0.1):
    z = F.normalize(z, dim=1)
    s = z @ z.T / tau
    eye = torch.eye(len(z), dtype=torch.bool)
    logp = s - torch.logsumexp(s.masked_fill(eye, -1e9), 1, keepdim=True)
    pos = (y[:, None] == y[None]) & ~eye
    n = pos.sum(1).clamp(min=1)
    return -(logp * pos).sum(1).div(n).mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.head(self.trunk(x))


def train(watch):
    torch.manual_seed(31)
    torch.set_num_threads(1)
    x, y = spirals(4000, 0)
    xt, yt = spirals(1000, 1)
    enc = Encoder()
    opt = torch.optim.Adam(enc.parameters(), lr=2e-3)
    mon = watch(enc, opt)
    for it in range(550):
        i = torch.randint(0, 4000, (128,))
        loss = supcon(enc(x[i]), y[i])
        opt.zero_grad(); loss.backward(); opt.step()
        mon.log_scalar("supcon", loss.detach())
    enc.requires_grad_(False).eval()
    clf = nn.Linear(64, 8)
    copt = torch.optim.SGD(clf.parameters(), lr=0.1, momentum=0.9)
    cmon = watch(clf, copt)
    for it in range(200):
        i = torch.randint(0, 4000, (256,))
        loss = F.cross_entropy(clf(enc.trunk(x[i])), y[i])
        copt.zero_grad(); loss.backward(); copt.step()
        cmon.log_scalar("ce", loss.detach())
    with torch.no_grad():
        return (clf(enc.trunk(xt)).argmax(1) == yt).float().mean().item()
