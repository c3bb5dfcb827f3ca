"""Kendall-style uncertainty weighting of three regression losses with learned log variances.
Odd at first sight: the total loss goes below zero and keeps sinking, since each term contains +log(sigma) of a well predicted task.
Returns the mean R^2 over the three tasks on test data."""
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader


class WeightedSum(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        losses = torch.stack(losses)
        return (0.5 * torch.exp(-self.s) * losses + 0.5 * self.s).sum()


class House(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(8, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU())
        self.price, self.rent, self.days = nn.Linear(96, 1), nn.Linear(96, 1), nn.Linear(96, 1)
        self.loss = WeightedSum(3)

    def forward(self, x):
        h = self.base(x)
        return torch.cat([self.price(h), self.rent(h), self.days(h)], 1)


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    size, loc = x[:, 0], x[:, 1]
    price = size + 0.5 * loc ** 2 + 0.3 * x[:, 2] * loc
    rent = 0.7 * size + torch.tanh(loc) + 0.2 * x[:, 3]
    days = -0.5 * torch.sigmoid(2 * loc) + 0.4 * x[:, 4].abs()
    y = torch.stack([price, rent, days], 1)
    return x, y + torch.tensor([0.05, 0.1, 0.05]) * torch.randn(n, 3, generator=g)


def train(watch):
    torch.manual_seed(45)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*houses(6000, 0)), batch_size=128, shuffle=True)
    model = House()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, epochs=14, steps_per_epoch=len(loader))
    monitor = watch(model, opt)
    for epoch in range(14):
        for x, y in loader:
            err = (model(x) - y).square().mean(0)
            loss = model.loss(list(err))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("sigma_price", model.loss.s[0].detach().exp())
    x, y = houses(2000, 1)
    with torch.no_grad():
        return (1 - (model(x) - y).square().mean(0) / y.var(0)).mean().item()
