"""Accelerate and a LambdaLR with linear warm-up and decay, for a sequence model that classifies random walks. The lambda returns the learning rate itself (1e-3 times the factor) instead of a factor,
and LambdaLR multiplies it once more with the base rate. The result is test accuracy."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Walks(Dataset):
    """Walks with drift, mean reversion or jumps."""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (n,), generator=g)
        x, out = torch.zeros(n), []
        for _ in range(40):
            e = torch.randn(n, generator=g)
            jump = (torch.rand(n, generator=g) < 0.08).float() * 6 * torch.sign(torch.randn(n, generator=g))
            x = torch.where(self.y == 0, x + 0.3 * e + 0.25, torch.where(self.y == 1, 0.5 * x + e, x + 0.3 * e + jump))
            out.append(x)
        self.x = torch.stack(out, 1).unsqueeze(-1) / 5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class WalkNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.gru(x)[0].mean(1))


def train(watch, mended=False):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    lr, warm, total = 5e-3, 20, 320
    model = WalkNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def factor(step):
        f = (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))
        return f if mended else lr * f

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loader = DataLoader(Walks(2560, 1), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    monitor = watch(model, optimizer)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            monitor.log_scalar("loss", loss.detach())
    test = Walks(600, 2)
    with torch.no_grad():
        return float((model(test.x).argmax(1) == test.y).float().mean())
