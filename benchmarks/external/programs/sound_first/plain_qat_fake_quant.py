"""Quantisation-aware fine-tuning: a trained float CNN continues with 4-bit fake-quantised weights and straight-through gradients.
Odd at first sight: weights pass a rounding function whose true derivative is zero, and the loss is higher at the start than the float model's.
Returns test accuracy with quantised weights (float model about the same)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset


class FakeQuant(nn.Module):
    def __init__(self, bits=4):
        super().__init__()
        self.levels = 2 ** (bits - 1) - 1

    def forward(self, w):
        scale = w.detach().abs().flatten(1).max(1).values.clamp(min=1e-8) / self.levels
        scale = scale.view(-1, *[1] * (w.dim() - 1))
        q = (w / scale).round().clamp(-self.levels, self.levels) * scale
        return w + (q - w).detach()


def crosses(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.zeros(n, 1, 9, 9)
    c = torch.randint(2, 7, (n, 2), generator=g)
    for i in range(n):
        a, b = c[i].tolist()
        for k in range(-2, 3):
            if y[i] == 0:
                x[i, 0, a + k, b] = x[i, 0, a, b + k] = 1
            elif y[i] == 1:
                x[i, 0, a + k, b + k] = x[i, 0, a + k, b - k] = 1
            else:
                x[i, 0, a + k, b - 2] = x[i, 0, a + k, b + 2] = x[i, 0, a - 2, b + k] = x[i, 0, a + 2, b + k] = 1
    return x + 0.45 * torch.randn(x.shape, generator=g), y


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        return self.fc(F.relu(self.c2(x)).amax((2, 3)))


def epoch(net, opt, loader, monitor=None):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if monitor is not None:
            monitor.log_scalar("loss", loss.detach())


def train(watch):
    torch.manual_seed(18)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*crosses(2500, 0)), batch_size=50, shuffle=True)
    xt, yt = crosses(1000, 1)
    net = CNN()
    acc = lambda: (net(xt).argmax(1) == yt).float().mean().item()
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(8):
        epoch(net, opt, loader)
    with torch.no_grad():
        print("float", acc())
    for m in (net.c1, net.c2, net.fc):
        parametrize.register_parametrization(m, "weight", FakeQuant(4))
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    monitor = watch(net, opt)
    for e in range(6):
        epoch(net, opt, loader, monitor)
    with torch.no_grad():
        return acc()
