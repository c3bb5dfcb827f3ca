"""A deep MLP with sigmoid between the eight layers, SGD with momentum, for a nonlinear sensor classification: the gradient dies on the way down. With ReLU in its place the
same net learns. The result is test accuracy."""
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Cfg:
    depth: int = 8
    width: int = 64
    lr: float = 0.05
    epochs: int = 10
    batch: int = 64


def make_net(cfg, act):
    layers, d = [], 20
    for _ in range(cfg.depth):
        lin = nn.Linear(d, cfg.width)
        nn.init.kaiming_normal_(lin.weight)
        layers += [lin, act()]
        d = cfg.width
    return nn.Sequential(*layers, nn.Linear(d, 4))


def sensors(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.Generator().manual_seed(55)
    A, B = torch.randn(20, 6, generator=w) * 0.4, torch.randn(6, 4, generator=w)
    x = torch.randn(n, 20, generator=g)
    return TensorDataset(x, (torch.tanh(x @ A) @ B).argmax(1))


def train(watch, mended=False):
    cfg = Cfg()
    torch.manual_seed(0)
    model = make_net(cfg, nn.ReLU if mended else nn.Sigmoid)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    loader = DataLoader(sensors(3000, 1), batch_size=cfg.batch, shuffle=True)
    monitor = watch(model, optimizer)
    for epoch in range(cfg.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    x, y = sensors(1000, 2).tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
