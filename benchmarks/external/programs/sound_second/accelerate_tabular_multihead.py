"""Accelerate trains a multi-output tabular net (age group, income, two flags) with gather_for_metrics in the evaluation.
Ordinary; missing values are filled with zero plus an indicator column."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def census(n, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 5, generator=g)
    w = torch.randn(5, 14, generator=torch.Generator().manual_seed(3))
    x = torch.tanh(z @ w / 2) + .25 * torch.randn(n, 14, generator=g)
    miss = torch.rand(n, 14, generator=g) < .1
    x = torch.cat([x.masked_fill(miss, 0.), miss.float()], 1)
    age = torch.bucketize(z[:, 0] + .3 * torch.randn(n, generator=g), torch.tensor([-.7, .0, .7]))
    income = z[:, 1] + .5 * z[:, 2] * z[:, 0] + .3 * torch.randn(n, generator=g)
    flags = (torch.stack([z[:, 3] + z[:, 4], z[:, 2] - z[:, 3]], 1) + .4 * torch.randn(n, 2, generator=g) > 0).float()
    return TensorDataset(x, age, income, flags)


class Census(nn.Module):
    def __init__(self, h=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(28, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(.1), nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU())
        self.age, self.income, self.flags = nn.Linear(h, 4), nn.Linear(h, 1), nn.Linear(h, 2)

    def forward(self, x):
        z = self.body(x)
        return self.age(z), self.income(z).squeeze(1), self.flags(z)


def train(watch):
    torch.manual_seed(30)
    acc = Accelerator(cpu=True)
    model = Census()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    model, opt, tr, te, sched = acc.prepare(model, opt, DataLoader(census(6400, 0), 128, shuffle=True), DataLoader(census(1500, 1), 500), sched)
    monitor = watch(model, opt)
    for epoch in range(10):
        model.train()
        for x, a, i, f in tr:
            pa, pi, pf = model(x)
            loss = F.cross_entropy(pa, a) + F.mse_loss(pi, i) + F.binary_cross_entropy_with_logits(pf, f)
            opt.zero_grad()
            acc.backward(loss)
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        model.eval()
        hits = []
        with torch.no_grad():
            for x, a, i, f in te:
                p, t = acc.gather_for_metrics((model(x)[0].argmax(1), a))
                hits.append((p == t).float())
        score = torch.cat(hits).mean().item()
        acc.print(epoch, score)
    return score
