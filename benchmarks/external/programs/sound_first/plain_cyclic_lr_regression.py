"""Triangular cyclic learning rate with cycled momentum (CyclicLR) for a tabular regression (a bike-rental like table).
Odd at first sight: the learning rate goes up and down seven times by a factor of twelve and the loss breathes along.
Returns R^2 on the test table."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    hour = torch.randint(0, 24, (n,), generator=g).float()
    temp, hum, wind = torch.randn(n, generator=g), torch.rand(n, generator=g), torch.rand(n, generator=g)
    holiday = (torch.rand(n, generator=g) < 0.15).float()
    demand = torch.exp(-(hour - 8) ** 2 / 6) * (1 - holiday) + torch.exp(-(hour - 17) ** 2 / 8) + 0.3 * temp - 0.5 * hum * wind + 0.4 * holiday * torch.exp(-(hour - 13) ** 2 / 10)
    y = 100 + 60 * demand + 4 * torch.randn(n, generator=g)
    return torch.stack([hour, temp, hum, wind, holiday], 1), y[:, None]


class Standardize:
    def __init__(self, t):
        self.m, self.s = t.mean(0), t.std(0)

    def __call__(self, t):
        return (t - self.m) / self.s

    def inverse(self, t):
        return t * self.s + self.m


def train(watch):
    torch.manual_seed(5)
    torch.set_num_threads(1)
    x, y = table(6000, 0)
    sx, sy = Standardize(x), Standardize(y)
    loader = DataLoader(TensorDataset(sx(x), sy(y)), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sched = torch.optim.lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.12, step_size_up=47, mode="triangular", cycle_momentum=True, base_momentum=0.8, max_momentum=0.95)
    monitor = watch(model, opt)
    huber = nn.HuberLoss()
    for epoch in range(14):
        for xb, yb in loader:
            loss = huber(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
    xt, yt = table(2000, 1)
    with torch.no_grad():
        pred = sy.inverse(model(sx(xt)))
    return (1 - (pred - yt).square().sum() / (yt - yt.mean()).square().sum()).item()
