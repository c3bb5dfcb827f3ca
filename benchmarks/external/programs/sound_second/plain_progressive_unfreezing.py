"""Transfer learning with gradual unfreezing: a conv net pretrained on stripes of eight directions is tuned on four textures, head first, then block after block with smaller rates.
Looks odd: at first most parameters are frozen and have no gradient, groups are added to the optimizer under way, and the rates differ by a factor of ten between layers."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def stripes(n, directions, wave, g, size=16):
    k = torch.randint(0, directions, (n,), generator=g)
    th = k * torch.pi / directions + 0.08 * torch.randn(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    ph = torch.rand(n, generator=g) * 6.28
    arg = (xx[None] * th.cos()[:, None, None] + yy[None] * th.sin()[:, None, None]) * 6.28 / wave + ph[:, None, None]
    return (torch.sin(arg) + 0.8 * torch.randn(n, size, size, generator=g))[:, None], k


def textures(n, g):
    """crosses of two directions: the target task"""
    a, ka = stripes(n, 4, 5.0, g)
    b, _ = stripes(n, 4, 3.5, g)
    return a + 1.0 * b + 0.7 * torch.randn(a.shape, generator=g), ka


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        def block(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList([block(1, 8), block(8, 16), block(16, 32)])
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        for b in self.blocks: x = b(x)
        return self.head(x.mean((2, 3)))


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    xp, yp = stripes(2000, 8, 5.0, g)
    model = Net(8)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(3):                                   # pretraining, not watched
        for b in torch.randperm(2000).split(64):
            opt.zero_grad(); F.cross_entropy(model(xp[b]), yp[b]).backward(); opt.step()

    x, y = textures(1000, g)
    xv, yv = textures(600, g)
    model.head = nn.Linear(32, 4)
    model.blocks.requires_grad_(False)
    opt = torch.optim.AdamW(model.head.parameters(), lr=3e-3, weight_decay=1e-3)
    monitor = watch(model, opt)
    for epoch in range(20):
        if epoch in (5, 9, 13):
            depth = {5: 2, 9: 1, 13: 0}[epoch]
            model.blocks[depth].requires_grad_(True)
            opt.add_param_group({"params": model.blocks[depth].parameters(), "lr": 1e-3 / 2.0 ** (2 - depth), "weight_decay": 1e-3})
        for b in torch.randperm(1000).split(50):
            loss = F.cross_entropy(model(x[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        with torch.no_grad(): acc = (model(xv).argmax(1) == yv).float().mean().item()
        print(epoch, loss.item(), acc)
    return acc
