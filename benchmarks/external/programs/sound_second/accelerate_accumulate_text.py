"""An Accelerate loop with gradient accumulation of four micro-batches for a convolutional text tagger.
Looks odd: zero_grad and step are called in each micro-batch, but only every fourth is a real step; the accelerator scales the loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def tagged(n, seed, length=20, vocab=60):
    """tag of a token depends on its class and its left neighbour"""
    g = torch.Generator().manual_seed(seed)
    cls = torch.randint(0, 4, (vocab,), generator=torch.Generator().manual_seed(8))
    x = torch.randint(0, vocab, (n, length), generator=g)
    c = cls[x]
    left = torch.roll(c, 1, 1); left[:, 0] = 0
    y = (c * 2 + left) % 6
    noise = torch.rand(y.shape, generator=g) < .05
    return x, torch.where(noise, torch.randint(0, 6, y.shape, generator=g), y)


class Tagger(nn.Module):
    def __init__(self, vocab=60, d=48, tags=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.conv = nn.Sequential(nn.Conv1d(d, 64, 3, padding=1), nn.GELU(), nn.Conv1d(64, 64, 3, padding=1), nn.GELU())
        self.out = nn.Linear(64, tags)

    def forward(self, x): return self.out(self.conv(self.emb(x).transpose(1, 2)).transpose(1, 2))


def train(watch):
    torch.manual_seed(0)
    acc = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=.01)
    dl = DataLoader(TensorDataset(*tagged(4000, 0)), batch_size=16, shuffle=True)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_iters=250)
    model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
    monitor = watch(model, opt)
    for epoch in range(4):
        for x, y in dl:
            with acc.accumulate(model):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                acc.backward(loss)
                if acc.sync_gradients: acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if acc.sync_gradients: monitor.log_scalar("loss", loss.detach())
        acc.print(epoch, loss.item())
    x, y = tagged(500, 1)
    model.eval()
    with torch.no_grad(): return (model(x).argmax(-1) == y).float().mean().item()
