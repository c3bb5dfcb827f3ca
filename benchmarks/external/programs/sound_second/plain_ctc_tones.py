"""A small conv + BiGRU acoustic model with CTC transcribes sequences of synthetic tone phones.
Looks odd: the first loss is tens of times the last, and at first the net says blank in every frame (phone error 100 percent) although the loss already falls."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader

N_PHONES, N_MEL = 8, 20


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(N_PHONES, N_MEL, generator=torch.Generator().manual_seed(99))
        self.items = []
        for _ in range(n):
            L = int(torch.randint(3, 8, (1,), generator=g))
            ph = torch.randint(0, N_PHONES, (L,), generator=g)
            frames = []
            for p in ph:
                d = int(torch.randint(4, 9, (1,), generator=g))
                env = torch.hann_window(d + 2)[1:-1, None]
                frames.append(proto[p] * (0.5 + env))
                frames.append(torch.zeros(int(torch.randint(1, 3, (1,), generator=g)), N_MEL))
            x = torch.cat(frames)
            self.items.append((x + 1.0 * torch.randn(x.shape, generator=g), ph + 1))

    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]


def collate(batch):
    xs, ys = zip(*batch)
    return (nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]),
            torch.cat(ys), torch.tensor([len(y) for y in ys]))


class Acoustic(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(N_MEL, h, 5, stride=1, padding=2), nn.BatchNorm1d(h), nn.ReLU(),
                                  nn.Conv1d(h, h, 3, stride=2, padding=1), nn.BatchNorm1d(h), nn.ReLU())
        self.rnn = nn.GRU(h, h, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * h, N_PHONES + 1)

    def forward(self, x, xl):
        z = self.conv(x.transpose(1, 2)).transpose(1, 2)
        z, _ = self.rnn(z)
        return self.fc(self.drop(z)).log_softmax(-1), (xl + 1) // 2


def edit(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


@torch.no_grad()
def phone_error(model, dl):
    model.eval()
    err = tot = 0
    for x, xl, y, yl in dl:
        lp, ol = model(x, xl)
        for seq, n, ref in zip(lp.argmax(-1), ol, y.split(yl.tolist())):
            hyp = [int(p) for p in torch.unique_consecutive(seq[:n]) if p != 0]
            err += edit(hyp, ref.tolist()); tot += len(ref)
    model.train()
    return err / tot


def train(watch):
    torch.manual_seed(7)
    dl = DataLoader(Utterances(1000, 0), 20, shuffle=True, collate_fn=collate)
    va = DataLoader(Utterances(200, 1), 100, collate_fn=collate)
    model = Acoustic()
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, epochs=5, steps_per_epoch=len(dl), pct_start=.15)
    monitor = watch(model, opt)
    for ep in range(5):
        for x, xl, y, yl in dl:
            lp, ol = model(x, xl)
            loss = ctc(lp.transpose(0, 1), y, ol, yl)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step(); sched.step()
            monitor.log_scalar("loss", loss.detach())
        print(f"ep {ep} loss {loss.item():.3f} PER {phone_error(model, va):.3f}")
    return 1 - phone_error(model, va)
