"""A tiny U-Net segments overlapping blobs from a textured background with BCE plus soft Dice.
An ordinary segmentation run: AdamW, cosine schedule, IoU on held-out images."""
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader


@dataclass
class Config:
    size: int = 24
    base: int = 8
    lr: float = 4e-3
    wd: float = 1e-2
    batch: int = 32
    epochs: int = 9


def make(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    img, mask = [], []
    for _ in range(n):
        m = torch.zeros(size, size, dtype=torch.bool)
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            cy, cx = (torch.rand(2, generator=g) * 1.4 - .7).tolist()
            a, b = (torch.rand(2, generator=g) * .25 + .15).tolist()
            m |= ((yy - cy) / a) ** 2 + ((xx - cx) / b) ** 2 < 1
        f, p = torch.rand(2, generator=g).tolist()
        tex = .4 * torch.sin((6 + 8 * f) * (xx * p + yy * (1 - p)))
        img.append(tex + .8 * m + .3 * torch.randn(size, size, generator=g))
        mask.append(m.float())
    return torch.stack(img)[:, None], torch.stack(mask)[:, None]


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU(),
                         nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.d1, self.d2, self.mid = double(1, c), double(c, 2 * c), double(2 * c, 4 * c)
        self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.u2 = double(4 * c, 2 * c)
        self.up1 = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.u1 = double(2 * c, c)
        self.out = nn.Conv2d(c, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        m = self.mid(self.pool(b))
        b = self.u2(torch.cat([self.up2(m), b], 1))
        a = self.u1(torch.cat([self.up1(b), a], 1))
        return self.out(a)


def dice_loss(logits, y):
    p = logits.sigmoid()
    num = 2 * (p * y).sum((1, 2, 3)) + 1
    return (1 - num / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)).mean()


def train(watch):
    cfg = Config()
    torch.manual_seed(11)
    xtr, ytr = make(576, cfg.size, 0)
    xva, yva = make(128, cfg.size, 1)
    dl = DataLoader(TensorDataset(xtr, ytr), cfg.batch, shuffle=True)
    net = UNet(cfg.base)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=cfg.wd)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg.epochs * len(dl))
    bce = nn.BCEWithLogitsLoss()
    monitor = watch(net, opt)
    for ep in range(cfg.epochs):
        net.train()
        for x, y in dl:
            opt.zero_grad(set_to_none=True)
            out = net(x)
            loss = bce(out, y) + dice_loss(out, y)
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        net.eval()
        with torch.no_grad():
            p = net(xva) > 0
            t = yva.bool()
            iou = ((p & t).sum() / (p | t).sum()).item()
        print(f"epoch {ep} loss {loss.item():.3f} val IoU {iou:.3f}")
    return iou
