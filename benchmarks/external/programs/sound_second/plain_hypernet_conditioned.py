"""A hypernetwork produces all weights of a small regression net from a task description (frequency, phase, amplitude).
Looks odd: the target net has no parameters of its own; all gradients arrive through generated weights, whose last layer is initialised small."""
import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPES = [(32, 1), (32,), (32, 32), (32,), (1, 32), (1,)]


class HyperNet(nn.Module):
    def __init__(self, task_dim=3, h=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(task_dim, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU())
        self.heads = nn.ModuleList()
        for s in SHAPES:
            n = int(torch.tensor(s).prod())
            lin = nn.Linear(h, n)
            nn.init.normal_(lin.weight, std=0.02)
            nn.init.zeros_(lin.bias)
            if len(s) == 2:      # the bias of the head plays the part of an ordinary initialisation
                nn.init.kaiming_normal_(lin.bias.data.view(s), nonlinearity="relu")
            self.heads.append(lin)

    def forward(self, task):
        z = self.trunk(task)
        return [h(z).view(len(task), *s) for h, s in zip(self.heads, SHAPES)]


def target_net(x, w):
    """x: tasks x points x 1"""
    h = torch.tanh(torch.baddbmm(w[1][:, None], x * 2, w[0].transpose(1, 2)))
    h = torch.tanh(torch.baddbmm(w[3][:, None], h, w[2].transpose(1, 2)))
    return torch.baddbmm(w[5][:, None], h, w[4].transpose(1, 2))


def tasks(n, pts=24):
    c = torch.rand(n, 3) * 2 - 1
    x = torch.rand(n, pts, 1) * 2 - 1
    f, p, a = (c[:, i, None, None] for i in range(3))
    return c, x, (1 + 0.5 * a) * torch.sin((3 + 1.5 * f) * x + 1.5 * p)


def train(watch):
    torch.manual_seed(6)
    hyper = HyperNet()
    opt = torch.optim.Adam(hyper.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 700)
    watch(hyper, opt)
    for step in range(700):
        c, x, y = tasks(64)
        loss = F.mse_loss(target_net(x, hyper(c)), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(hyper.parameters(), 1.0)
        opt.step()
        sched.step()
    with torch.no_grad():
        c, x, y = tasks(500)
        return F.mse_loss(target_net(x, hyper(c)), y).item()
