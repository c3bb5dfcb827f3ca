"""Reptile for families of curves: an inner copy takes six SGD steps for each of four tasks, and the outer Adam gets the difference of weights as its gradient.
Looks odd: .grad is set by hand (no backward on the outer model), and the inner training losses are the only losses there are."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Curves:
    def __init__(self, seed): self.g = torch.Generator().manual_seed(seed)

    def task(self):
        a, b, c = torch.rand(3, generator=self.g)
        a, b = 1 + a * .4, b * 1.6
        return lambda x: (0.5 + c) * torch.sin(a * x * 2 + b) + .3 * (c - .5) * x

    def points(self, f, n):
        x = torch.rand(n, 1, generator=self.g) * 4 - 2
        return x, f(x)


def inner(model, f, sampler, steps, lr, n=16):
    net = copy.deepcopy(model)
    sgd = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        x, y = sampler.points(f, n)
        loss = F.mse_loss(net(x), y)
        sgd.zero_grad(); loss.backward(); sgd.step()
    return net, loss.item()


def train(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    outer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(.5, .99))
    sampler = Curves(1)
    steps, n_tasks = 400, 4
    sched = torch.optim.lr_scheduler.LinearLR(outer, 1., .1, total_iters=steps)
    monitor = watch(model, outer)
    for it in range(steps):
        grads = [torch.zeros_like(p) for p in model.parameters()]
        last = 0.
        for _ in range(n_tasks):
            fast, l = inner(model, sampler.task(), sampler, 6, .05)
            last += l / n_tasks
            for g, p, q in zip(grads, model.parameters(), fast.parameters()): g.add_((p.detach() - q.detach()) / n_tasks)
        for p, g in zip(model.parameters(), grads): p.grad = g
        outer.step()
        sched.step()
        monitor.log_scalar("inner_loss", last)
    # held-out tasks: error after six adaptation steps
    test = Curves(50)
    total = 0.
    for _ in range(60):
        f = test.task()
        net, _ = inner(model, f, test, 6, .05)
        x, y = test.points(f, 100)
        with torch.no_grad(): total += F.mse_loss(net(x), y).item() / 60
    return total
