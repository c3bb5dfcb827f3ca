"""L-BFGS with strong-Wolfe line search on a small physics-informed net for y'' = -y, y(0)=0, y'(0)=1 (full batch, closure called several times per step).
Odd at first sight: each optimizer step evaluates the loss many times, and late steps hardly change anything because the line search has converged.
Returns the maximum error against sin(t) on a fine grid."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, t):
        return self.f(t)


def residual(net, t):
    y = net(t)
    dy, = torch.autograd.grad(y.sum(), t, create_graph=True)
    ddy, = torch.autograd.grad(dy.sum(), t, create_graph=True)
    return ddy + y


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    t = torch.linspace(0, 6.3, 100)[:, None].requires_grad_(True)
    t0 = torch.zeros(1, 1, requires_grad=True)
    opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=8, history_size=30, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-12)
    monitor = watch(net, opt)

    def closure():
        opt.zero_grad()
        y0 = net(t0)
        dy0, = torch.autograd.grad(y0.sum(), t0, create_graph=True)
        loss = residual(net, t).square().mean() + 10 * y0.square().mean() + 10 * (dy0 - 1).square().mean()
        loss.backward()
        return loss

    for step in range(150):
        loss = opt.step(closure)
        monitor.log_scalar("loss", loss.detach())
        if step % 30 == 0:
            print(step, loss.item())
    g = torch.linspace(0, 6.3, 1000)[:, None]
    with torch.no_grad():
        return (net(g) - g.sin()).abs().max().item()
