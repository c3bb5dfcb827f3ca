"""MAML on sine waves: one inner gradient step made with create_graph and functional_call, outer Adam.
Looks odd: second-order gradients flow through the inner update and the outer loss jumps from batch to batch of tasks."""
import math
import torch
import torch.nn as nn
from torch.func import functional_call


class SineTasks:
    def __init__(self, seed): self.g = torch.Generator().manual_seed(seed)

    def batch(self, tasks, k):
        amp = torch.rand(tasks, 1, 1, generator=self.g) * 4.9 + .1
        ph = torch.rand(tasks, 1, 1, generator=self.g) * math.pi
        x = torch.rand(tasks, 2 * k, 1, generator=self.g) * 10 - 5
        y = amp * torch.sin(x - ph)
        return x[:, :k], y[:, :k], x[:, k:], y[:, k:]


net = lambda: nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def adapt(model, params, x, y, lr, steps=1, second_order=True):
    for _ in range(steps):
        loss = ((functional_call(model, params, (x,)) - y) ** 2).mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=second_order)
        params = {n: p - lr * g for (n, p), g in zip(params.items(), grads)}
    return params


def train(watch):
    torch.manual_seed(1)
    model = net()
    meta_opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(meta_opt, 450)
    tasks = SineTasks(0)
    monitor = watch(model, meta_opt)
    inner_lr = 0.02
    for it in range(450):
        xs, ys, xq, yq = tasks.batch(6, 10)
        meta_opt.zero_grad()
        outer = 0.
        for a, b, c, d in zip(xs, ys, xq, yq):
            fast = adapt(model, dict(model.named_parameters()), a, b, inner_lr)
            outer = outer + ((functional_call(model, fast, (c,)) - d) ** 2).mean()
        outer = outer / len(xs)
        outer.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.)
        meta_opt.step()
        sched.step()
        monitor.log_scalar("meta_loss", outer.detach())
        if it % 100 == 0: print(it, outer.item())
    # held-out tasks: five steps of adaptation
    xs, ys, xq, yq = SineTasks(123).batch(100, 10)
    before = after = 0.
    for a, b, c, d in zip(xs, ys, xq, yq):
        fast = adapt(model, {n: p.detach().requires_grad_() for n, p in model.named_parameters()}, a, b, inner_lr, 5, False)
        with torch.no_grad():
            before += ((model(c) - d) ** 2).mean().item() / 100
            after += ((functional_call(model, fast, (c,)) - d) ** 2).mean().item() / 100
    print("before", before, "after", after)
    return after
