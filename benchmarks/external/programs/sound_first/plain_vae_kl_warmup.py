"""VAE on 8x8 binary pictures of rectangles with KL warm-up over the first half of training (beta from 0 to 1).
Odd at first sight: the KL term rises from zero to 6 and the total loss stands still for a third of the run, since the KL weight grows as fast as the reconstruction improves.
Returns the negative ELBO per picture on held-out data at beta = 1 (untrained: about 44; independent pixels: about 23)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader


def rectangles(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, 8, 8)
    a = torch.randint(0, 5, (n, 2), generator=g)
    s = torch.randint(2, 5, (n, 2), generator=g)
    for k in range(n):
        x[k, a[k, 0]:a[k, 0] + s[k, 0], a[k, 1]:a[k, 1] + s[k, 1]] = 1
    return x.flatten(1)


class VAE(nn.Module):
    def __init__(self, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        mu, lv = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        rec = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="none").sum(1).mean()
        kl = 0.5 * (mu ** 2 + lv.exp() - 1 - lv).sum(1).mean()
        return rec, kl


def train(watch):
    torch.manual_seed(2)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(rectangles(4000, 0)), batch_size=100, shuffle=True)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, opt)
    epochs, step = 18, 0
    total = epochs * len(loader)
    for epoch in range(epochs):
        for (x,) in loader:
            beta = min(1.0, step / (total / 2))
            rec, kl = model(x)
            loss = rec + beta * kl
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
            monitor.log_scalar("kl", kl.detach())
            step += 1
    with torch.no_grad():
        rec, kl = model(rectangles(2000, 1))
    return (rec + kl).item()
