"""An init_weights() function that sets weights and biases of all Linear layers to zero 'to start neutral', for an MLP on two interleaved spirals. All units stay equal and only the last bias
gets a gradient. The result is test accuracy."""
import math
import torch
from torch import nn


def spirals(n, g):
    t = torch.sqrt(torch.rand(n, generator=g)) * 2.2 * math.pi
    y = torch.randint(2, (n,), generator=g)
    r = t / math.pi + 0.1
    ang = t + math.pi * y
    return torch.stack([r * ang.cos(), r * ang.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g), y


def init_zero(m):
    if isinstance(m, nn.Linear):
        nn.init.zeros_(m.weight)
        nn.init.zeros_(m.bias)


def init_kaiming(m):
    if isinstance(m, nn.Linear):
        nn.init.kaiming_uniform_(m.weight, nonlinearity="relu")
        nn.init.zeros_(m.bias)


class MLP(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x, y = spirals(2000, g)
    xt, yt = spirals(800, g)
    model = MLP()
    model.apply(init_kaiming if mended else init_zero)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = nn.CrossEntropyLoss()
    monitor = watch(model, optimizer)
    for epoch in range(18):
        for idx in torch.randperm(2000).chunk(25):
            optimizer.zero_grad()
            loss = loss_fn(model(x[idx]), y[idx])
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
