"""A GAN that makes short curves (16 samples of a sine with random amplitude and phase). The generator's optimizer was given the parameters of both nets, so each generator step
also teaches the discriminator to call the fakes real. The result is the distance of means and covariances of made and real curves."""
import math
import torch
from torch import nn


class CurveGenerator(nn.Module):
    def __init__(self, nz=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(nz, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, z):
        return self.net(z)


class CurveCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def curves(n, rng):
    t = torch.linspace(0, 2 * math.pi, 16)
    amp, ph = 0.5 + torch.rand(n, 1, generator=rng), torch.rand(n, 1, generator=rng) * 1.5
    return amp * torch.sin(t + ph) + 0.5


def moments(x):
    return x.mean(0), torch.cov(x.T)


def train(watch, mended=False):
    torch.manual_seed(3)
    rng = torch.Generator().manual_seed(4)
    netG, netD = CurveGenerator(), CurveCritic()
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    g_params = list(netG.parameters()) if mended else list(netG.parameters()) + list(netD.parameters())
    optG = torch.optim.Adam(g_params, lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    monitor = watch(nn.ModuleDict({"G": netG, "D": netD}), optG, optD)
    for i in range(800):
        optD.zero_grad()
        real = curves(64, rng)
        fake = netG(torch.randn(64, 6))
        errD = criterion(netD(real), torch.full((64, 1), 0.9)) + criterion(netD(fake.detach()), torch.zeros(64, 1))
        errD.backward()
        optD.step()
        optG.zero_grad()
        errG = criterion(netD(fake), torch.ones(64, 1))
        errG.backward()
        optG.step()
        monitor.log_scalar("errD", errD.detach())
        monitor.log_scalar("errG", errG.detach())
    netG.eval()
    with torch.no_grad():
        (m1, c1), (m2, c2) = moments(netG(torch.randn(1000, 6))), moments(curves(1000, rng))
        return float((m1 - m2).norm() + (c1 - c2).norm())
