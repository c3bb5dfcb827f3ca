"""A bidirectional LSTM with packed sequences tells apart event logs of different lengths (does an alarm follow two warnings?).
Ordinary; RMSprop, clipping, a validation split and accuracy on fresh logs."""
import random
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

OK, WARN, ALARM, RESET = 1, 2, 3, 4


class Logs(Dataset):
    def __init__(self, n, seed):
        r = random.Random(seed)
        self.rows = []
        while len(self.rows) < n:
            s = r.choices([OK, WARN, ALARM, RESET, 5, 6, 7], [4, 3, 2, 1.5, 2, 2, 2], k=r.randint(6, 20))
            w, y = 0, 0
            for e in s:
                if e == WARN: w += 1
                elif e == RESET: w = 0
                elif e == ALARM and w >= 2: y = 1
            if sum(q[1] for q in self.rows) * 2 < len(self.rows) or y == 0: self.rows.append((torch.tensor(s), y))

    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]


def collate(b):
    s, y = zip(*b)
    return pad_sequence(s, batch_first=True), torch.tensor([len(v) for v in s]), torch.tensor(y, dtype=torch.float)


class Detector(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.emb = nn.Embedding(8, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, h, bidirectional=True, batch_first=True)
        self.out = nn.Linear(4 * h, 1)

    def forward(self, s, n):
        p = pack_padded_sequence(self.emb(s), n, batch_first=True, enforce_sorted=False)
        o, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(p)[0], batch_first=True)
        mask = (torch.arange(o.shape[1]) < n[:, None])[..., None]
        mean = (o * mask).sum(1) / n[:, None]
        return self.out(torch.cat([o.masked_fill(~mask, -1.0).amax(1), mean], 1)).squeeze(1)


def train(watch):
    torch.manual_seed(0)
    tr, te = DataLoader(Logs(3000, 0), 50, shuffle=True, collate_fn=collate), DataLoader(Logs(800, 1), 200, collate_fn=collate)
    model = Detector()
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    monitor = watch(model, opt)
    for epoch in range(7):
        model.train()
        for s, n, y in tr:
            loss = loss_fn(model(s, n), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        model.eval()
        with torch.no_grad(): acc = sum(((model(s, n) > 0) == (y > .5)).sum().item() for s, n, y in te) / 800
        print(epoch, acc)
    return acc
