"""A small DLRM: multi-hot EmbeddingBags with sparse gradients, a bottom MLP for dense features, pairwise dot products; Adagrad for everything.
Looks odd: Adagrad's rate of 0.04 with ever growing accumulators, heavy-tailed dense features (log transform), rare categories that are hardly ever touched."""
import itertools
import torch
import torch.nn as nn
import torch.nn.functional as F

TABLES, DIM = [400, 120, 50, 1000], 8


def clicks(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.Generator().manual_seed(1234)
    effect = [torch.randn(t, generator=w) * .9 for t in TABLES]
    lat = [torch.randn(t, 2, generator=w) for t in TABLES]
    dense = torch.exp(torch.randn(n, 4, generator=g) * 1.5)
    idx = [((torch.rand(n, 3, generator=g) ** 3) * t).long() for t in TABLES]           # three hits per bag, power-law
    s = -1.2 + .4 * torch.log1p(dense[:, 0]) - .5 * torch.log1p(dense[:, 1])
    for e, i in zip(effect, idx): s = s + e[i].mean(1)
    s = s + .8 * (lat[0][idx[0]].mean(1) * lat[1][idx[1]].mean(1)).sum(1)
    return dense, idx, (torch.rand(n, generator=g) < s.sigmoid()).float()


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(t, DIM, mode="mean", sparse=True) for t in TABLES)
        for b, t in zip(self.bags, TABLES): nn.init.uniform_(b.weight, -t ** -.5, t ** -.5)
        self.bottom = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        self.pairs = list(itertools.combinations(range(len(TABLES) + 1), 2))
        self.top = nn.Sequential(nn.Linear(DIM + len(self.pairs), 32), nn.ReLU(), nn.Linear(32, 1))
        self.wide = nn.ModuleList(nn.EmbeddingBag(t, 1, mode="mean", sparse=True) for t in TABLES)
        for b in self.wide: nn.init.zeros_(b.weight)

    def forward(self, dense, idx):
        d = self.bottom(torch.log1p(dense))
        v = [d] + [b(i) for b, i in zip(self.bags, idx)]
        dots = torch.stack([(v[a] * v[b]).sum(1) for a, b in self.pairs], 1)
        return (self.top(torch.cat([d, dots], 1)) + sum(b(i) for b, i in zip(self.wide, idx))).squeeze(1)


def train(watch):
    torch.manual_seed(0)
    dense, idx, y = clicks(50000, 0)
    dv, iv, yv = clicks(6000, 1)
    net = DLRM()
    opt = torch.optim.Adagrad(net.parameters(), lr=.04)
    monitor = watch(net, opt)
    for ep in range(2):
        for b in torch.randperm(len(y)).split(200):
            loss = F.binary_cross_entropy_with_logits(net(dense[b], [i[b] for i in idx]), y[b])
            opt.zero_grad(); loss.backward(); opt.step()
            monitor.log_scalar("loss", loss.detach())
    with torch.no_grad(): s = net(dv, iv)
    r = s.argsort().argsort().float() + 1
    p = yv.sum()
    return float((r[yv == 1].sum() - p * (p + 1) / 2) / (p * (len(yv) - p)))
