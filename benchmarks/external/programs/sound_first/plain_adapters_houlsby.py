"""Bottleneck adapters (Houlsby) with zero-initialised up-projections in a frozen residual MLP that was trained for another rotation of the data.
Odd at first sight: most modules have requires_grad=False, and the adapters' down-projections get no gradient in the very first step.
Returns test accuracy on the new domain (ten classes)."""
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader

CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(55)) * 1.5


def domain(n, seed, rotate):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    x = CENTERS[y] + 0.9 * torch.randn(n, 16, generator=g)
    if rotate:
        q, _ = torch.linalg.qr(torch.eye(16) + 0.35 * torch.randn(16, 16, generator=torch.Generator().manual_seed(7)))
        x = x @ q * torch.sign(q.diagonal())
    return x, y


class Adapter(nn.Module):
    def __init__(self, d, b=12):
        super().__init__()
        self.down, self.up = nn.Linear(d, b), nn.Linear(b, d)
        nn.init.zeros_(self.up.weight); nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class ResMLP(nn.Module):
    def __init__(self, d=64, depth=3):
        super().__init__()
        self.stem = nn.Linear(16, d)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(depth)])
        self.adapters = nn.ModuleList([nn.Identity() for _ in range(depth)])
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        h = self.stem(x)
        for b, a in zip(self.blocks, self.adapters):
            h = a(h + b(h))
        return self.head(h)


def fit(model, params, data, epochs, lr, watch=None):
    opt = torch.optim.Adam(params, lr=lr)
    mon = watch(model, opt) if watch else None
    for _ in range(epochs):
        for x, y in DataLoader(TensorDataset(*data), batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if mon:
                mon.log_scalar("loss", loss.detach())


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def train(watch):
    torch.manual_seed(4)
    torch.set_num_threads(1)
    net = ResMLP()
    fit(net, net.parameters(), domain(3000, 0, False), 5, 1e-3)
    test = domain(2000, 3, True)
    print("source model on new domain", accuracy(net, *test))
    net.requires_grad_(False)
    net.adapters = nn.ModuleList([Adapter(64) for _ in range(3)])
    net.head.requires_grad_(True)
    fit(net, [p for p in net.parameters() if p.requires_grad], domain(2000, 2, True), 10, 2e-3, watch)
    return accuracy(net, *test)
