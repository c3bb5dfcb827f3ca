"""A GRU encoder-decoder with additive attention rewrites written dates ("3 of may 1987") into ISO digits, with scheduled sampling.
Looks odd: the inputs of the decoder change under way (the share of teacher tokens falls from 1.0 to 0.3), sampled by argmax without any gradient through the choice."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

MONTHS = "january february march april may june july august september october november december".split()
CHARS = ["<pad>", "<s>"] + list("abcdefghijklmnopqrstuvwxyz0123456789- ,/")
IDX = {c: i for i, c in enumerate(CHARS)}


def sample(r):
    y, m, d = r.randint(1950, 2049), r.randint(1, 12), r.randint(1, 28)
    src = r.choice([f"{d} of {MONTHS[m-1]} {y}", f"{MONTHS[m-1]} {d}, {y}", f"{MONTHS[m-1][:3]} {d} {y}", f"{d}/{m}/{y}"])
    return torch.tensor([IDX[c] for c in src]), torch.tensor([IDX[c] for c in f"{y:04d}-{m:02d}-{d:02d}"])


def dataset(n, seed):
    r = random.Random(seed)
    s, t = zip(*(sample(r) for _ in range(n)))
    return pad_sequence(s, batch_first=True), torch.stack(t)


class Seq2Seq(nn.Module):
    def __init__(self, v=len(CHARS), e=24, h=40):
        super().__init__()
        self.emb = nn.Embedding(v, e, padding_idx=0)
        self.enc = nn.GRU(e, h, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * h, h)
        self.wq, self.wk, self.score = nn.Linear(h, h), nn.Linear(2 * h, h, bias=False), nn.Linear(h, 1, bias=False)
        self.cell = nn.GRUCell(e + 2 * h, h)
        self.out = nn.Linear(3 * h, v)

    def forward(self, src, tgt, teacher=1.0):
        enc, hn = self.enc(self.emb(src))
        h = torch.tanh(self.bridge(torch.cat([hn[0], hn[1]], 1)))
        keys, pad = self.wk(enc), src.eq(0)
        tok = torch.full((len(src),), 1)
        logits = []
        for t in range(tgt.shape[1]):
            a = self.score(torch.tanh(self.wq(h)[:, None] + keys)).squeeze(-1).masked_fill(pad, -1e9).softmax(-1)
            ctx = torch.einsum("bs,bsd->bd", a, enc)
            h = self.cell(torch.cat([self.emb(tok), ctx], 1), h)
            o = self.out(torch.cat([h, ctx], 1))
            logits.append(o)
            use = torch.rand(len(src)) < teacher
            tok = torch.where(use, tgt[:, t], o.argmax(1))
        return torch.stack(logits, 1)


def train(watch):
    torch.manual_seed(2)
    src, tgt = dataset(2400, 0)
    vs, vt = dataset(400, 1)
    model = Seq2Seq()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    watch(model, opt)
    for epoch in range(6):
        teacher = max(0.3, 1 - 0.15 * epoch)
        model.train()
        for b in torch.randperm(len(src)).split(60):
            loss = F.cross_entropy(model(src[b], tgt[b], teacher).flatten(0, 1), tgt[b].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        model.eval()
        with torch.no_grad():
            out = model(vs, vt, 0.0)
            sched.step(F.cross_entropy(out.flatten(0, 1), vt.flatten()))
            exact = (out.argmax(-1) == vt).all(1).float().mean().item()
        print(epoch, loss.item(), exact)
    return exact
