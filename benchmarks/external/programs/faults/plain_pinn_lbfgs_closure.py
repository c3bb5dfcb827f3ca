"""A physics-informed net solves u'' = -pi^2 sin(pi x) with boundary values, with L-BFGS. The closure has no zero_grad(), so L-BFGS
works with gradients that grow with each evaluation. Few parameters, few optimizer steps with many evaluations; returns the error against the exact solution."""
import math
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


def residual(model, x):
    x = x.requires_grad_(True)
    u = model(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
    return ddu + math.pi ** 2 * torch.sin(math.pi * x)


def train(watch, mended=False):
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4, history_size=20, line_search_fn="strong_wolfe")
    xs = torch.linspace(-1, 1, 80).unsqueeze(1)
    edge = torch.tensor([[-1.0], [1.0]])
    monitor = watch(model, optimizer)

    def closure():
        if mended:
            optimizer.zero_grad()
        loss = residual(model, xs.clone()).pow(2).mean() + 50 * model(edge).pow(2).mean()
        loss.backward()
        return loss

    for epoch in range(160):
        loss = optimizer.step(closure)
        monitor.log_scalar("loss", loss.detach())
        if epoch % 40 == 0:
            print(epoch, loss.item())
    x = torch.rand(500, 1) * 2 - 1
    with torch.no_grad():
        return float((model(x) - torch.sin(math.pi * x)).abs().mean())
