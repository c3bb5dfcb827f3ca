"""A residual MLP on a noisy modular feature task, where torch.optim.Muon moves the hidden matrices and AdamW embeddings, norms and the head.
Looks odd: two optimizers with rates of different sizes (0.01 and 0.003) on one net, and Muon's updates all have the same norm however small the gradient is."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x): return x + self.down(F.relu(self.up(self.norm(x))).square())


class Net(nn.Module):
    def __init__(self, vocab=32, d=64, classes=8):
        super().__init__()
        self.emb = nn.Embedding(vocab * 4, d)
        nn.init.normal_(self.emb.weight, std=.5)
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, classes)
        self.register_buffer("offset", torch.arange(4) * vocab)

    def forward(self, x):
        z = self.emb(x + self.offset).sum(1)
        for b in self.blocks: z = b(z)
        return self.head(self.norm(z))


def make(n, g):
    """four symbols 0..31; hidden two-bit codes of each symbol decide the class"""
    code = torch.randint(0, 4, (4, 32), generator=torch.Generator().manual_seed(1))
    x = torch.randint(0, 32, (n, 4), generator=g)
    c = torch.stack([code[k, x[:, k]] for k in range(4)], 1)
    y = (c[:, 0] * c[:, 1] + 2 * (c[:, 2] > c[:, 3]).long()) % 8
    bad = torch.rand(n, generator=g) < .05
    return x, torch.where(bad, torch.randint(0, 8, (n,), generator=g), y)


def train(watch):
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(0)
    net = Net()
    hidden = [p for n, p in net.blocks.named_parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if not any(p is q for q in hidden)]
    muon = torch.optim.Muon(hidden, lr=.01, momentum=.95, weight_decay=.01)
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(.9, .95), weight_decay=0.)
    steps = 500
    decay = lambda s: min(1., (s + 1) / 20, 1.5 * (1 - s / steps) + .02)
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, decay) for o in (muon, adam)]
    monitor = watch(net, muon, adam)
    for step in range(steps):
        x, y = make(128, g)
        loss = F.cross_entropy(net(x), y)
        muon.zero_grad(); adam.zero_grad()
        loss.backward()
        muon.step(); adam.step()
        for s in scheds: s.step()
        monitor.log_scalar("loss", loss.detach())
    x, y = make(4000, torch.Generator().manual_seed(77))
    with torch.no_grad(): return (net(x).argmax(1) == y).float().mean().item()
