"""A two-layer transformer encoder classifies bracket strings by the number of unmatched brackets, under bfloat16 autocast on the CPU with float32 master weights.
Looks odd: logits come out in bfloat16 and the loss is computed in float32; no grad scaler is needed for bfloat16."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

L = 10


def brackets(n, seed):
    """0 pad-free strings of ( and ); classes: number of unmatched brackets 0..4 (capped)"""
    r = random.Random(seed)
    xs, ys = [], []
    for _ in range(n):
        d = un = 0
        s = []
        for _ in range(L):
            c = 1 if r.random() < .5 else 2
            s.append(c)
            if c == 1: d += 1
            elif d: d -= 1
            else: un += 1
        xs.append(s); ys.append(min(4, (d + un) // 2))
    return torch.tensor(xs), torch.tensor(ys)


class Encoder(nn.Module):
    def __init__(self, d=48, heads=4, layers=2, classes=5):
        super().__init__()
        self.tok, self.pos = nn.Embedding(3, d), nn.Parameter(torch.randn(L + 1, d) * .1)
        layer = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = F.pad(x, (1, 0))                     # token 0 is CLS
        return self.head(self.norm(self.enc(self.tok(x) + self.pos)[:, 0]))


def train(watch):
    torch.manual_seed(0)
    x, y = brackets(8000, 0)
    xv, yv = brackets(1000, 1)
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=480, pct_start=0.1)
    monitor = watch(model, opt)
    step = 0
    for ep in range(3):
        for b in torch.randperm(8000).split(50):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x[b])
            loss = F.cross_entropy(out.float(), y[b])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step(); sched.step()
            step += 1
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return (model(xv).float().argmax(1) == yv).float().mean().item()
