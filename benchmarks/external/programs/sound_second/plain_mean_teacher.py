"""Mean Teacher on 120 labelled and 3000 unlabelled points: a student with noise, an EMA teacher, and a consistency weight that ramps up.
Looks odd: the total loss grows while the ramp is on although everything improves, and a second copy of the net never has a gradient."""
import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def spirals(n, g, dim=2):
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.sqrt(torch.rand(n, generator=g)) * .9 + .1
    th = r * 4 + y * 2 * math.pi / 3 + .18 * torch.randn(n, generator=g)
    return torch.stack([r * th.cos(), r * th.sin()], 1) * 2, y


class Mlp(nn.Module):
    def __init__(self, h=96, noise=0.1):
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(nn.Linear(2, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Dropout(.1), nn.Linear(h, 3))

    def forward(self, x):
        if self.training: x = x + self.noise * torch.randn_like(x)
        return self.net(x)


@torch.no_grad()
def ema_update(teacher, student, step, decay=0.99):
    d = min(decay, 1 - 1 / (step + 2))
    for t, s in zip(teacher.parameters(), student.parameters()): t.lerp_(s, 1 - d)


def ramp(step, length=250): return math.exp(-5 * (1 - min(1, step / length)) ** 2)


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    xl, yl = spirals(120, g)
    xu, _ = spirals(3000, g)
    xt, yt = spirals(2000, g)
    student = Mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=3e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / 700)))
    watch(student, opt)
    for step in range(650):
        i, j = torch.randint(0, 120, (40,)), torch.randint(0, 3000, (120,))
        x = torch.cat([xl[i], xu[j]])
        out = student(x)
        with torch.no_grad(): target = teacher(x).softmax(1)
        sup = F.cross_entropy(out[:40], yl[i])
        cons = ((out.softmax(1) - target) ** 2).sum(1).mean()
        loss = sup + 8 * ramp(step) * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        ema_update(teacher, student, step)
    teacher.eval()
    with torch.no_grad(): return (teacher(xt).argmax(1) == yt).float().mean().item()
