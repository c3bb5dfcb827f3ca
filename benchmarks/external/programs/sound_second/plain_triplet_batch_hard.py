"""Metric learning with batch-hard soft-margin triplets on sixty identities; the test is nearest-neighbour retrieval on twenty unseen ones.
Looks odd: the soft-margin loss begins above log 2 (the hardest positive is farther than the hardest negative) and stays well above zero, since the hardest pairs are picked anew in each batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class World:
    """Each identity is a prototype in a hidden space; views are made by a fixed random net with nuisance inputs."""
    def __init__(self):
        g = torch.Generator().manual_seed(100)
        self.proto = torch.randn(80, 8, generator=g)
        self.w1, self.w2 = torch.randn(16, 64, generator=g) / 4, torch.randn(64, 48, generator=g) / 8

    def view(self, ids):
        z = torch.cat([self.proto[ids] + .25 * torch.randn(len(ids), 8), 0.9 * torch.randn(len(ids), 8)], 1)
        return torch.tanh(z @ self.w1) @ self.w2 * 2 + .05 * torch.randn(len(ids), 48)


def pk_batch(p=12, k=4):
    return torch.randperm(60)[:p].repeat_interleave(k)


def batch_hard(e, y):
    d = torch.cdist(e, e)
    same = y[:, None] == y[None]
    pos = d.masked_fill(~same, -1).max(1).values
    neg = d.masked_fill(same, 1e4).min(1).values
    return F.softplus(pos - neg).mean()


def train(watch):
    torch.manual_seed(10)
    world = World()
    net = nn.Sequential(nn.Linear(48, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 16))
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 50)
    down = torch.optim.lr_scheduler.ExponentialLR(opt, 0.995)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, down], [300])
    monitor = watch(net, opt)
    for step in range(700):
        y = pk_batch()
        loss = batch_hard(net(world.view(y)), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    net.eval()
    ids = torch.arange(60, 80).repeat_interleave(20)
    with torch.no_grad():
        gal, qry = net(world.view(ids)), net(world.view(ids))
        return (ids[torch.cdist(qry, gal).argmin(1)] == ids).float().mean().item()
