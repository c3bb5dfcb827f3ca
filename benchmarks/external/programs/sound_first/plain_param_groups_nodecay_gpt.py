"""A tiny GPT on a small symbolic rule (maximum or minimum, by parity) with the usual two parameter groups (weight decay for matrices, none for biases, norms, embeddings), warm-up and cosine.
Entirely ordinary. Returns held-out accuracy of the answer token (random draws of a, b from 2500 pairs)."""
import math
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    vocab: int = 52
    ctx: int = 4
    width: int = 64
    heads: int = 4
    layers: int = 2


class CausalBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.width), nn.Embedding(c.ctx, c.width)
        self.blocks = nn.Sequential(*[CausalBlock(c) for _ in range(c.layers)])
        self.ln, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.05)

    def forward(self, t):
        return self.head(self.ln(self.blocks(self.tok(t) + self.pos.weight[:t.size(1)])))


def rule(n, g):
    """a b = -> max(a, b) if a even else min(a, b)"""
    a, b = torch.randint(0, 50, (n,), generator=g), torch.randint(0, 50, (n,), generator=g)
    y = torch.where(a % 2 == 0, torch.maximum(a, b), torch.minimum(a, b))
    return torch.stack([a, b, torch.full_like(a, 50)], 1), y


def configure(model, lr, wd):
    decay, no = [], []
    for n, p in model.named_parameters():
        (decay if p.ndim == 2 and "tok" not in n and "pos" not in n else no).append(p)
    return torch.optim.AdamW([{"params": decay, "weight_decay": wd}, {"params": no, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95))


def train(watch):
    torch.manual_seed(1337)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    model = GPT(GPTConfig())
    opt = configure(model, 2e-3, 0.1)
    total, warm = 450, 40
    lr_at = lambda s: (s + 1) / warm if s < warm else 0.05 + 0.475 * (1 + math.cos(math.pi * (s - warm) / (total - warm)))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)
    monitor = watch(model, opt)
    for step in range(total):
        x, y = rule(128, g)
        loss = F.cross_entropy(model(x)[:, -1], y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    x, y = rule(2000, torch.Generator().manual_seed(9))
    with torch.no_grad():
        return (model(x)[:, -1].argmax(1) == y).float().mean().item()
