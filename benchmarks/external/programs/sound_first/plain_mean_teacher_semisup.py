"""Mean Teacher: 60 labelled and 4000 unlabelled points, consistency loss towards an EMA teacher with a ramp-up of its weight.
Odd at first sight: the consistency term starts at almost zero and grows with the ramp, so the total loss turns upwards for a while; the teacher receives no gradients.
Returns the teacher's test accuracy (three classes)."""
import copy
import math
import torch
from torch import nn
import torch.nn.functional as F


def arcs(n, g):
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.rand(n, generator=g) * 1.6 * math.pi
    r = 0.5 + 0.6 * y
    return torch.stack([r * t.cos(), r * t.sin()], 1) + 0.07 * torch.randn(n, 2, generator=g), y


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(2, 96), nn.Linear(96, 96), nn.Linear(96, 3)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay, self.t = copy.deepcopy(model).requires_grad_(False), decay, 0

    def update(self, src):
        self.t += 1
        d = min(self.decay, 1 - 1 / (self.t + 1))
        with torch.no_grad():
            for a, b in zip(self.model.parameters(), src.parameters()):
                a.mul_(d).add_(b, alpha=1 - d)


def train(watch):
    torch.manual_seed(3)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(5)
    xl, yl = arcs(60, g)
    xu, _ = arcs(4000, g)
    student = MLP()
    teacher = EMA(student, 0.99)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    monitor = watch(student, opt)
    steps, ramp, wmax = 800, 300, 8.0
    for s in range(steps):
        il, iu = torch.randint(0, 60, (30,)), torch.randint(0, 4000, (200,))
        sup = F.cross_entropy(student(xl[il] + 0.03 * torch.randn(30, 2)), yl[il])
        x = xu[iu]
        ps = student(x + 0.08 * torch.randn_like(x)).softmax(1)
        with torch.no_grad():
            pt = teacher.model(x + 0.08 * torch.randn_like(x)).softmax(1)
        w = wmax * math.exp(-5 * (1 - min(1, s / ramp)) ** 2)
        loss = sup + w * F.mse_loss(ps, pt)
        opt.zero_grad()
        loss.backward()
        opt.step()
        teacher.update(student)
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("weight", w)
    x, y = arcs(3000, g)
    with torch.no_grad():
        return (teacher.model(x).argmax(1) == y).float().mean().item()
