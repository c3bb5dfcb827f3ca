"""A word-level LSTM language model with tied weights, hidden state carried over between chunks (truncated backpropagation), and plain SGD in the Zaremba manner.
Looks odd: the learning rate is 5 with clipping at 0.25, and it is divided by four when the validation loss stops improving."""
import math
import random
import torch
import torch.nn as nn
import torch.nn.functional as F


def text(n, seed, vocab=100, states=12):
    """hidden Markov words: each state has its own words and likely followers"""
    r = random.Random(seed)
    fixed = random.Random(99)
    words = [[fixed.randrange(vocab) for _ in range(6)] for _ in range(states)]
    follow = [[fixed.randrange(states) for _ in range(2)] for _ in range(states)]
    s, out = 0, []
    for _ in range(n):
        out.append(r.choice(words[s]))
        s = r.choice(follow[s]) if r.random() < .95 else r.randrange(states)
    return torch.tensor(out)


def batchify(x, b): return x[:len(x) // b * b].view(b, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, vocab, d, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d)
        self.decoder = nn.Linear(d, vocab)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -.1, .1); nn.init.zeros_(self.decoder.bias)

    def forward(self, x, h):
        o, h = self.rnn(self.drop(self.encoder(x)), h)
        return self.decoder(self.drop(o)), h


def repackage(h): return tuple(v.detach() for v in h)


def evaluate(model, data, bptt):
    model.eval()
    h, tot = None, 0.
    with torch.no_grad():
        for i in range(0, len(data) - 1, bptt):
            n = min(bptt, len(data) - 1 - i)
            o, h = model(data[i:i + n], h)
            tot += F.cross_entropy(o.flatten(0, 1), data[i + 1:i + 1 + n].flatten()).item() * n
    model.train()
    return tot / (len(data) - 1)


def train(watch):
    torch.manual_seed(1111)
    bptt = 20
    tr, va = batchify(text(40000, 0), 20), batchify(text(6000, 1), 20)
    model = RNNModel(100, 64)
    lr = 5.0
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    monitor = watch(model, opt)
    best = None
    for epoch in range(6):
        h = (torch.zeros(1, 20, 64), torch.zeros(1, 20, 64))
        for i in range(0, len(tr) - 1 - bptt, bptt):
            h = repackage(h)
            out, h = model(tr[i:i + bptt], h)
            loss = F.cross_entropy(out.flatten(0, 1), tr[i + 1:i + 1 + bptt].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), .25)
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        v = evaluate(model, va, bptt)
        print(f"epoch {epoch} valid ppl {math.exp(v):.2f} lr {lr}")
        if best is None or v < best: best = v
        else:
            lr /= 4.
            for g in opt.param_groups: g["lr"] = lr
    return best
