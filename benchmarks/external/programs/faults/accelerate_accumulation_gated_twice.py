"""Accelerate with gradient_accumulation_steps=4 for a small image classifier. Inside accelerator.accumulate() somebody kept the old
`if step % 4 == 0:` around optimizer.step(); the wrapped optimizer skips those calls, so it never really steps."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    ang = y.float() * torch.pi / 4
    yy, xx = torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing="ij")
    phase = torch.rand(n, 1, 1, generator=g) * 6.28
    img = torch.sin(0.9 * (xx * ang.cos().view(-1, 1, 1) + yy * ang.sin().view(-1, 1, 1)) + phase)
    return TensorDataset((img + 0.8 * torch.randn(n, 16, 16, generator=g)).unsqueeze(1), y)


def build():
    return nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def train(watch, mended=False):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(stripes(2048, 1), batch_size=16, shuffle=True, drop_last=True)
    val = DataLoader(stripes(512, 2), batch_size=128)
    model, optimizer, loader, val = accelerator.prepare(model, optimizer, loader, val)
    monitor = watch(model, optimizer)
    for epoch in range(6):
        model.train()
        for step, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if mended or step % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    hits = n = 0
    with torch.no_grad():
        for x, y in val:
            pred, y = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            hits, n = hits + (pred == y).sum().item(), n + len(y)
    return hits / n
