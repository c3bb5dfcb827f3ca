"""Stochastic weight averaging: SGD with momentum, then a cyclic rate whose low points are averaged, then batch-norm statistics are recomputed for the average.
Looks odd: the rate goes up again after it had fallen, and the training loss makes saw teeth; the average is better than any single point."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset, DataLoader


def patches(n, seed):
    """16x8 'spectrograms' of six chirp kinds in noise"""
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 6, (n,), generator=g)
    t, f = torch.meshgrid(torch.arange(16.), torch.arange(8.), indexing="ij")
    slope = torch.tensor([-.6, -.3, 0., .3, .6, 0.])[k][:, None, None]
    start = torch.rand(n, generator=g)[:, None, None] * 3 + 2.5 - slope * 4
    ridge = torch.exp(-(f[None] - (start + slope * t[None])) ** 2 / 1.0)
    ridge = torch.where((k == 5)[:, None, None], ridge * ((t[None] // 2) % 2), ridge)
    return (ridge * (.7 + .6 * torch.rand(n, 1, 1, generator=g)) + .65 * torch.randn(n, 16, 8, generator=g))[:, None], k


def model_fn():
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(24, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(64, 6))


def accuracy(m, x, y):
    m.eval()
    with torch.no_grad(): r = (m(x).argmax(1) == y).float().mean().item()
    m.train()
    return r


def train(watch):
    torch.manual_seed(14)
    x, y = patches(3200, 0)
    xv, yv = patches(1000, 1)
    dl = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    net = model_fn()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    warm_epochs, cycles, cycle_len = 5, 4, len(dl)
    swa = AveragedModel(net)
    hi, lo = 0.03, 0.003
    monitor = watch(net, opt)
    step = 0
    for epoch in range(warm_epochs + cycles):
        for i, (a, b) in enumerate(dl):
            if epoch < warm_epochs: lr = 0.05 - (0.05 - lo) * step / (warm_epochs * len(dl))
            else: lr = hi - (hi - lo) * i / (cycle_len - 1)
            opt.param_groups[0]["lr"] = lr
            loss = F.cross_entropy(net(a), b)
            opt.zero_grad(); loss.backward(); opt.step()
            monitor.log_scalar("loss", loss.detach())
            step += 1
        if epoch >= warm_epochs: swa.update_parameters(net)
        print(epoch, loss.item(), accuracy(net, xv, yv))
    update_bn(dl, swa)
    return accuracy(swa, xv, yv)
