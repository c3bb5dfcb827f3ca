"""Knowledge distillation with Accelerate: a frozen teacher in eval mode, a smaller student, temperature four and the usual T squared factor.
Looks odd: the loss is multiplied by sixteen, never comes near zero, and one of the two prepared models has no gradient."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    cent = torch.randn(30, 16, generator=torch.Generator().manual_seed(6))
    k = torch.randint(0, 30, (n,), generator=g)
    return cent[k] + 1.0 * torch.randn(n, 16, generator=g), k % 10


def mlp(h): return nn.Sequential(nn.Linear(16, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 10))


def pretrain_teacher(x, y):
    t = mlp(192)
    opt = torch.optim.AdamW(t.parameters(), 1e-3, weight_decay=.05)
    for _ in range(6):
        for b in torch.randperm(len(x)).split(128):
            opt.zero_grad(); F.cross_entropy(t(x[b]), y[b]).backward(); opt.step()
    return t.eval().requires_grad_(False)


def kd_loss(student, teacher, y, T=4.0, alpha=0.7):
    soft = F.kl_div(F.log_softmax(student / T, 1), F.log_softmax(teacher / T, 1), log_target=True, reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, y)


def train(watch):
    set_seed(11)
    x, y = data(8000, 0)
    xv, yv = data(2000, 1)
    teacher = pretrain_teacher(x, y)
    student = mlp(32)
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    acc = Accelerator(cpu=True)
    student, teacher, opt, dl = acc.prepare(student, teacher, opt, DataLoader(TensorDataset(x, y), 100, shuffle=True))
    sched = torch.optim.lr_scheduler.StepLR(opt.optimizer, 5, .3)
    watch(student, opt)
    for ep in range(8):
        for a, b in dl:
            with torch.no_grad(): t = teacher(a)
            loss = kd_loss(student(a), t, b)
            opt.zero_grad()
            acc.backward(loss)
            opt.step()
        sched.step()
    with torch.no_grad(): return (student(xv).argmax(1) == yv).float().mean().item()
