"""Mixed precision with a GradScaler and gradient clipping at 1.0, SGD, a small MLP-Mixer on synthetic pictures. scaler.unscale_() is not called before the
clipping, so the gradients are cut while they are still 65536 times too large, and the real step is almost nothing."""
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(16, dim), MixerBlock(16, dim))
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def pictures(n, proto, g):
    y = torch.randint(5, (n,), generator=g)
    return (proto[y] + 1.2 * torch.randn(n, 16, 16, generator=g)).unsqueeze(1), y


def train(watch, mended=False):
    torch.manual_seed(10)
    g = torch.Generator().manual_seed(12)
    proto = nn.functional.interpolate(torch.randn(5, 1, 5, 5, generator=g), size=16, mode="bilinear")[:, 0]
    x, y = pictures(2400, proto, g)
    xt, yt = pictures(600, proto, g)
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
    model = Mixer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    monitor = watch(model, optimizer, scaler=scaler)
    for epoch in range(5):
        for xb, yb in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(xb), yb)
            scaler.scale(loss).backward()
            if mended:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            monitor.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
