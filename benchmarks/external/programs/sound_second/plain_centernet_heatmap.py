"""A CenterNet-like detector: a heatmap head with penalty-reduced focal loss and a size head with masked L1.
Looks odd: the heatmap bias starts at -2.19 so nearly all outputs are 0.1, positives are under one percent of pixels, and the first losses are dozens of times the last ones."""
import torch
import torch.nn as nn
import torch.nn.functional as F

STRIDE, S = 4, 48
G = S // STRIDE


def gaussian(heat, cy, cx, sigma=0.8):
    y, x = torch.meshgrid(torch.arange(G), torch.arange(G), indexing="ij")
    v = torch.exp(-((y - cy) ** 2 + (x - cx) ** 2) / (2 * sigma ** 2))
    torch.maximum(heat, v, out=heat)


def scene(n, seed):
    g = torch.Generator().manual_seed(seed)
    imgs = 0.2 * torch.randn(n, 1, S, S, generator=g)
    heat, size, mask = torch.zeros(n, 2, G, G), torch.zeros(n, 2, G, G), torch.zeros(n, 1, G, G)
    for i in range(n):
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            cls = int(torch.randint(0, 2, (1,), generator=g))
            h, w = torch.randint(7, 15, (2,), generator=g).tolist()
            y0 = int(torch.randint(0, S - h, (1,), generator=g)); x0 = int(torch.randint(0, S - w, (1,), generator=g))
            patch = torch.ones(h, w)
            if cls == 1: patch[2:-2, 2:-2] = 0          # hollow boxes are the second class
            imgs[i, 0, y0:y0 + h, x0:x0 + w] = patch + 0.1 * torch.randn(h, w, generator=g)
            cy, cx = int((y0 + h / 2) / STRIDE), int((x0 + w / 2) / STRIDE)
            gaussian(heat[i, cls], cy, cx)
            heat[i, cls, cy, cx] = 1
            size[i, :, cy, cx] = torch.tensor([h, w]) / STRIDE
            mask[i, 0, cy, cx] = 1
    return imgs, heat, size, mask


class CenterNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        def cbr(i, o, s): return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
        self.body = nn.Sequential(cbr(1, c, 2), cbr(c, c, 1), cbr(c, 2 * c, 2), cbr(2 * c, 2 * c, 1), cbr(2 * c, 2 * c, 1))
        self.heat = nn.Sequential(nn.Conv2d(2 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 2, 1))
        self.wh = nn.Sequential(nn.Conv2d(2 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 2, 1))
        self.heat[-1].bias.data.fill_(-2.19)

    def forward(self, x):
        f = self.body(x)
        return self.heat(f), self.wh(f)


def focal(logits, target):
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    pos = target.eq(1).float()
    pos_loss = -(1 - p) ** 2 * p.log() * pos
    neg_loss = -(p ** 2) * (1 - p).log() * (1 - target) ** 4 * (1 - pos)
    return (pos_loss + neg_loss).sum() / pos.sum().clamp(min=1)


@torch.no_grad()
def recall_precision_f1(net, data):
    net.eval()
    imgs, heat, _, _ = data
    h = net(imgs)[0].sigmoid()
    peak = (F.max_pool2d(h, 3, 1, 1) == h) & (h > 0.4)
    gt = heat == 1
    near = F.max_pool2d(gt.float(), 3, 1, 1) > 0
    near_p = F.max_pool2d(peak.float(), 3, 1, 1) > 0
    prec = (peak & near).sum() / peak.sum().clamp(min=1)
    rec = (gt & near_p).sum() / gt.sum()
    net.train()
    return float(2 * prec * rec / (prec + rec + 1e-9))


def train(watch):
    torch.manual_seed(5)
    tr, va = scene(600, 3), scene(150, 4)
    net = CenterNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [200, 260], 0.2)
    monitor = watch(net, opt)
    step = 0
    while step < 300:
        for idx in torch.randperm(600).split(16):
            img, heat, size, mask = (t[idx] for t in tr)
            ph, ps = net(img)
            l_heat = focal(ph, heat)
            l_size = (F.l1_loss(ps * mask, size * mask, reduction="sum")) / mask.sum()
            loss = l_heat + 0.1 * l_size
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
            step += 1
            if step == 300: break
        print(step, l_heat.item(), l_size.item())
    return recall_precision_f1(net, va)
