"""An unnormalised model of a banana-shaped density learns by noise contrastive estimation, with the log partition as a parameter.
Looks odd: the logistic loss barely moves (noise and data overlap, so its floor is far above zero), and one scalar parameter carries the normalisation."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def banana(n, g):
    z = torch.randn(n, 2, generator=g)
    return torch.stack([1.2 * z[:, 0], .6 * z[:, 1] + .5 * z[:, 0] ** 2 - .5], 1)


class Unnormalised(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, h), nn.Softplus(), nn.Linear(h, h), nn.Softplus(), nn.Linear(h, 1))
        self.log_z = nn.Parameter(torch.tensor(math.log(2 * math.pi)))

    def forward(self, x): return self.f(x).squeeze(1) - .5 * (x ** 2).sum(1) - self.log_z


def train(watch):
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(0)
    data = banana(20000, g)
    noise = torch.distributions.MultivariateNormal(data.mean(0), torch.cov(data.T) * 1.2)
    model = Unnormalised()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 700)
    monitor = watch(model, opt)
    for step in range(700):
        x = data[torch.randint(0, len(data), (256,))]
        y = noise.sample((256,))
        lx, ly = model(x) - noise.log_prob(x), model(y) - noise.log_prob(y)
        loss = F.softplus(-lx).mean() + F.softplus(ly).mean()
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        monitor.log_scalar("nce", loss.detach())
    test = banana(5000, torch.Generator().manual_seed(8))
    ax = torch.linspace(-8, 8, 321)
    with torch.no_grad():
        z = torch.logsumexp(model(torch.cartesian_prod(ax, ax)), 0) + 2 * math.log(16 / 320)
        print("self-normalisation, should be near 0:", z.item())
        return float(-(model(test) - z).mean())           # the true entropy is 2.51
