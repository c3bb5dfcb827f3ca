"""A two-tower retrieval model (queries and articles) with in-batch softmax and one optimizer for both towers. The article tower is called under torch.no_grad(), left over from a version with a fixed index,
so only the query tower is trained. The result is the recall at one among 200 articles."""
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Settings:
    dim: int = 8
    lr: float = 2e-3
    batch: int = 64
    epochs: int = 10
    scale: float = 10.0


class Tower(nn.Module):
    def __init__(self, n_in, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 96), nn.ReLU(), nn.Linear(96, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class TwoTower(nn.Module):
    def __init__(self, cfg, mended):
        super().__init__()
        self.query, self.item = Tower(30, cfg.dim), Tower(60, cfg.dim)
        self.mended = mended

    def forward(self, q, a):
        u = self.query(q)
        if self.mended:
            v = self.item(a)
        else:
            with torch.no_grad():
                v = self.item(a)
        return u @ v.T


def clicks(n, seed):
    w = torch.Generator().manual_seed(12)
    A, B = torch.randn(5, 30, generator=w), torch.randn(5, 60, generator=w)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 5, generator=g)
    q = torch.sin(z @ A * 0.4) + 0.1 * torch.randn(n, 30, generator=g)
    a = torch.sin(z @ B * 0.4) * 0.5 + 0.2 * torch.randn(n, 60, generator=g)
    return TensorDataset(q, a)


def train(watch, mended=False):
    cfg = Settings()
    torch.manual_seed(0)
    model = TwoTower(cfg, mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    monitor = watch(model, optimizer)
    for epoch in range(cfg.epochs):
        for q, a in DataLoader(clicks(3840, 1), batch_size=cfg.batch, shuffle=True):
            logits = cfg.scale * model(q, a)
            loss = F.cross_entropy(logits, torch.arange(len(q)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    q, a = clicks(200, 2).tensors
    with torch.no_grad():
        return float((model(q, a).argmax(1) == torch.arange(200)).float().mean())
