"""VQ-VAE on short multi-tone signals; the codebook is a buffer updated by exponential averages, the encoder is trained straight-through plus commitment loss.
Odd at first sight: the codebook is no parameter and gets no gradient - it moves by itself, and unused codes are re-seeded in jumps.
Returns reconstruction MSE on held-out signals (variance of the data: about 0.5)."""
import torch
from torch import nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    def __init__(self, k, d, decay=0.95):
        super().__init__()
        self.decay = decay
        self.register_buffer("book", torch.randn(k, d) * 0.5)
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("total", self.book.clone())

    def forward(self, z):                      # z: n, d
        idx = torch.cdist(z, self.book).argmin(1)
        if self.training:
            with torch.no_grad():
                oh = F.one_hot(idx, len(self.book)).float()
                self.count.mul_(self.decay).add_(oh.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(oh.T @ z, alpha=1 - self.decay)
                self.book.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
                dead = self.count < 0.3
                if dead.any():
                    self.book[dead] = z[torch.randint(0, len(z), (int(dead.sum()),))]
                    self.total[dead] = self.book[dead]
                    self.count[dead] = 1.0
        q = self.book[idx]
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit


class VQVAE(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv1d(32, 32, 4, 2, 1), nn.ReLU(), nn.Conv1d(32, d, 1))
        self.vq = EMAQuantizer(64, d)
        self.dec = nn.Sequential(nn.Conv1d(d, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose1d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(32, 1, 4, 2, 1))

    def forward(self, x):
        z = self.enc(x)
        n, d, t = z.shape
        q, commit = self.vq(z.permute(0, 2, 1).reshape(-1, d))
        return self.dec(q.view(n, t, d).permute(0, 2, 1)), commit


def tones(n):
    t = torch.linspace(0, 1, 48)
    f = torch.tensor([2., 3., 5.])[torch.randint(0, 3, (n,))][:, None]
    return torch.sin(2 * torch.pi * (f * t + torch.rand(n, 1)))[:, None] + 0.02 * torch.randn(n, 1, 48)


def train(watch):
    torch.manual_seed(20)
    torch.set_num_threads(1)
    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, opt)
    for step in range(400):
        x = tones(64)
        rec, commit = model(x)
        loss = F.mse_loss(rec, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    x = tones(500)
    with torch.no_grad():
        return F.mse_loss(model(x)[0], x).item()
