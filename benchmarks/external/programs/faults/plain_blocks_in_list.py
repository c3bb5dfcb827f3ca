"""A TCN-like stack of 1-d convolution blocks finds which of four motifs is hidden in a signal. The blocks are kept in a plain
Python list and not in an nn.ModuleList, so the optimizer gets only the stem and the classifier."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.conv = nn.Conv1d(ch, ch, 5, padding=2 * dilation, dilation=dilation)
        self.norm = nn.GroupNorm(4, ch)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class MotifNet(nn.Module):
    def __init__(self, ch=24, depth=3, as_modules=False):
        super().__init__()
        self.stem = nn.Conv1d(1, ch, 1)
        blocks = [Block(ch, 2 ** i) for i in range(depth)]
        self.blocks = nn.ModuleList(blocks) if as_modules else blocks
        self.fc = nn.Linear(ch, 4)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.fc(x.amax(-1))


def signals(n, motifs, gen):
    y = torch.randint(4, (n,), generator=gen)
    x = 0.45 * torch.randn(n, 80, generator=gen)
    pos = torch.randint(0, 80 - 12, (n,), generator=gen)
    for i in range(n):
        x[i, pos[i]:pos[i] + 12] += motifs[y[i]]
    return x.unsqueeze(1), y


def train(watch, mended=False):
    torch.manual_seed(4)
    gen = torch.Generator().manual_seed(5)
    motifs = torch.randn(4, 12, generator=gen)
    motifs = motifs / motifs.norm(dim=1, keepdim=True) * 2.6
    x, y = signals(3000, motifs, gen)
    xt, yt = signals(800, motifs, gen)
    model = MotifNet(as_modules=mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    step = 0
    while step < 400:
        perm = torch.randperm(len(x))
        for i in range(0, len(x) - 31, 32):
            idx = perm[i:i + 32]
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            optimizer.step()
            step += 1
            if step >= 400:
                break
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
