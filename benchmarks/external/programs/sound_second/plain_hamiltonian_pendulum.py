"""A Hamiltonian network learns the pendulum: the scalar output is differentiated with respect to the state, and the field is fitted to measured derivatives.
Looks odd: the loss is a function of input gradients, float64 throughout, and the output layer has no bias because only the derivative of H counts."""
import torch
import torch.nn as nn


class HNN(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1, bias=False))

    def forward(self, s):
        s = s.requires_grad_(True)
        g, = torch.autograd.grad(self.net(s).sum(), s, create_graph=True)
        return torch.stack([g[:, 1], -g[:, 0]], 1)


def pendulum(s): return torch.stack([s[:, 1], -torch.sin(s[:, 0])], 1)


def states(n, g): return (torch.rand(n, 2, generator=g, dtype=torch.float64) * 2 - 1) * torch.tensor([2.5, 1.8], dtype=torch.float64)


def rollout(f, s, dt=.05, n=100):
    out = [s]
    for _ in range(n):
        k1 = f(s).detach(); k2 = f(s + dt / 2 * k1).detach(); k3 = f(s + dt / 2 * k2).detach(); k4 = f(s + dt * k3).detach()
        s = (s + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).detach()
        out.append(s)
    return torch.stack(out)


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    s = states(1500, g)
    ds = pendulum(s) + .05 * torch.randn(s.shape, generator=g, dtype=torch.float64)
    model = HNN().double()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, .995)
    monitor = watch(model, opt)
    for step in range(700):
        i = torch.randint(0, len(s), (128,), generator=g)
        loss = ((model(s[i].clone()) - ds[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    s0 = states(20, g) * .6
    return float((rollout(model, s0.clone()) - rollout(pendulum, s0)).abs().mean())      # error of five seconds of motion
