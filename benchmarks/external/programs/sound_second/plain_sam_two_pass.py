"""Sharpness-aware minimisation: a wrapper optimizer climbs by rho along the gradient, takes a second gradient there, goes back and steps with SGD.
Looks odd: two backward passes for each step, the weights move away and back in between, and labels carry 10% noise so the loss has a floor."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for g in self.param_groups:
            for p in g["params"]:
                e = p.grad * (g["rho"] / (norm + 1e-12))
                self.state[p]["e"] = e
                p.add_(e)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g["params"]: p.sub_(self.state[p]["e"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None): raise RuntimeError("use first_step and second_step")


def gestures(n, seed, noise=0.0):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 32)
    y = torch.randint(0, 5, (n,), generator=g)
    f = torch.tensor([1., 1.5, 2., 2.5, 3.])[y][:, None]
    ph = torch.rand(n, 1, generator=g) * 6.28
    x = torch.stack([torch.sin(6.28 * f * t + ph), torch.cos(6.28 * f * t + ph) * (1 - t)], 1)
    x = x + .7 * torch.randn(n, 2, 32, generator=g)
    flip = torch.rand(n, generator=g) < noise
    return x, torch.where(flip, torch.randint(0, 5, (n,), generator=g), y)


def train(watch):
    torch.manual_seed(5)
    x, y = gestures(3000, 0, noise=.1)
    xv, yv = gestures(1000, 1)
    net = nn.Sequential(nn.Conv1d(2, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool1d(2),
                        nn.Conv1d(24, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 5))
    opt = SAM(net.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.base, 10 * 47)
    monitor = watch(net, opt.base)
    for ep in range(10):
        for b in torch.randperm(3000).split(64):
            loss = F.cross_entropy(net(x[b]), y[b])
            loss.backward()
            opt.first_step()
            F.cross_entropy(net(x[b]), y[b]).backward()
            opt.second_step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        with torch.no_grad(): acc = (net(xv).argmax(1) == yv).float().mean().item()
        print(ep, loss.item(), acc)
    return acc
