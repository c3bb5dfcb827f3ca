"""Segmentation of rare bright specks (one percent of the pixels, half of the images have none) by focal loss with a prior bias and a final convolution initialised small.
Looks odd: the loss is tiny in absolute terms from the first step (about 0.01) because the focal term removes easy background, and the gradients are small as well."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader


class Scans(Dataset):
    def __init__(self, n, seed, s=32):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 1, s, s, generator=g)
        self.x = .6 * F.avg_pool2d(self.x, 3, 1, 1) * 3 + .2 * torch.randn(n, 1, s, s, generator=g)
        self.y = torch.zeros(n, 1, s, s)
        yy, xx = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
        for i in range(n):
            for _ in range(int(torch.randint(0, 3, (1,), generator=g))):
                cy, cx = torch.randint(2, s - 2, (2,), generator=g).tolist()
                m = ((yy - cy) ** 2 + (xx - cx) ** 2) <= int(torch.randint(3, 8, (1,), generator=g))
                self.x[i, 0][m] += 2.2
                self.y[i, 0][m] = 1

    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


def focal(logit, y, gamma=2., alpha=.75):
    bce = F.binary_cross_entropy_with_logits(logit, y, reduction="none")
    pt = torch.exp(-bce)
    return ((alpha * y + (1 - alpha) * (1 - y)) * (1 - pt) ** gamma * bce).mean()


class SpeckNet(nn.Module):
    def __init__(self, c=12, prior=.01):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.ctx = nn.Sequential(nn.Conv2d(c, c, 3, padding=2, dilation=2), nn.BatchNorm2d(c), nn.ReLU())
        self.out = nn.Conv2d(2 * c, 1, 1)
        nn.init.normal_(self.out.weight, std=.01)
        nn.init.constant_(self.out.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        a = self.enc(x)
        return self.out(torch.cat([a, self.ctx(a)], 1))


def train(watch):
    torch.manual_seed(23)
    dl = DataLoader(Scans(800, 0), 16, shuffle=True)
    va = Scans(200, 1)
    net = SpeckNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-3, total_steps=6 * len(dl))
    monitor = watch(net, opt)
    for ep in range(6):
        net.train()
        for x, y in dl:
            loss = focal(net(x), y)
            opt.zero_grad(); loss.backward(); opt.step(); sched.step()
            monitor.log_scalar("focal", loss.detach())
        net.eval()
        with torch.no_grad():
            p = (net(va.x).sigmoid() > .5).float()
            dice = (2 * (p * va.y).sum() / (p.sum() + va.y.sum())).item()
        print(ep, loss.item(), dice)
    return dice
