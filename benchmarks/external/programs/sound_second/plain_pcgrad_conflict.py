"""Gradient surgery (PCGrad) for two partly conflicting regressions on a shared trunk: task gradients are taken with autograd.grad, projected, and put into .grad.
Looks odd: there is no loss.backward() at all, and the combined gradient is not the gradient of any single loss."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoHeads(nn.Module):
    def __init__(self, d=10, h=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(h, 1) for _ in range(2))

    def forward(self, x):
        z = self.trunk(x)
        return [h(z).squeeze(1) for h in self.heads]


def pcgrad(model, losses):
    params = list(model.parameters())
    sizes = [p.numel() for p in params]
    flat = []
    for i, l in enumerate(losses):
        gs = torch.autograd.grad(l, params, retain_graph=i < len(losses) - 1, allow_unused=True)
        flat.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gs, params)]))
    out = []
    for i, g in enumerate(flat):
        g = g.clone()
        others = [j for j in range(len(flat)) if j != i]
        random.shuffle(others)
        for j in others:
            dot = g @ flat[j]
            if dot < 0: g -= dot / flat[j].square().sum() * flat[j]
        out.append(g)
    for p, g in zip(params, torch.stack(out).sum(0).split(sizes)): p.grad = g.view_as(p)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    base = torch.tanh(x[:, 0] * x[:, 1]) + .5 * x[:, 2].abs()
    a = base + .8 * torch.sin(2 * x[:, 3])
    b = -base + .8 * torch.sin(2 * x[:, 4])
    n1, n2 = .2 * torch.randn(2, n, generator=g)
    return x, (a + n1) / a.std(), (b + n2) / b.std()


def train(watch):
    random.seed(0); torch.manual_seed(0)
    x, a, b = make(8000, 0)
    xv, av, bv = make(2000, 1)
    model = TwoHeads()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [400, 550], .3)
    watch(model, opt)
    for step in range(640):
        i = torch.randint(0, len(x), (128,))
        pa, pb = model(x[i])
        la, lb = F.mse_loss(pa, a[i]), F.mse_loss(pb, b[i])
        opt.zero_grad()
        pcgrad(model, [la, lb])
        opt.step()
        sched.step()
    with torch.no_grad():
        pa, pb = model(xv)
        return float(1 - .5 * (F.mse_loss(pa, av) / av.var() + F.mse_loss(pb, bv) / bv.var()))
