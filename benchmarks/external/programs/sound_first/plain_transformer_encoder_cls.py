"""A small transformer encoder with a class token decides which of two marked symbols occurs more often in a sequence; warm-up, linear decay, clipping.
Entirely ordinary, with padding masks. Returns test accuracy (chance 0.5)."""
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader


class Majority(Dataset):
    PAD, CLS = 0, 1

    def __init__(self, n, seed, max_len=14):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        while len(self.rows) < n:
            L = int(torch.randint(7, max_len, (), generator=g))
            s = torch.randint(2, 10, (L,), generator=g)
            s = torch.where(torch.rand(L, generator=g) < 0.5, torch.randint(2, 4, (L,), generator=g), s)
            d = int((s == 2).sum() - (s == 3).sum())
            if d:
                self.rows.append((torch.cat([torch.tensor([1]), s]), int(d > 0)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(batch):
    x, y = zip(*batch)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y)


class Encoder(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(10, d, padding_idx=0), nn.Embedding(16, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2))

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.size(1)))
        return self.head(self.enc(h, src_key_padding_mask=x == 0)[:, 0])


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def train(watch):
    torch.manual_seed(17)
    torch.set_num_threads(1)
    tr = DataLoader(Majority(4000, 0), batch_size=64, shuffle=True, collate_fn=collate)
    va, te = (DataLoader(Majority(800, s), batch_size=400, collate_fn=collate) for s in (1, 2))
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    total = 5 * len(tr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 40, max(0.02, (total - s) / (total - 40))))
    monitor = watch(model, opt)
    best = 0.0
    for epoch in range(5):
        model.train()
        for x, y in tr:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        acc = accuracy(model, va)
        print(epoch, acc)
    return accuracy(model, te)
