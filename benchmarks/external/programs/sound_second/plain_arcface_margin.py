"""Additive angular margin (ArcFace) on normalised features with scale 16 and a margin that is switched on after a softmax warm-up.
Looks odd: the loss jumps up when the margin comes in, begins far above the logarithm of the class count and stays high at accuracy near one."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class ArcHead(nn.Module):
    def __init__(self, d, classes, s=16.0):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(classes, d)))
        self.s, self.m = s, 0.0

    def forward(self, z, y=None):
        cos = F.linear(F.normalize(z), F.normalize(self.weight))
        if y is None or self.m == 0: return self.s * cos
        c = cos.gather(1, y[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        phi = c * math.cos(self.m) - (1 - c ** 2).sqrt() * math.sin(self.m)
        phi = torch.where(c > math.cos(math.pi - self.m), phi, c - self.m * math.sin(math.pi - self.m))
        return self.s * cos.scatter(1, y[:, None], phi)


def faces(ids, g_proto):
    base = torch.randn(40, 10, generator=torch.Generator().manual_seed(g_proto))
    mix = torch.randn(18, 40, generator=torch.Generator().manual_seed(g_proto + 1)) / 4
    z = torch.cat([base[ids] + .35 * torch.randn(len(ids), 10), .8 * torch.randn(len(ids), 8)], 1)
    return torch.sin(z @ mix * 1.3) + .05 * torch.randn(len(ids), 40)


def train(watch):
    torch.manual_seed(20)
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(40, 128), nn.BatchNorm1d(128), nn.PReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.PReLU(), nn.Linear(128, 24), nn.BatchNorm1d(24)),
                         "head": ArcHead(24, 30)})
    opt = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [450, 600], .1)
    watch(net, opt)
    for step in range(680):
        if step == 200: net["head"].m = .2
        y = torch.randint(0, 30, (96,))                       # identities 0..29 for training
        loss = F.cross_entropy(net["head"](net["body"](faces(y, 7)), y), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    net.eval()
    # verification on the ten unseen identities: nearest gallery picture by cosine
    ids = torch.arange(30, 40).repeat_interleave(30)
    with torch.no_grad():
        a, b = F.normalize(net["body"](faces(ids, 7))), F.normalize(net["body"](faces(ids, 7)))
        return (ids[(a @ b.T).argmax(1)] == ids).float().mean().item()
