"""Character-level LSTM language model on a self-made text, stateful truncated backpropagation (32 characters), hidden state detached and carried on.
Ordinary; odd only that batches are not shuffled and the learning rate is divided by four when validation stalls.
Returns validation bits per character (uniform: 4.2)."""
import math
import random
import torch
from torch import nn

SUBJ, VERB, OBJ = ["the cat", "a dog", "my aunt", "the old man", "nobody"], ["sees", "likes", "finds", "paints"], ["the moon", "a red hat", "some bread", "two birds", "it"]


def story(n, rng):
    out = []
    for _ in range(n):
        s = f"{rng.choice(SUBJ)} {rng.choice(VERB)} {rng.choice(OBJ)}"
        out.append(s + (" and " + rng.choice(VERB) + " " + rng.choice(OBJ) if rng.random() < 0.3 else "") + ". ")
    return "".join(out)


class CharLM(nn.Module):
    def __init__(self, v, d=96):
        super().__init__()
        self.emb, self.rnn, self.drop, self.out = nn.Embedding(v, 32), nn.LSTM(32, d), nn.Dropout(0.1), nn.Linear(d, v)

    def forward(self, x, state):
        h, state = self.rnn(self.emb(x), state)
        return self.out(self.drop(h)), state


def batchify(ids, b):
    n = len(ids) // b
    return ids[:n * b].view(b, n).t().contiguous()


def detach(s):
    return tuple(t.detach() for t in s) if s is not None else None


def evaluate(model, data, ce):
    model.eval()
    state, tot, n = None, 0.0, 0
    with torch.no_grad():
        for i in range(0, len(data) - 33, 32):
            o, state = model(data[i:i + 32], state)
            tot += ce(o.flatten(0, 1), data[i + 1:i + 33].flatten()).item(); n += 1
    model.train()
    return tot / n / math.log(2)


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = random.Random(0)
    tr, va = story(4200, rng), story(500, rng)
    chars = sorted(set(tr + va))
    enc = lambda s: torch.tensor([chars.index(c) for c in s])
    data, val = batchify(enc(tr), 32), batchify(enc(va), 8)
    model, ce = CharLM(len(chars)), nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = watch(model, opt)
    best = 1e9
    for epoch in range(4):
        state = None
        for i in range(0, len(data) - 33, 32):
            out, state = model(data[i:i + 32], detach(state))
            loss = ce(out.flatten(0, 1), data[i + 1:i + 33].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        bpc = evaluate(model, val, ce)
        if bpc > best - 0.005:
            for g in opt.param_groups:
                g["lr"] /= 4
        best = min(best, bpc)
        print(epoch, bpc)
    return best
