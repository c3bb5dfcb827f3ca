"""A GRU classifier of gait cycles whose effective batch of 64 is made of four micro-batches of 16 with the loss divided by four.
Ordinary accumulation; the logged loss is the mean over the micro-batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUM = 4


def gait(n, seed, T=30):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(T)
    f = torch.tensor([.20, .25, .25, .32])[y][:, None] * (1 + .06 * torch.randn(n, 1, generator=g))
    ph = torch.rand(n, 1, generator=g) * 6.28
    lag = torch.tensor([0., .4, 1.6, .8])[y][:, None]
    left, right = torch.sin(6.28 * f * t + ph), torch.sin(6.28 * f * t + ph + 3.14 + lag)
    return torch.stack([left, right, left * right], 2) + .5 * torch.randn(n, T, 3, generator=g), y


class Gait(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.rnn = nn.GRU(3, h, batch_first=True)
        self.norm, self.fc = nn.LayerNorm(h), nn.Linear(h, 4)

    def forward(self, x): return self.fc(self.norm(self.rnn(x)[0].mean(1)))


def train(watch):
    torch.manual_seed(15)
    dl = DataLoader(TensorDataset(*gait(1920, 0)), batch_size=16, shuffle=True, drop_last=True)
    xv, yv = gait(1000, 1)
    model = Gait()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 120, .4)
    monitor = watch(model, opt)
    for epoch in range(8):
        running = 0.
        for k, (x, y) in enumerate(dl):
            loss = F.cross_entropy(model(x), y) / ACCUM
            loss.backward()
            running += loss.item()
            if (k + 1) % ACCUM == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.)
                opt.step()
                opt.zero_grad()
                sched.step()
                monitor.log_scalar("loss", running)
                running = 0.
        with torch.no_grad(): acc = (model(xv).argmax(1) == yv).float().mean().item()
        print(epoch, acc)
    return acc
