"""An inverse problem with a PINN: from noisy temperatures of a rod it learns the field and the unknown diffusivity at once.
Looks odd: one physical scalar is trained beside the net with its own group and rate (as a log), and the physics residual is allowed to grow at first, while the data are being fitted."""
import math
import torch
import torch.nn as nn

KAPPA = 0.3


def field(x, t):
    s = torch.sin
    return s(math.pi * x) * torch.exp(-KAPPA * math.pi ** 2 * t) + .5 * s(2 * math.pi * x) * torch.exp(-KAPPA * 4 * math.pi ** 2 * t)


class Rod(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))
        self.log_kappa = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, t): return x * (1 - x) * 4 * self.net(torch.cat([2 * x - 1, 4 * t - 1], 1))      # cold ends are built in


def residual(m, x, t):
    x, t = x.requires_grad_(True), t.requires_grad_(True)
    u = m(x, t)
    ux, ut = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    uxx, = torch.autograd.grad(ux.sum(), x, create_graph=True)
    return ut - m.log_kappa.exp() * uxx


def train(watch):
    torch.manual_seed(16)
    xd, td = torch.rand(400, 1), torch.rand(400, 1) * .5
    ud = field(xd, td) + .02 * torch.randn(400, 1)
    m = Rod()
    opt = torch.optim.Adam([{"params": m.net.parameters(), "lr": 5e-3}, {"params": [m.log_kappa], "lr": 1e-2}])
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, .9965)
    monitor = watch(m, opt)
    for step in range(800):
        x, t = torch.rand(128, 1), torch.rand(128, 1) * .5
        data = ((m(xd, td) - ud) ** 2).mean()
        phys = (residual(m, x, t) ** 2).mean()
        loss = 20 * data + .05 * phys
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    print("kappa", m.log_kappa.exp().item(), "true", KAPPA)
    return abs(m.log_kappa.exp().item() - KAPPA) / KAPPA
