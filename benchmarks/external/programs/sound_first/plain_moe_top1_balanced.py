"""Switch-style mixture of experts (top-1 of six) with a load-balancing loss on a piecewise function.
Odd at first sight: in some steps an expert receives few tokens or none, so its gradients are small or missing then; the balance term never goes to zero.
Returns test MSE (variance of the target: about 1)."""
import torch
from torch import nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.a, self.b = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class SwitchLayer(nn.Module):
    def __init__(self, d, n=6, h=48):
        super().__init__()
        self.n, self.gate = n, nn.Linear(d, n)
        self.experts = nn.ModuleList([Expert(d, h) for _ in range(n)])

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + 0.1 * torch.randn_like(logits)
        p = logits.softmax(1)
        top, idx = p.max(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (idx == e).nonzero(as_tuple=True)[0]
            if len(rows):
                out[rows] = expert(x[rows])
        frac = F.one_hot(idx, self.n).float().mean(0)
        self.balance = self.n * (frac * p.mean(0)).sum()
        return x + top[:, None] * out


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp, self.moe, self.norm, self.out = nn.Linear(4, d), SwitchLayer(d), nn.LayerNorm(d), nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.norm(self.moe(F.gelu(self.inp(x)))))


def target(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g) * 2 - 1
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    f = torch.stack([2 * x[:, 2], (3 * x[:, 3]).sin(), x[:, 2] * x[:, 3] * 2, -1.5 * x[:, 2].abs()], 1)
    return x, f.gather(1, region[:, None]) + 0.05 * torch.randn(n, 1, generator=g)


def train(watch):
    torch.manual_seed(2)
    torch.set_num_threads(1)
    x, y = target(8000, 0)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 750)
    monitor = watch(net, opt)
    for step in range(750):
        i = torch.randint(0, 8000, (256,))
        mse = F.mse_loss(net(x[i]), y[i])
        loss = mse + 0.01 * net.moe.balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("balance", net.moe.balance.detach())
    net.eval()
    xt, yt = target(3000, 1)
    with torch.no_grad():
        return F.mse_loss(net(xt), yt).item()
