"""Accelerate with mixed_precision="bf16" on the CPU trains a residual denoiser for one-dimensional signals.
Ordinary; the net predicts the noise, and the measure is the gain in signal-to-noise ratio in decibels."""
import math
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __init__(self, n, seed, length=64):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, length)
        clean = sum(torch.rand(n, 1, generator=g) * torch.sin(2 * math.pi * (1 + 3 * torch.rand(n, 1, generator=g)) * t + 6.28 * torch.rand(n, 1, generator=g)) for _ in range(2))
        step = (t > torch.rand(n, 1, generator=g)).float() * (torch.rand(n, 1, generator=g) * 2 - 1)
        self.clean = (clean + step)[:, None]
        self.noisy = self.clean + .4 * torch.randn(self.clean.shape, generator=g)

    def __len__(self): return len(self.clean)
    def __getitem__(self, i): return self.noisy[i], self.clean[i]


class DnCNN(nn.Module):
    def __init__(self, c=24, depth=4):
        super().__init__()
        layers = [nn.Conv1d(1, c, 7, padding=3), nn.ReLU()]
        for _ in range(depth - 2): layers += [nn.Conv1d(c, c, 7, padding=3, bias=False), nn.BatchNorm1d(c), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv1d(c, 1, 7, padding=3))

    def forward(self, x): return x - self.net(x)


def train(watch):
    torch.manual_seed(4)
    AcceleratorState._reset_state(reset_partial_state=True)      # as in a notebook, where another accelerator may be alive
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = DnCNN()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    dl = DataLoader(Signals(3000, 0), 50, shuffle=True)
    model, opt, dl = accelerator.prepare(model, opt, dl)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, 6 * len(dl))
    monitor = watch(model, opt)
    for ep in range(6):
        model.train()
        for noisy, clean in dl:
            loss = nn.functional.mse_loss(model(noisy), clean)
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
    test = Signals(500, 1)
    model.eval()
    with torch.no_grad():
        before, after = ((test.noisy - test.clean) ** 2).mean(), ((model(test.noisy).float() - test.clean) ** 2).mean()
    AcceleratorState._reset_state(reset_partial_state=True)
    return float(10 * torch.log10(before / after))
