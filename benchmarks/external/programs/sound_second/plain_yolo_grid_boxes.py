"""A one-scale grid detector in the manner of YOLO finds rectangles: objectness, offsets and sizes in one head with a weighted sum of losses.
Ordinary; negative cells are weighted by a half and the box terms count only where there is an object."""
import torch
import torch.nn as nn
import torch.nn.functional as F

S, G = 32, 4
CELL = S // G


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    img = .25 * torch.randn(n, 1, S, S, generator=g)
    t = torch.zeros(n, 5, G, G)
    for i in range(n):
        for c in torch.randperm(G * G, generator=g)[:int(torch.randint(1, 4, (1,), generator=g))]:
            gy, gx = divmod(int(c), G)
            cy, cx = ((torch.tensor([gy, gx]) + torch.rand(2, generator=g)) * CELL).tolist()
            h, w = (torch.rand(2, generator=g) * 6 + 4).tolist()
            y0, y1, x0, x1 = max(0, cy - h / 2), min(S, cy + h / 2), max(0, cx - w / 2), min(S, cx + w / 2)
            img[i, 0, round(y0):round(y1), round(x0):round(x1)] += 1
            t[i, :, gy, gx] = torch.tensor([1, cy / CELL - gy, cx / CELL - gx, h / CELL, w / CELL])
    return img, t


net_fn = lambda: nn.Sequential(
    nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.LeakyReLU(.1),
    nn.Conv2d(12, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.LeakyReLU(.1),
    nn.Conv2d(24, 48, 3, 1, 1, bias=False), nn.BatchNorm2d(48), nn.LeakyReLU(.1),
    nn.Conv2d(48, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(.1),
    nn.Conv2d(64, 5, 3, 1, 1))


def yolo_loss(out, t):
    obj = t[:, 0]
    l_obj = F.binary_cross_entropy_with_logits(out[:, 0], obj, weight=torch.where(obj > 0, 1., .5))
    m = obj > 0
    box = out.permute(0, 2, 3, 1)[m][:, 1:]
    tgt = t.permute(0, 2, 3, 1)[m][:, 1:]
    return l_obj + 1.0 * F.mse_loss(box[:, :2].sigmoid(), tgt[:, :2]) * 2 + F.smooth_l1_loss(box[:, 2:].exp(), tgt[:, 2:])


def train(watch):
    torch.manual_seed(3)
    x, t = make(2000, 0)
    xv, tv = make(400, 1)
    net = net_fn()
    opt = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [6, 9], .2)
    watch(net, opt)
    for ep in range(10):
        net.train()
        for b in torch.randperm(2000).split(50):
            loss = yolo_loss(net(x[b]), t[b])
            opt.zero_grad(); loss.backward(); opt.step()
        sched.step()
        net.eval()
        with torch.no_grad():
            p, o = net(xv)[:, 0] > 0, tv[:, 0] > 0
            f1 = (2 * (p & o).sum() / (p.sum() + o.sum())).item()
        print(ep, loss.item(), f1)
    return f1
