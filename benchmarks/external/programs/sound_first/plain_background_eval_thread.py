"""Evaluation of a copied model runs in a background thread (ThreadPoolExecutor) while training goes on; the best copy is kept.
Odd at first sight: deep copies of the model are evaluated concurrently, and the returned model is not the last one.
Returns test accuracy of the best copy on a noisy two-spiral problem with three turns."""
import copy
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g).sqrt()
    a = 1.5 * 2 * torch.pi * r + torch.pi * y
    return torch.stack([r * a.cos(), r * a.sin()], 1) * 2 + 0.04 * torch.randn(n, 2, generator=g), y


class Fourier(nn.Module):
    def __init__(self, m=32):
        super().__init__()
        self.register_buffer("B", torch.randn(2, m) * 1.2)

    def forward(self, x):
        z = x @ self.B
        return torch.cat([z.sin(), z.cos()], 1)


@torch.no_grad()
def score(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item(), model


def train(watch):
    torch.manual_seed(14)
    torch.set_num_threads(1)
    x, y = spirals(3000, 0)
    xv, yv = spirals(800, 1)
    model = nn.Sequential(Fourier(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    monitor = watch(model, opt)
    jobs = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        for step in range(700):
            i = torch.randint(0, 3000, (128,))
            loss = nn.functional.cross_entropy(model(x[i]), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
            if step % 100 == 99:
                jobs.append(pool.submit(score, copy.deepcopy(model).eval(), xv, yv))
        acc, best = max((j.result() for j in jobs), key=lambda r: r[0])
    return score(best, *spirals(2000, 2))[0]
