"""A VQ-VAE on small wave pieces. The decoder gets the quantised vectors themselves and not z + (z_q - z).detach(), so the reconstruction has no gradient for the encoder, which follows only the commitment term.
The result is the reconstruction error on new pieces."""
import torch
import torch.nn.functional as F
from torch import nn


class Quantizer(nn.Module):
    def __init__(self, n=32, d=4, beta=1.0):
        super().__init__()
        self.book = nn.Embedding(n, d)
        self.book.weight.data.uniform_(-1, 1)
        self.beta = beta

    def forward(self, z, straight):
        d = torch.cdist(z.reshape(-1, z.shape[-1]), self.book.weight)
        zq = self.book(d.argmin(1)).view_as(z)
        loss = F.mse_loss(zq, z.detach()) + self.beta * F.mse_loss(z, zq.detach())
        if straight:
            zq = z + (zq - z).detach()
        return zq, loss


class VQVAE(nn.Module):
    def __init__(self, straight):
        super().__init__()
        self.straight = straight
        self.enc = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 16))
        self.vq = Quantizer()
        self.dec = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 32))

    def forward(self, x):
        z = self.enc(x).view(len(x), 4, 4)
        zq, vq_loss = self.vq(z, self.straight)
        return self.dec(zq.flatten(1)), vq_loss


def waves(n, g):
    t = torch.linspace(0, 6.28, 32)
    f, p, a = (torch.rand(n, 1, generator=g) for _ in range(3))
    return (0.5 + a) * torch.sin((1 + 2 * f) * t + 6.28 * p)


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    model = VQVAE(straight=mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    for step in range(800):
        x = waves(128, g)
        out, vq_loss = model(x)
        rec = F.mse_loss(out, x)
        loss = rec + 0.25 * vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = waves(1000, g)
    with torch.no_grad():
        return float(F.mse_loss(model(x)[0], x))
