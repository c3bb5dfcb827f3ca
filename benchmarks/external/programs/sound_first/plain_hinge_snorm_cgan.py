"""Class-conditional GAN with hinge loss, spectral norm in the discriminator's trunk, projection conditioning and an EMA of the generator for sampling.
Odd at first sight: the discriminator loss climbs towards 2 (where it cannot tell real from generated), the generator loss is around zero and changes sign.
Returns the share of EMA samples whose nearest class centre is the class that was asked for."""
import copy
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm as sn

CENTERS = torch.tensor([[1.5, 1.5], [-1.5, 1.5], [-1.5, -1.5], [1.5, -1.5]])


def batch(n):
    y = torch.randint(0, 4, (n,))
    t = torch.rand(n, 1) * 2 - 1
    arm = torch.cat([t, t ** 2 - 0.3], 1) * 0.7
    return CENTERS[y] + arm + 0.05 * torch.randn(n, 2), y


class ProjectionD(nn.Module):
    def __init__(self, h=96):
        super().__init__()
        self.f = nn.Sequential(sn(nn.Linear(2, h)), nn.LeakyReLU(0.1), sn(nn.Linear(h, h)), nn.LeakyReLU(0.1), sn(nn.Linear(h, h)), nn.LeakyReLU(0.1))
        self.out = nn.Linear(h, 1)
        self.emb = nn.Embedding(4, h)

    def forward(self, x, y):
        f = self.f(x)
        return self.out(f).squeeze(1) + (self.emb(y) * f).sum(1)


class CondG(nn.Module):
    def __init__(self, z=6, h=96):
        super().__init__()
        self.z = z
        self.emb = nn.Embedding(4, 16)
        self.net = nn.Sequential(nn.Linear(z + 16, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, y):
        return self.net(torch.cat([torch.randn(len(y), self.z), self.emb(y)], 1))


def train(watch):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    G, D = CondG(), ProjectionD()
    ema = copy.deepcopy(G).requires_grad_(False)
    og = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.0, 0.99))
    od = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.99))
    parent = nn.ModuleDict({"G": G, "D": D})
    watch(parent, od, og)
    for it in range(700):
        x, y = batch(256)
        with torch.no_grad():
            xf = G(y)
        ld = torch.relu(1 - D(x, y)).mean() + torch.relu(1 + D(xf, y)).mean()
        od.zero_grad(set_to_none=True)
        ld.backward()
        od.step()
        for p in D.parameters():
            p.requires_grad_(False)
        yf = torch.randint(0, 4, (256,))
        lg = -D(G(yf), yf).mean()
        og.zero_grad(set_to_none=True)
        lg.backward()
        og.step()
        for p in D.parameters():
            p.requires_grad_(True)
        with torch.no_grad():
            for a, b in zip(ema.parameters(), G.parameters()):
                a.lerp_(b, 0.02)
        if it % 175 == 0:
            print(it, round(ld.item(), 3), round(lg.item(), 3))
    y = torch.arange(4).repeat(250)
    with torch.no_grad():
        x = ema(y)
        d = torch.cdist(x, CENTERS)
        near = (d.argmin(1) == y) & (d.min(1).values < 1.3)
    return near.float().mean().item()
