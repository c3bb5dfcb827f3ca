"""An energy-based model on a ring of eight Gaussians, trained with Langevin negatives from a replay buffer.
Looks odd: the contrastive loss hovers around zero with either sign and says nothing about progress; parameters are frozen while the sampler runs."""
import math
import torch
import torch.nn as nn


def ring(n):
    k = torch.randint(0, 8, (n,)) * math.pi / 4
    return torch.stack([k.cos(), k.sin()], 1) * 2 + 0.35 * torch.randn(n, 2)


class Energy(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, x): return self.net(x).squeeze(1) + 0.05 * (x ** 2).sum(1)


class ReplayBuffer:
    def __init__(self, size=2000): self.x = torch.rand(size, 2) * 6 - 3

    def sample(self, n):
        self.idx = torch.randint(0, len(self.x), (n,))
        x = self.x[self.idx].clone()
        fresh = torch.rand(n) < 0.05
        x[fresh] = torch.rand(int(fresh.sum()), 2) * 6 - 3
        return x

    def put(self, x): self.x[self.idx] = x


def langevin(energy, x, steps, eps=0.02):
    for p in energy.parameters(): p.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        grad, = torch.autograd.grad(energy(x).sum(), x)
        x = x - 0.5 * eps * grad + math.sqrt(eps) * torch.randn_like(x)
    for p in energy.parameters(): p.requires_grad_(True)
    return x.detach().clamp(-4, 4)


def train(watch):
    torch.manual_seed(0)
    energy = Energy()
    opt = torch.optim.Adam(energy.parameters(), lr=1e-3, betas=(0.5, 0.99))
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=400)
    buf = ReplayBuffer()
    monitor = watch(energy, opt)
    for step in range(400):
        pos = ring(128)
        neg = langevin(energy, buf.sample(128), 25)
        buf.put(neg)
        ep, en = energy(pos), energy(neg)
        loss = ep.mean() - en.mean() + 0.01 * (ep ** 2 + en ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    # held out: normalise on a grid, negative log-likelihood of fresh data
    ax = torch.linspace(-4, 4, 161)
    grid = torch.cartesian_prod(ax, ax)
    with torch.no_grad():
        log_z = torch.logsumexp(-energy(grid), 0) + 2 * math.log(8 / 160)
        return float((energy(ring(4000)) + log_z).mean())
