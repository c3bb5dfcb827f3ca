"""A convnet with BatchNorm and an exponential moving average of the weights that is used for evaluation. The EMA averages model.parameters() only; the running mean and variance
of its BatchNorm layers stay at their start values. The result is the accuracy of the EMA model."""
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay=0.97, buffers=False):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay, self.buffers = decay, buffers

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)
        if self.buffers:
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)


def make():
    def block(i, o):
        return nn.Sequential(nn.Conv1d(i, o, 5, padding=2), nn.BatchNorm1d(o), nn.ReLU(), nn.MaxPool1d(2))
    return nn.Sequential(block(2, 16), block(16, 32), block(32, 32), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 6))


def ecg(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (n,), generator=g)
    t = torch.arange(64.)
    f = (0.15 + 0.05 * (y % 3)).view(-1, 1)
    ph = torch.rand(n, 1, generator=g) * 6.28
    lag = torch.where(y >= 3, 1.6, 0.0).view(-1, 1)
    x = torch.stack([torch.sin(f * t + ph), torch.sin(f * t + ph + lag)], 1)
    return TensorDataset(8 * x + 20 + 4 * torch.randn(n, 2, 64, generator=g), y)


def train(watch, mended=False):
    torch.manual_seed(1)
    model = make()
    ema = EMA(model, buffers=mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    for epoch in range(5):
        model.train()
        for x, y in DataLoader(ecg(3000, 1), batch_size=50, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            monitor.log_scalar("loss", loss.detach())
    x, y = ecg(800, 2).tensors
    with torch.no_grad():
        return float((ema.module(x).argmax(1) == y).float().mean())
