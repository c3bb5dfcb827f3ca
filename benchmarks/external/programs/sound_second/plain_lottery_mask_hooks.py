"""A lottery ticket by hand: a dense run finds a mask, the initial weights are restored, and the sparse net is trained with gradient hooks that keep pruned weights at zero.
Looks odd: 80 percent of the weights are exactly zero with exactly zero gradient throughout the watched run."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


def task(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    s = torch.stack([x[:, 0] * x[:, 1], x[:, 2] + x[:, 3].abs() - .8, torch.sin(2 * x[:, 4]), .7 * x[:, 5]], 1) + .2 * torch.randn(n, 4, generator=g)
    return x, s.argmax(1)


def net_fn(): return nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))


def fit(net, opt, x, y, steps, after=lambda loss: None):
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        i = torch.randint(0, len(x), (128,))
        loss = F.cross_entropy(net(x[i]), y[i])
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        after(loss.detach())


def accuracy(net, x, y):
    with torch.no_grad(): return (net(x).argmax(1) == y).float().mean().item()


def train(watch):
    torch.manual_seed(18)
    x, y = task(10000, 0)
    xv, yv = task(2000, 1)
    net = net_fn()
    start = copy.deepcopy(net.state_dict())
    fit(net, torch.optim.Adam(net.parameters(), 2e-3), x, y, 400)
    print("dense", accuracy(net, xv, yv))

    masks = {}
    for name, p in net.named_parameters():
        if p.ndim == 2:
            keep = .5 if name.startswith("4") else .2             # the output layer is pruned less
            masks[name] = (p.abs() >= p.abs().flatten().kthvalue(int((1 - keep) * p.numel())).values).float().detach()
    net.load_state_dict(start)
    for name, p in net.named_parameters():
        if name in masks:
            p.data.mul_(masks[name])
            p.register_hook(lambda g, m=masks[name]: g * m)
    opt = torch.optim.Adam(net.parameters(), 2e-3)                # no weight decay and no momentum from before: zeros stay zeros
    monitor = watch(net, opt)
    fit(net, opt, x, y, 500, lambda l: monitor.log_scalar("loss", l))
    assert all((net.get_parameter(n)[m == 0] == 0).all() for n, m in masks.items())
    return accuracy(net, xv, yv)
