"""A VQ-VAE on short waveforms: straight-through quantisation, codebook kept as buffers with EMA updates and restarts of unused codes, commitment loss.
Looks odd: the codebook is not a parameter, the quantiser passes gradients as if it were the identity, and unused codes are moved by hand in the first stretch."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class EmaQuantiser(nn.Module):
    def __init__(self, k=48, d=8, decay=.95):
        super().__init__()
        self.register_buffer("code", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k)); self.register_buffer("total", self.code.clone())
        self.decay, self.restarts = decay, True

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        idx = torch.cdist(flat.detach(), self.code).argmin(1)
        q = self.code[idx].view_as(z)
        if self.training:
            with torch.no_grad():
                one = F.one_hot(idx, len(self.code)).float()
                self.count.lerp_(one.sum(0), 1 - self.decay)
                self.total.lerp_(one.T @ flat, 1 - self.decay)
                self.code.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
                dead = self.count < .5
                if self.restarts and dead.any():
                    pick = flat[torch.randint(0, len(flat), (int(dead.sum()),))]
                    self.code[dead] = pick; self.total[dead] = pick; self.count[dead] = 1.
        commit = F.mse_loss(z, q)
        return z + (q - z).detach(), commit, idx


class VQVAE(nn.Module):
    def __init__(self, d=8, h=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, h, 4, 2, 1), nn.GELU(), nn.Conv1d(h, h, 4, 2, 1), nn.GELU(), nn.Conv1d(h, d, 3, 1, 1))
        self.vq = EmaQuantiser(d=d)
        self.dec = nn.Sequential(nn.Conv1d(d, h, 3, 1, 1), nn.GELU(), nn.ConvTranspose1d(h, h, 4, 2, 1), nn.GELU(), nn.ConvTranspose1d(h, 1, 4, 2, 1))

    def forward(self, x):
        z = self.enc(x).transpose(1, 2)
        q, commit, idx = self.vq(z)
        return self.dec(q.transpose(1, 2)), commit, idx


def waves(n, g):
    t = torch.arange(48) / 48
    f, p, s = torch.rand(n, 1, generator=g) * 3 + 1, torch.rand(n, 1, generator=g) * 6.28, torch.rand(n, 1, generator=g)
    w = torch.sin(6.28 * f * t + p)
    return torch.where(s < .5, w, torch.tanh(4 * w))[:, None]


def train(watch):
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(0)
    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    monitor = watch(model, opt)
    for step in range(500):
        model.vq.restarts = step < 300
        x = waves(64, g)
        rec, commit, idx = model(x)
        loss = F.mse_loss(rec, x) + .25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
        if step % 100 == 0: print(step, loss.item(), "codes used", len(idx.unique()))
    model.eval()
    x = waves(1000, torch.Generator().manual_seed(1))
    with torch.no_grad(): return float(1 - F.mse_loss(model(x)[0], x) / x.var())
