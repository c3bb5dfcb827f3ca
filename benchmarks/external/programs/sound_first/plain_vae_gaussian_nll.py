"""VAE for sensor readings with a Gaussian likelihood whose noise level is learned.
Odd at first sight: the loss falls through zero and becomes strongly negative - a density can exceed one, so a negative log-likelihood below zero is right.
Returns the held-out negative ELBO per sample (lower is better; a diagonal Gaussian fit gives about +20)."""
import math
import torch
import torch.nn as nn


class SensorVAE(nn.Module):
    def __init__(self, d=20, z=3, h=96):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU())
        self.mu, self.lv = nn.Linear(h, z), nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, d))
        self.log_sigma = nn.Parameter(torch.zeros(d))

    def elbo(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h).clamp(-12, 5)
        z = mu + (0.5 * lv).exp() * torch.randn_like(mu)
        err = (x - self.dec(z)) / self.log_sigma.exp()
        nll = (0.5 * err ** 2 + self.log_sigma + 0.5 * math.log(2 * math.pi)).sum(1)
        kl = 0.5 * (mu ** 2 + lv.exp() - 1 - lv).sum(1)
        return (nll + kl).mean()


def readings(n, seed):
    g0 = torch.Generator().manual_seed(40)
    A, B = torch.randn(3, 20, generator=g0), torch.randn(3, 20, generator=g0)
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(n, 3, generator=g)
    return torch.tanh(s @ A * 0.3) + 0.05 * s.sin() @ B + 0.03 * torch.randn(n, 20, generator=g)


def train(watch):
    torch.manual_seed(1); torch.set_num_threads(1)
    data, test = readings(6000, 1), readings(2000, 2)
    mean, std = data.mean(0), data.std(0)
    data, test = (data - mean) / std, (test - mean) / std
    model = SensorVAE()
    rest = [p for n, p in model.named_parameters() if n != "log_sigma"]
    opt = torch.optim.Adam([{"params": rest, "lr": 2e-3}, {"params": [model.log_sigma], "lr": 1e-2}])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 750, eta_min=1e-5)
    mon = watch(model, opt)
    for step in range(750):
        loss = model.elbo(data[torch.randint(0, 6000, (256,))])
        opt.zero_grad(); loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        opt.step(); sched.step()
        mon.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return model.elbo(test).item()
