"""A continuous normalising flow with exact trace (two dimensions) and a fixed-step RK4 solver learns three blobs.
Looks odd: derivatives inside the forward pass (autograd.grad with create_graph) and a network that is evaluated 24 times for each loss."""
import math
import torch
import torch.nn as nn


class Field(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))
        nn.init.normal_(self.net[-1].weight, std=.05); nn.init.zeros_(self.net[-1].bias)

    def forward(self, t, z):
        with torch.enable_grad():
            if not z.requires_grad: z = z.requires_grad_(True)
            v = self.net(torch.cat([z, torch.full_like(z[:, :1], t)], 1))
            tr = sum(torch.autograd.grad(v[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(2))
        return v, -tr


def log_prob(field, x, steps=6):
    h = 1 / steps
    z, l = x.clone().requires_grad_(True), torch.zeros(len(x))
    for k in range(steps):
        t = k * h
        v1, d1 = field(t, z)
        v2, d2 = field(t + h / 2, z + h / 2 * v1)
        v3, d3 = field(t + h / 2, z + h / 2 * v2)
        v4, d4 = field(t + h, z + h * v3)
        z = z + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)
        l = l + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)
    return -.5 * (z ** 2).sum(1) - math.log(2 * math.pi) - l


def blobs(n, g):
    k = torch.randint(0, 3, (n,), generator=g) * 2 * math.pi / 3
    return 1.6 * torch.stack([k.cos(), k.sin()], 1) + .35 * torch.randn(n, 2, generator=g)


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    field = Field()
    opt = torch.optim.Adam(field.parameters(), lr=8e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 250, eta_min=2e-4)
    monitor = watch(field, opt)
    for step in range(250):
        loss = -log_prob(field, blobs(128, g)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(field.parameters(), 5.)
        opt.step()
        sched.step()
        monitor.log_scalar("nll", loss.detach())
        if step % 50 == 0: print(step, loss.item())
    return -log_prob(field, blobs(1500, torch.Generator().manual_seed(2))).mean().item()      # the entropy is about 1.83
