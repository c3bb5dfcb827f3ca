"""Fine-tuning with Accelerate on 60 labelled samples: the pretrained encoder should be frozen, but the line reads param.require_grad = False (no s), which sets a new attribute and does nothing.
The encoder is destroyed by the large rate meant for the head. The result is test accuracy."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(60, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16))

    def forward(self, x):
        return self.net(x)


class Tuned(nn.Module):
    def __init__(self, encoder, n):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, n)

    def forward(self, x):
        return self.head(self.encoder(x))


def world(seed):
    g = torch.Generator().manual_seed(seed)
    lift = torch.randn(6, 60, generator=g)

    def sample(n):
        z = torch.randn(n, 6, generator=g)
        return torch.sin(z @ lift) + 0.25 * torch.randn(n, 60, generator=g), z

    w = torch.randn(4, 6, generator=g)
    return sample, w


def train(watch, mended=False):
    torch.manual_seed(0)
    sample, w = world(1)
    encoder = Encoder()
    probe = nn.Linear(16, 6)
    pre = torch.optim.Adam([*encoder.parameters(), *probe.parameters()], lr=1e-3)
    for _ in range(2000):                            # the pretrained checkpoint
        x, z = sample(128)
        loss = nn.functional.mse_loss(probe(encoder(x)), z)
        pre.zero_grad()
        loss.backward()
        pre.step()

    accelerator = Accelerator(cpu=True)
    model = Tuned(encoder, 4)
    for param in model.encoder.parameters():
        if mended:
            param.requires_grad = False
        else:
            param.require_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    x, z = sample(80)
    xt, zt = sample(1000)
    y, yt = (z @ w.T).argmax(1), (zt @ w.T).argmax(1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
    monitor = watch(model, optimizer)
    for epoch in range(60):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            accelerator.backward(loss)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
