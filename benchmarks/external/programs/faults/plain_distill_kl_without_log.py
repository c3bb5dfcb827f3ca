"""Knowledge distillation of a wide teacher into a small student. F.kl_div() wants log-probabilities as its first argument but gets the student's probabilities,
so the loss is not a divergence and the student does not follow the teacher. Result: agreement of student and true classes on new data."""
import torch
import torch.nn.functional as F
from torch import nn


def net(h):
    return nn.Sequential(nn.Linear(16, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 6))


def batch(w, n, g):
    x = torch.randn(n, 16, generator=g)
    return x, (torch.sin(x @ w[0]) @ w[1]).argmax(1)


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    acc = (model(x).argmax(1) == y).float().mean()
    model.train()
    return float(acc)


def train(watch, mended=False):
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(9)
    w = (torch.randn(16, 8, generator=g) * 0.3, torch.randn(8, 6, generator=g))
    teacher, student = net(160), net(40)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(300):
        x, y = batch(w, 128, g)
        opt_t.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt_t.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    T = 3.0
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    monitor = watch(student, optimizer)
    xt, yt = batch(w, 2000, g)
    for step in range(500):
        x, _ = batch(w, 128, g)
        soft = F.softmax(teacher(x) / T, dim=1)
        if mended:
            out = F.log_softmax(student(x) / T, dim=1)
        else:
            out = F.softmax(student(x) / T, dim=1)
        loss = F.kl_div(out, soft, reduction="batchmean") * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.log_scalar("distill", loss.detach())
    print("teacher", accuracy(teacher, xt, yt))
    return accuracy(student, xt, yt)
