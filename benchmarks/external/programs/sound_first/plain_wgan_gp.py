"""WGAN with gradient penalty on a swiss roll, four critic steps for one generator step.
Odd at first sight: the critic loss is negative at first and creeps to around zero (it is minus the estimated distance, plus the penalty), the
generator's "loss" drifts without meaning, and double backward is used for the penalty. Returns the energy distance to held-out data."""
from dataclasses import dataclass
import torch
from torch import nn, autograd


@dataclass
class Config:
    z_dim: int = 4
    hidden: int = 128
    batch: int = 256
    gp: float = 0.1
    n_critic: int = 4
    gen_steps: int = 200
    lr: float = 1e-3
    seed: int = 3


class Critic(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)


class Generator(nn.Module):
    def __init__(self, z, h):
        super().__init__()
        self.z = z
        self.body = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, n):
        return self.body(torch.randn(n, self.z))


def swiss_roll(n):
    t = 1.5 * torch.pi * (1 + 2 * torch.rand(n))
    return torch.stack([t * t.cos(), t * t.sin()], 1) / 8 + 0.05 * torch.randn(n, 2)


def gradient_penalty(critic, real, fake):
    a = torch.rand(real.size(0), 1)
    x = (a * real + (1 - a) * fake).requires_grad_(True)
    (g,) = autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train(watch):
    cfg = Config()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    net = nn.ModuleDict({"critic": Critic(cfg.hidden), "gen": Generator(cfg.z_dim, cfg.hidden)})
    opt_c = torch.optim.Adam(net["critic"].parameters(), lr=cfg.lr, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(net["gen"].parameters(), lr=cfg.lr, betas=(0.0, 0.9))
    monitor = watch(net, opt_c, opt_g)
    for it in range(cfg.gen_steps):
        for _ in range(cfg.n_critic):
            real = swiss_roll(cfg.batch)
            with torch.no_grad():
                fake = net["gen"](cfg.batch)
            wdist = net["critic"](real).mean() - net["critic"](fake).mean()
            loss_c = -wdist + cfg.gp * gradient_penalty(net["critic"], real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            monitor.log_scalar("critic_loss", loss_c.detach())
        net["critic"].requires_grad_(False)
        loss_g = -net["critic"](net["gen"](cfg.batch)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        net["critic"].requires_grad_(True)
        monitor.log_scalar("gen_loss", loss_g.detach())
        if it % 50 == 0:
            print(it, round(wdist.item(), 4))
    with torch.no_grad():
        return energy_distance(net["gen"](2000), swiss_roll(2000))
