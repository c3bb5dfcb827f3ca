"""Grokking-like small-data training: addition modulo 23 with 60 % of all pairs, full batch, strong weight decay (1.0).
Odd at first sight: training accuracy is 100 % early with a tiny loss while validation is poor for long; only the decay then moves the net to the general solution.
Returns accuracy on the pairs that were left out."""
import torch
from torch import nn
import torch.nn.functional as F


class ModNet(nn.Module):
    def __init__(self, p, d=64, h=128):
        super().__init__()
        self.emb = nn.Embedding(p, d)
        self.up = nn.Linear(d, h, bias=False)
        self.out = nn.Linear(h, p, bias=False)
        nn.init.normal_(self.emb.weight, std=d ** -0.5)

    def forward(self, ab):
        h = self.up(self.emb(ab[:, 0]) + self.emb(ab[:, 1]))
        return self.out(torch.relu(h))


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    p = 23
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    y = pairs.sum(1) % p
    perm = torch.randperm(len(pairs))
    cut = int(0.6 * len(pairs))
    tr, va = perm[:cut], perm[cut:]
    model = ModNet(p)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0, betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10)
    monitor = watch(model, opt)
    for step in range(800):
        loss = F.cross_entropy(model(pairs[tr]), y[tr])
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        monitor.log_scalar("loss", loss.detach())
        if step % 50 == 0:
            with torch.no_grad():
                a, b = ((model(pairs[k]).argmax(1) == y[k]).float().mean().item() for k in (tr, va))
            print(step, f"{loss.item():.4f} train {a:.2f} val {b:.2f}")
    with torch.no_grad():
        return (model(pairs[va]).argmax(1) == y[va]).float().mean().item()
