"""Accelerate: noisy top-2 mixture of eight experts (Shazeer) with importance loss, for classification of mixed sources.
Odd at first sight: not every expert is in use in every batch, gates are sparse, noise is added while training.
Returns test accuracy (six classes from four different sources)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader
from accelerate import Accelerator


class TopK(nn.Module):
    def __init__(self, d, n, k):
        super().__init__()
        self.w, self.noise, self.n, self.k = nn.Linear(d, n, bias=False), nn.Linear(d, n, bias=False), n, k

    def forward(self, x):
        logit = self.w(x)
        if self.training:
            logit = logit + torch.randn_like(logit) * F.softplus(self.noise(x)) * 0.3
        v, i = logit.topk(self.k, 1)
        gate = torch.zeros_like(logit).scatter(1, i, v.softmax(1))
        imp = gate.sum(0)
        return gate, imp.var() / (imp.mean() ** 2 + 1e-9)


class MoE(nn.Module):
    def __init__(self, d=16, n=8, k=2, classes=6):
        super().__init__()
        self.gate = TopK(d, n, k)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, classes)) for _ in range(n)])

    def forward(self, x):
        g, balance = self.gate(x)
        out = x.new_zeros(len(x), 6)
        for e, expert in enumerate(self.experts):
            rows = g[:, e].nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, g[rows, e, None] * expert(x[rows]))
        return out, balance


def sources(n, seed):
    g0, g = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    offset = 3.5 * torch.randn(4, 16, generator=g0)
    rule = torch.randn(4, 16, 6, generator=g0)
    s = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 16, generator=g)
    y = torch.einsum("nd,ndc->nc", x, rule[s]).argmax(1)
    return (x + offset[s]) * 0.4, y


def train(watch):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*sources(16000, 1)), batch_size=160, shuffle=True)
    model = MoE()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, 6 * 100)
    monitor = watch(model, opt)
    for epoch in range(6):
        model.train()
        for x, y in loader:
            out, balance = model(x)
            loss = F.cross_entropy(out, y) + 0.02 * balance
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    xt, yt = sources(3000, 2)
    with torch.no_grad():
        return (model(xt)[0].argmax(1) == yt).float().mean().item()
