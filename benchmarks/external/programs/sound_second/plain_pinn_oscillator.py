"""A physics-informed network solves the damped oscillator u'' + 2*d*u' + w^2*u = 0 from initial conditions only.
Looks odd: second derivatives through autograd, no data at all, fresh collocation points in each step, and late times count less than early ones."""
import math
import torch
import torch.nn as nn

D, W = 0.4, 4.0


def exact(t):
    w = math.sqrt(W ** 2 - D ** 2)
    return torch.exp(-D * t) * (torch.cos(w * t) + D / w * torch.sin(w * t))


class Pinn(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, t):
        # initial values are built in: u(0)=1, u'(0)=0
        return 1 + t ** 2 * self.net(2 * t - 2)


def derivative(y, x): return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def train(watch):
    torch.manual_seed(4)
    model = Pinn()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.996)
    monitor = watch(model, opt)
    T = 2.0
    for step in range(800):
        t = (torch.rand(128, 1) * T).requires_grad_(True)
        u = model(t)
        du = derivative(u, t)
        ddu = derivative(du, t)
        # causal weighting: earlier times count more
        res = (ddu + 2 * D * du + W ** 2 * u) / W ** 2
        loss = (torch.exp(-0.5 * t.detach()) * res ** 2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    t = torch.linspace(0, T, 201)[:, None]
    with torch.no_grad():
        return float((model(t) - exact(t)).norm() / exact(t).norm())
