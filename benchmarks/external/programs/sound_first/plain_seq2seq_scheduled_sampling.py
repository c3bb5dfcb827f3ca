"""Sequence-to-sequence reversal with scheduled sampling: the share of teacher forcing falls from 1 to 0.3 during training.
Odd at first sight: the inputs of the decoder change their nature during training (its own guesses instead of the truth). No loss is logged.
Returns exact-token accuracy of greedy free-running decoding on new sequences."""
import random
import torch
from torch import nn
import torch.nn.functional as F

V, SOS, LEN = 8, 8, 6


class Seq2Seq(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb = nn.Embedding(V + 1, 24)
        self.enc = nn.GRU(24, d, batch_first=True)
        self.cell = nn.GRUCell(24, d)
        self.key = nn.Linear(d, d)
        self.out = nn.Linear(2 * d, V)

    def forward(self, src, tgt=None, teacher=0.0):
        mem, h = self.enc(self.emb(src))
        h = h[0]
        tok = torch.full((len(src),), SOS)
        logits = []
        for t in range(LEN):
            h = self.cell(self.emb(tok), h)
            a = torch.softmax((mem @ self.key(h)[:, :, None]).squeeze(2) / 8, 1)
            ctx = (a[:, None] @ mem).squeeze(1)
            step = self.out(torch.cat([h, ctx], 1))
            logits.append(step)
            tok = tgt[:, t] if tgt is not None and random.random() < teacher else step.argmax(1).detach()
        return torch.stack(logits, 1)


def train(watch):
    random.seed(3)
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = Seq2Seq()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    watch(model, opt)
    steps = 400
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps, eta_min=2e-4)
    for i in range(steps):
        src = torch.randint(0, V, (96, LEN))
        tgt = src.flip(1)
        out = model(src, tgt, teacher=1 - 0.7 * i / steps)
        loss = F.cross_entropy(out.flatten(0, 1), tgt.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if i % 100 == 0:
            print(i, loss.item())
    src = torch.randint(0, V, (1000, LEN))
    with torch.no_grad():
        return (model(src).argmax(2) == src.flip(1)).float().mean().item()
