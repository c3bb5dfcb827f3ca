"""A classifier that is already finished is continued for a "refresh" on slightly newer data with a small learning rate (1e-3, plain SGD with momentum) and an early stop on validation.
Odd at first sight: the loss is low and flat from the first step and weights hardly move - there is little left to learn, which is expected.
Returns test accuracy on the newer data."""
import copy
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader
import torch.nn.functional as F


def era(n, seed, drift):
    c = torch.randn(6, 12, generator=torch.Generator().manual_seed(31)) * 1.3
    d = torch.randn(6, 12, generator=torch.Generator().manual_seed(32))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    return c[y] + drift * d[y] + 0.8 * torch.randn(n, 12, generator=g), y


def finished_model():
    x, y = era(4000, 1, 0.0)
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    opt = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=1e-4)
    for _ in range(8):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
            opt.zero_grad(); F.cross_entropy(net(xb), yb).backward(); opt.step()
    return net


def train(watch):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    net = finished_model()
    tr, va, te = era(3000, 2, 0.15), era(1000, 3, 0.15), era(2000, 4, 0.15)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    monitor = watch(net, opt)
    best, best_state, patience = float("inf"), None, 0
    for epoch in range(8):
        for xb, yb in DataLoader(TensorDataset(*tr), batch_size=32, shuffle=True):
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        with torch.no_grad():
            v = F.cross_entropy(net(va[0]), va[1]).item()
        print(epoch, v)
        if v < best:
            best, best_state, patience = v, copy.deepcopy(net.state_dict()), 0
        else:
            patience += 1
            if patience == 3:
                break
    net.load_state_dict(best_state)
    with torch.no_grad():
        return (net(te[0]).argmax(1) == te[1]).float().mean().item()
