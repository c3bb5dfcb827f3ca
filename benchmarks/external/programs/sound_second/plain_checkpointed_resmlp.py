"""A ten-block residual MLP with activation checkpointing and stochastic depth predicts a nonlinear regression target.
Looks odd: every block runs its forward pass twice (recomputed in backward), some blocks are skipped at random in a step, so they have no gradient now and then."""
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.f1, self.f2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        nn.init.normal_(self.f2.weight, std=0.02); nn.init.zeros_(self.f2.bias)

    def forward(self, x): return x + self.f2(torch.nn.functional.gelu(self.f1(self.norm(x))))


class DeepNet(nn.Module):
    def __init__(self, d_in, d=40, depth=10, drop=0.15):
        super().__init__()
        self.stem = nn.Linear(d_in, d)
        self.blocks = nn.ModuleList(ResBlock(d) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 1))
        self.drop = drop

    def forward(self, x):
        x = self.stem(x)
        keep = torch.rand(len(self.blocks)) >= self.drop * torch.linspace(0, 1, len(self.blocks))
        for b, k in zip(self.blocks, keep):
            if self.training:
                if k: x = checkpoint(b, x, use_reentrant=False)
            else: x = b(x)
        return self.head(x).squeeze(1)


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(3.1416 * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - .5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(n, generator=g)
    return (x - .5) / .29, (y - 14.4) / 5


def train(watch):
    torch.manual_seed(6)
    x, y = friedman(8000, 0)
    xv, yv = friedman(1000, 1)
    model = DeepNet(10)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = 350
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 30) * (1 - s / steps) + 1e-3)
    monitor = watch(model, opt)
    for step in range(steps):
        i = torch.randint(0, len(x), (48,))
        loss = ((model(x[i]) - y[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad(): return float(1 - ((model(xv) - yv) ** 2).mean() / yv.var())
