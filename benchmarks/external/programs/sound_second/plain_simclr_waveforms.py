"""SimCLR on one-dimensional motifs: NT-Xent at temperature 0.2 with two augmented views, then a linear probe on frozen features.
Looks odd: the contrastive loss stays well above zero (other views of the same class are among the negatives), and the projection head is thrown away."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def recordings(n, seed, classes=6, length=64):
    g = torch.Generator().manual_seed(seed)
    m = torch.randn(classes, 3, length, generator=torch.Generator().manual_seed(4))
    m = F.avg_pool1d(m, 7, 1, 3) * 2.6
    y = torch.randint(0, classes, (n,), generator=g)
    warp = 1 + .3 * torch.randn(n, 3, 1, generator=g)
    return m[y] * warp + .6 * torch.randn(n, 3, length, generator=g), y


def augment(x):
    n, c, l = x.shape
    shift = torch.randint(-4, 5, (n,))
    x = torch.stack([torch.roll(a, int(s), -1) for a, s in zip(x, shift)])
    x = x * (1 + .3 * torch.randn(n, c, 1)) + .4 * torch.randn_like(x)
    start = torch.randint(0, l - 16, (n, 1))
    mask = (torch.arange(l) >= start) & (torch.arange(l) < start + 16)
    return x.masked_fill(mask[:, None], 0.)


def nt_xent(a, b, tau=.2):
    z = F.normalize(torch.cat([a, b]))
    s = (z @ z.T / tau).fill_diagonal_(-1e9)
    n = len(a)
    return F.cross_entropy(s, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def train(watch):
    torch.manual_seed(13)
    x, y = recordings(2500, 0)
    xv, yv = recordings(1000, 1)
    enc = nn.Sequential(nn.Conv1d(3, 24, 7, 2, 3), nn.BatchNorm1d(24), nn.ReLU(), nn.Conv1d(24, 48, 5, 2, 2), nn.BatchNorm1d(48), nn.ReLU(),
                        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(192, 64))
    proj = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    model = nn.ModuleDict({"encoder": enc, "projector": proj})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    steps = 260
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    monitor = watch(model, opt)
    done = 0
    while done < steps:
        for b in torch.randperm(len(x)).split(96):
            if len(b) < 96 or done == steps: continue
            loss = nt_xent(proj(enc(augment(x[b]))), proj(enc(augment(x[b]))))
            opt.zero_grad()
            loss.backward()
            opt.step(); sched.step()
            done += 1
            monitor.log_scalar("ntxent", loss.detach())
    model.eval()
    with torch.no_grad(): f, fv = enc(x), enc(xv)
    mu, sd = f.mean(0), f.std(0) + 1e-6
    probe = nn.Linear(64, 6)
    popt = torch.optim.Adam(probe.parameters(), lr=.02)
    for _ in range(120):                                   # 200 labels only
        popt.zero_grad(); F.cross_entropy(probe((f[:200] - mu) / sd), y[:200]).backward(); popt.step()
    with torch.no_grad(): return (probe((fv - mu) / sd).argmax(1) == yv).float().mean().item()
