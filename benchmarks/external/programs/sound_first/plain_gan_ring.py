"""Non-saturating GAN on a ring of eight 2-D Gaussians, Adam(0.5, 0.999) with equal learning rates for both nets.
Odd at first sight: neither loss goes down; the discriminator settles near 2*ln 2 because it can no longer tell the two
apart, which is what one wants. Returns the sliced Wasserstein distance between samples and held-out data (lower is better)."""
import math
import torch
from torch import nn
import torch.nn.functional as F


def sample_ring(n, gen, radius=2.0, std=0.15, modes=8):
    k = torch.randint(0, modes, (n,), generator=gen)
    ang = 2 * math.pi * k / modes
    centers = torch.stack([ang.cos(), ang.sin()], 1) * radius
    return centers + std * torch.randn(n, 2, generator=gen)


def mlp(i, o, h=128):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


def sliced_w(a, b, n_proj=64):
    d = F.normalize(torch.randn(2, n_proj, generator=torch.Generator().manual_seed(5)), dim=0)
    return ((a @ d).sort(0).values - (b @ d).sort(0).values).abs().mean().item()


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(1)
    z_dim, batch = 8, 512
    G, D = mlp(z_dim, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    mon_g = watch(G, opt_g)
    mon_d = watch(D, opt_d)
    for step in range(800):
        real = sample_ring(batch, gen)
        fake = G(torch.randn(batch, z_dim))
        # discriminator
        d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        mon_d.log_scalar("loss", d_loss.detach())
        # generator
        g_loss = F.softplus(-D(G(torch.randn(batch, z_dim)))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        mon_g.log_scalar("loss", g_loss.detach())
        if step % 200 == 199:
            print(f"{step+1} d {d_loss.item():.3f} g {g_loss.item():.3f}")
    with torch.no_grad():
        return sliced_w(G(torch.randn(2000, z_dim)), sample_ring(2000, torch.Generator().manual_seed(99)))
