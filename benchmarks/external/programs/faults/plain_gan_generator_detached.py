"""A GAN on two interleaved half moons. In the generator's step the fake batch from above is reused, and it was detached for the discriminator: the generator
gets no gradient at all and its samples stay a random blob. The result is a chamfer distance to fresh real points, small is good."""
import math
import torch
from torch import nn


def moons(n, g):
    t = torch.rand(n, generator=g) * math.pi
    up = torch.rand(n, generator=g) < 0.5
    x = torch.where(up, torch.cos(t), 1 - torch.cos(t))
    y = torch.where(up, torch.sin(t), 0.5 - torch.sin(t))
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)


class Generator(nn.Module):
    def __init__(self, nz=4):
        super().__init__()
        self.nz = nz
        self.net = nn.Sequential(nn.Linear(nz, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))

    def forward(self, n):
        return self.net(torch.randn(n, self.nz))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def chamfer(a, b):
    d = torch.cdist(a, b)
    return float(d.min(0).values.mean() + d.min(1).values.mean())


def train(watch, mended=False):
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    G, D = Generator(), Discriminator()
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    mon_g, mon_d = watch(G, opt_g), watch(D, opt_d)
    for it in range(800):
        real = moons(128, rng)
        fake = G(128)
        if not mended:
            fake = fake.detach()
        opt_d.zero_grad()
        loss_d = bce(D(real), torch.ones(128, 1)) + bce(D(fake.detach()), torch.zeros(128, 1))
        loss_d.backward()
        opt_d.step()
        mon_d.log_scalar("loss_d", loss_d.detach())

        opt_g.zero_grad()
        loss_g = bce(D(fake), torch.ones(128, 1))
        loss_g.backward()
        opt_g.step()
        mon_g.log_scalar("loss_g", loss_g.detach())
    with torch.no_grad():
        return chamfer(G(500), moons(500, rng))
