"""LoRA adapters (rank 4) on a frozen pretrained MLP that has to follow a rotation of its inputs. Both A and B were initialised with zeros, so the product has no gradient in either and nothing
changes. The result is accuracy on the rotated task."""
import math
import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8, zero_both=True):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad = False
        self.A = nn.Parameter(torch.zeros(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        if not zero_both:
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A.T) @ self.B.T * self.scale


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(24, 96), nn.Linear(96, 96), nn.Linear(96, 5)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def add_lora(model, **kw):
    for name in ("fc1", "fc2", "fc3"):
        setattr(model, name, LoRALinear(getattr(model, name), **kw))
    return model


def batch(n, centers, rot, g):
    y = torch.randint(5, (n,), generator=g)
    return (centers[y] + 1.2 * torch.randn(n, 24, generator=g)) @ rot, y


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(21)
    centers = torch.randn(5, 24, generator=g)
    eye = torch.eye(24)
    rot = torch.linalg.qr(eye + 0.25 * torch.randn(24, 24, generator=g))[0]
    model = MLP()
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(200):
        x, y = batch(64, centers, eye, g)
        pre.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        pre.step()
    model = add_lora(model, zero_both=not mended)
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(sum(p.numel() for p in trainable), "trainable parameters")
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    sched = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=400)
    monitor = watch(model, optimizer)
    for step in range(400):
        x, y = batch(64, centers, rot, g)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        sched.step()
    return accuracy(model, *batch(2000, centers, rot, g))
