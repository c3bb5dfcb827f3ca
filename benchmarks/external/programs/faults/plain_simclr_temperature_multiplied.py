"""SimCLR on augmented 1-d signals, as in much copied code: the positive is the partner in the 2N x 2N similarity matrix. The temperature multiplies the cosine similarity where it should
divide it, so the softmax is nearly flat and there is little to learn from. The result is the nearest-neighbour accuracy of the features."""
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 24, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(24, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.proj = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        h = self.conv(x)
        return h, F.normalize(self.proj(h), dim=1)


def nt_xent(za, zb, tau, mended):
    z = torch.cat([za, zb])
    n = len(za)
    sim = z @ z.T
    sim = sim / tau if mended else sim * tau
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def motifs(n, bank, g):
    y = torch.randint(len(bank), (n,), generator=g)
    return bank[y], y


def augment(m, g):
    n, L = m.shape
    out = 0.35 * torch.randn(n, 48, generator=g)
    pos = torch.randint(0, 48 - L, (n,), generator=g)
    scale = 0.7 + 0.6 * torch.rand(n, 1, generator=g)
    cols = pos.unsqueeze(1) + torch.arange(L)
    return out.scatter_add(1, cols, m * scale).unsqueeze(1)


def knn(model, bank, g):
    ref, ry = motifs(800, bank, g)
    q, qy = motifs(400, bank, g)
    with torch.no_grad():
        a, b = model(augment(ref, g))[1], model(augment(q, g))[1]
    return float((ry[(b @ a.T).topk(15, dim=1).indices].mode(1).values == qy).float().mean())


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    bank = torch.randn(10, 14, generator=g)
    bank = bank / bank.norm(dim=1, keepdim=True) * 3
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    for step in range(400):
        m, _ = motifs(64, bank, g)
        _, za = model(augment(m, g))
        _, zb = model(augment(m, g))
        loss = nt_xent(za, zb, 0.1, mended)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("nt_xent", loss.detach())
    return knn(model, bank, g)
