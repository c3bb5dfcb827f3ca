"""SGD with cosine warm restarts (T0 = 60, doubling) and a snapshot ensemble collected at the end of each cycle.
Odd at first sight: at each restart the learning rate jumps from 0 to 0.2 and the training loss jumps up with it.
Returns the accuracy of the ensemble of three snapshots (ten classes)."""
import copy
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader
import torch.nn.functional as F


def glyphs(n, seed):
    proto = (torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(60)) > 0.55).float()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    x = proto[y]
    dx = torch.randint(-1, 2, (n,), generator=g)
    x = torch.stack([torch.roll(a, int(s), 2) for a, s in zip(x, dx)])
    return x + 0.6 * torch.randn(x.shape, generator=g), y


def conv_net():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(*glyphs(4000, 0)), batch_size=100, shuffle=True)
    net = conv_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=60, T_mult=2)
    mon = watch(net, opt)
    ends, snaps, step = {60, 180, 420}, [], 0
    while step < 420:
        for x, y in data:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            mon.log_scalar("loss", loss.detach())
            mon.log_scalar("lr", opt.param_groups[0]["lr"])
            step += 1
            if step in ends:
                snaps.append(copy.deepcopy(net).eval())
            if step == 420:
                break
    xt, yt = glyphs(2000, 1)
    with torch.no_grad():
        p = sum(s(xt).softmax(1) for s in snaps)
    return (p.argmax(1) == yt).float().mean().item()
