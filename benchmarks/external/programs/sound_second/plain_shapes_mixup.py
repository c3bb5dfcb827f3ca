"""A small CNN classifies noisy 20x20 drawings of shapes, trained with flips, shifts and mixup.
Looks odd: the training loss stays far above zero (mixed labels) while held-out accuracy is high."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader


def draw(kind, g):
    yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    cy, cx = (torch.rand(2, generator=g) * 6 + 7).tolist()
    r = float(torch.rand(1, generator=g) * 2.5 + 3.5)
    dy, dx = yy - cy, xx - cx
    if kind == 0: m = (dy ** 2 + dx ** 2) < r ** 2
    elif kind == 1: m = (dy.abs() < r * .85) & (dx.abs() < r * .85)
    elif kind == 2: m = (dy.abs() + dx.abs()) < r * 1.15
    elif kind == 3: m = (dy.abs() < 1.3) & (dx.abs() < r) | (dx.abs() < 1.3) & (dy.abs() < r)
    else: m = ((dy ** 2 + dx ** 2) < r ** 2) & ((dy ** 2 + dx ** 2) > (r * .6) ** 2)
    return m.float() * (0.7 + 0.6 * torch.rand(1, generator=g)) + 0.35 * torch.randn(20, 20, generator=g)


class Shapes(Dataset):
    def __init__(self, n, seed, augment):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 5, (n,), generator=g)
        self.x = torch.stack([draw(int(k), g) for k in self.y])[:, None]
        self.x = (self.x - 0.15) / 0.5
        self.augment = augment

    def __len__(self): return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment:
            if torch.rand(()) < .5: x = x.flip(-1)
            if torch.rand(()) < .5: x = x.flip(-2)
            s = torch.randint(-2, 3, (2,)).tolist()
            x = torch.roll(x, s, dims=(-2, -1))
        return x, self.y[i]


class ConvBlock(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


def mixup(x, y, n_classes, alpha=0.4):
    lam = torch.distributions.Beta(alpha, alpha).sample()
    perm = torch.randperm(len(x))
    t = F.one_hot(y, n_classes).float()
    return lam * x + (1 - lam) * x[perm], lam * t + (1 - lam) * t[perm]


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hit = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hit / len(loader.dataset)


def train(watch):
    torch.manual_seed(0)
    train_dl = DataLoader(Shapes(1600, 1, True), batch_size=64, shuffle=True, drop_last=True)
    val_dl = DataLoader(Shapes(500, 2, False), batch_size=250)
    model = nn.Sequential(ConvBlock(1, 8), ConvBlock(8, 12), nn.MaxPool2d(2), ConvBlock(12, 24), nn.MaxPool2d(2),
                          ConvBlock(24, 48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs = 10
    total = epochs * len(train_dl)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=total, pct_start=0.2)
    monitor = watch(model, opt)
    for epoch in range(epochs):
        for x, y in train_dl:
            x, t = mixup(x, y, 5)
            loss = F.cross_entropy(model(x), t)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        print(epoch, accuracy(model, val_dl))
    return accuracy(model, val_dl)
