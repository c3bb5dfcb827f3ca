"""Gradient accumulation over micro-batches of variable-length sequences, normalised by the number of tokens of the whole group; last, smaller group of the epoch included.
Odd at first sight: backward is called eight times per optimizer step on sums (not means), and the gradients are divided by the token count just before the step.
Returns tagging accuracy on held-out sequences."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset
import torch.nn.functional as F


class Tagged(Dataset):
    """tag of a position: 1 if the symbol occurred before, 2 if it equals its predecessor, else 0"""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.seqs = []
        for _ in range(n):
            L = int(torch.randint(4, 15, (1,), generator=g))
            s = torch.randint(1, 9, (L,), generator=g)
            tags, seen = [], set()
            for i, v in enumerate(s.tolist()):
                tags.append(2 if i and v == s[i - 1] else 1 if v in seen else 0)
                seen.add(v)
            self.seqs.append((s, torch.tensor(tags)))

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        return self.seqs[i]


def collate(b):
    b.sort(key=lambda p: -len(p[0]))
    x, y = zip(*b)
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True, padding_value=-100), torch.tensor([len(s) for s in x])


class Tagger(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.emb = nn.Embedding(9, 16, padding_idx=0)
        self.rnn = nn.GRU(16, h, batch_first=True)
        self.out = nn.Linear(h, 3)

    def forward(self, x, lens):
        p, _ = self.rnn(pack_padded_sequence(self.emb(x), lens, batch_first=True))
        return self.out(pad_packed_sequence(p, batch_first=True)[0])


def groups(loader, k):
    buf = []
    for b in loader:
        buf.append(b)
        if len(buf) == k:
            yield buf
            buf = []
    if buf:
        yield buf


def train(watch):
    torch.manual_seed(30); torch.set_num_threads(1)
    loader = DataLoader(Tagged(2000, 0), batch_size=8, shuffle=True, collate_fn=collate)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8 * 32, eta_min=5e-4)
    monitor = watch(model, opt)
    for epoch in range(8):
        for group in groups(loader, 8):
            opt.zero_grad()
            total, tokens = 0.0, 0
            for x, y, lens in group:
                s = F.cross_entropy(model(x, lens).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
                s.backward()
                total, tokens = total + s.detach(), tokens + int(lens.sum())
            for p in model.parameters():
                p.grad.div_(tokens)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            monitor.log_scalar("loss", total / tokens)
    hit = n = 0
    for x, y, lens in DataLoader(Tagged(400, 1), batch_size=100, collate_fn=collate):
        with torch.no_grad():
            ok = model(x, lens).argmax(2) == y
        hit, n = hit + ok.sum().item(), n + int(lens.sum())
    return hit / n
