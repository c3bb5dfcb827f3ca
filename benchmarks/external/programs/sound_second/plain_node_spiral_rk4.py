"""A neural ODE with a hand-written RK4 unroll learns a cubic spiral from noisy segments of trajectories.
Ordinary for the field; the network is used dozens of times in one forward pass."""
import torch
import torch.nn as nn

A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


def rk4(f, y, dt):
    k1 = f(y); k2 = f(y + dt / 2 * k1); k3 = f(y + dt / 2 * k2); k4 = f(y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def integrate(f, y, dt, n):
    out = [y]
    for _ in range(n):
        y = rk4(f, y, dt)
        out.append(y)
    return torch.stack(out, 1)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.1); nn.init.zeros_(m.bias)

    def forward(self, y): return self.net(y ** 3)


def train(watch):
    torch.manual_seed(0)
    true = lambda y: (y ** 3) @ A
    dt, seg = 0.025, 14
    y0 = torch.randn(12, 2); y0 = y0 / y0.norm(dim=1, keepdim=True) * (1 + 0.5 * torch.rand(12, 1))
    traj = integrate(true, y0, dt, 300)
    noisy = traj[:10] + 0.01 * torch.randn_like(traj[:10])
    func = ODEFunc()
    opt = torch.optim.Adam(func.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400)
    watch(func, opt)
    for it in range(400):
        i, s = torch.randint(0, 10, (32,)), torch.randint(0, 300 - seg, (32,))
        target = torch.stack([noisy[a, b:b + seg + 1] for a, b in zip(i, s)])
        pred = integrate(func, target[:, 0], dt, seg)
        loss = (pred - target).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if it % 50 == 0:
            print(it, loss.item())
    with torch.no_grad():
        pred = integrate(func, traj[10:, 0], dt, 60)
        return float((pred - traj[10:, :61]).abs().mean())
