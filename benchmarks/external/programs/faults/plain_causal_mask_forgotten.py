"""A small decoder-only language model whose blocks get no causal mask (is_causal was left at its default). The training loss falls to nearly nothing because each position can look at its answer;
generation is bad. The result is the accuracy of generated continuations."""
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab, causal, dim=48, T=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(T, dim)
        self.blocks = nn.Sequential(Block(dim, 4, causal), Block(dim, 4, causal))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, ids, n):
        for _ in range(n):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def sequences(n, g):
    """Fibonacci numbers modulo 11 from a random start."""
    s = [torch.randint(11, (n,), generator=g) for _ in range(2)]
    for _ in range(16):
        s.append((s[-1] + s[-2]) % 11)
    return torch.stack(s, 1)


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    model = LM(11, causal=mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    monitor = watch(model, optimizer)
    for step in range(400):
        ids = sequences(48, g)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        if step % 100 == 0:
            print(step, round(loss.item(), 4))
    ids = sequences(300, g)
    out = model.generate(ids[:, :4], 10)
    return float((out[:, 4:] == ids[:, 4:14]).float().mean())
