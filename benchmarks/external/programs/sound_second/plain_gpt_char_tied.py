"""A two-layer character GPT with tied input and output embeddings learns a small made-up grammar.
Ordinary nanoGPT style: separate decay groups, warmup and cosine, clipping at 1.0."""
import math
import random
from dataclasses import dataclass
import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int = 28
    block_size: int = 40
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.0


def corpus(n, seed):
    r = random.Random(seed)
    subj = ["the cat", "a dog", "my uncle", "the old queen", "one robot", "that child"]
    verb = {"the cat": ["chases", "eats"], "a dog": ["chases", "buries"], "my uncle": ["reads", "burns"],
            "the old queen": ["burns", "hides"], "one robot": ["counts", "reads"], "that child": ["hides", "counts"]}
    obj = ["the mouse", "a bone", "seven books", "golden coins", "the letter", "some bread"]
    out = []
    for _ in range(n):
        s = r.choice(subj)
        out.append(f"{s} {r.choice(verb[s])} {r.choice(obj)}" + (" at night" if r.random() < .3 else "") + ".")
    return " ".join(out)


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.n_head = c.n_head

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(c.n_embd), CausalSelfAttention(c), nn.LayerNorm(c.n_embd)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init)
        for n, p in self.named_parameters():
            if n.endswith("c_proj.weight") or n.endswith("mlp.2.weight"):
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * c.n_layer))

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)): nn.init.normal_(m.weight, 0, 0.02)
        if isinstance(m, nn.Linear) and m.bias is not None: nn.init.zeros_(m.bias)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for b in self.h: x = b(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(watch):
    torch.manual_seed(1337)
    stoi = {ch: i for i, ch in enumerate(" .abcdefghijklmnopqrstuvwxyz")}
    enc = lambda s: torch.tensor([stoi[ch] for ch in s])
    data, val = enc(corpus(3000, 0)), enc(corpus(300, 1))
    cfg = GPTConfig()
    model = GPT(cfg)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    max_lr, iters, warm = 3e-3, 400, 40
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=max_lr, betas=(0.9, 0.95))

    def batch(d, n=16):
        ix = torch.randint(len(d) - cfg.block_size - 1, (n,))
        return torch.stack([d[i:i + cfg.block_size] for i in ix]), torch.stack([d[i + 1:i + 1 + cfg.block_size] for i in ix])

    monitor = watch(model, opt)
    for it in range(iters):
        lr = max_lr * (it + 1) / warm if it < warm else max_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (it - warm) / (iters - warm))))
        for grp in opt.param_groups: grp["lr"] = lr
        _, loss = model(*batch(data))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return float(sum(model(*batch(val, 64))[1] for _ in range(5)) / 5)
