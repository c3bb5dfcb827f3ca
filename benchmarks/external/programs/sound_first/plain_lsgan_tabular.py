"""Least-squares GAN that imitates a five-column customer table (age, income, spending, visits, debt), with two time scales (the discriminator learns twice as fast).
Odd at first sight: one optimizer's learning rate is larger, and both losses stand still near their equilibrium (0.25 for D, 0.13 for G) instead of going to zero.
Returns the energy distance between generated and held-out rows (untrained generator: about 1.1, a plain Gaussian: 0.1)."""
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader


class Customers(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        e = torch.randn(n, 5, generator=g)
        age = 0.6 * e[:, 0] + 0.8 * (torch.rand(n, generator=g) < 0.4).float() * 2 - 0.6
        income = 0.7 * age - 0.25 * age ** 2 + 0.4 * e[:, 1]
        spending = torch.tanh(income) + 0.3 * e[:, 2]
        visits = torch.relu(0.5 + spending + 0.3 * e[:, 3])
        debt = 0.6 * spending - 0.4 * income + 0.4 * e[:, 4]
        x = torch.stack([age, income, spending, visits, debt], 1)
        self.x = (x - x.mean(0)) / x.std(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Gen(nn.Module):
    def __init__(self, z=8, h=128):
        super().__init__()
        self.z = z
        self.net = nn.Sequential(nn.Linear(z, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, 5))

    def forward(self, n):
        return self.net(torch.randn(n, self.z))


def energy(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train(watch):
    torch.manual_seed(11)
    torch.set_num_threads(1)
    loader = DataLoader(Customers(8192, 0), batch_size=256, shuffle=True, drop_last=True)
    G = Gen()
    D = nn.Sequential(nn.Linear(5, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    decay = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.05, total_iters=22) for o in (opt_g, opt_d)]
    mon_g, mon_d = watch(G, opt_g), watch(D, opt_d)
    for epoch in range(22):
        for real in loader:
            fake = G(len(real))
            ld = 0.5 * ((D(real) - 1) ** 2).mean() + 0.5 * (D(fake.detach()) ** 2).mean()
            opt_d.zero_grad()
            ld.backward()
            opt_d.step()
            mon_d.log_scalar("loss", ld.detach())
            lg = 0.5 * ((D(fake) - 1) ** 2).mean()
            opt_g.zero_grad()
            lg.backward()
            opt_g.step()
            mon_g.log_scalar("loss", lg.detach())
        for s in decay:
            s.step()
    G.eval()
    with torch.no_grad():
        return energy(G(2000), Customers(2000, 1).x)
