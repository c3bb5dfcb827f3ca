"""Detector-style fine-tuning: the pre-trained backbone keeps its BatchNorm layers in eval mode with frozen affine parameters, because the batches are tiny (4 pictures).
Odd at first sight: model.train() is followed by bn.eval(), BatchNorm weights never change, and the batch size is 4.
Returns the mean distance (in pixels, of 12) between predicted and true object centre; a constant guess gives about 3.0."""
import torch
from torch import nn
import torch.nn.functional as F


def scene(n, kind):
    yy, xx = torch.meshgrid(torch.arange(12.), torch.arange(12.), indexing="ij")
    c = torch.rand(n, 2) * 8 + 2
    r = torch.rand(n, 1, 1) + 1.2
    d = ((yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2).sqrt()
    shape = torch.randint(0, 2, (n,))
    img = torch.where(shape[:, None, None] == 0, (d < r).float(), ((d - r).abs() < 0.6).float())
    return img[:, None] + 0.2 * torch.randn(n, 1, 12, 12), shape, c


class Backbone(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())


class Locator(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.reg = nn.Sequential(nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))

    def train(self, mode=True):
        super().train(mode)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self

    def forward(self, x):
        return self.reg(self.backbone(x))


def train(watch):
    torch.manual_seed(15)
    torch.set_num_threads(1)
    bb = Backbone()
    cls = nn.Sequential(bb, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
    o = torch.optim.Adam(cls.parameters(), 3e-3)
    for _ in range(120):
        x, s, _ = scene(64, None)
        l = F.cross_entropy(cls(x), s)
        o.zero_grad(); l.backward(); o.step()
    net = Locator(bb)
    for m in bb.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(False)
    opt = torch.optim.AdamW([{"params": [p for p in bb.parameters() if p.requires_grad], "lr": 3e-4}, {"params": net.reg.parameters(), "lr": 2e-3}], weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 800)
    watch(net, opt)
    net.train()
    for step in range(800):
        x, _, c = scene(4, None)
        loss = F.smooth_l1_loss(net(x), c / 6 - 1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    net.eval()
    x, _, c = scene(1000, None)
    with torch.no_grad():
        return ((net(x) + 1) * 6 - c).norm(dim=1).mean().item()
