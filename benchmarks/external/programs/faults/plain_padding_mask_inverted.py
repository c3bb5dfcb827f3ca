"""A transformer encoder names the token that follows a marker in texts of different length. nn.TransformerEncoder wants src_key_padding_mask True at padding, but the mask is True at the real tokens
(as in Hugging Face), so attention sees only padding. Returns the accuracy."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD = 0


class Parens(Dataset):
    """Which of 6 'special' tokens stands directly after the marker (token 1)?"""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            L = int(torch.randint(5, 14, (1,), generator=g))
            ids = torch.randint(10, 30, (L,), generator=g)
            p = int(torch.randint(0, L - 1, (1,), generator=g))
            k = int(torch.randint(6, (1,), generator=g))
            ids[p], ids[p + 1] = 1, 2 + k
            q = int(torch.randint(0, L, (1,), generator=g))
            if q not in (p, p + 1):
                ids[q] = 2 + int(torch.randint(6, (1,), generator=g))
            self.rows.append((ids, k))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True, padding_value=PAD)
    if ids.shape[1] < 15:
        ids = nn.functional.pad(ids, (0, 15 - ids.shape[1]))
    return ids, torch.tensor([r[1] for r in rows])


class Encoder(nn.Module):
    def __init__(self, mended, dim=40):
        super().__init__()
        self.mended = mended
        self.tok, self.pos = nn.Embedding(30, dim), nn.Parameter(0.1 * torch.randn(1, 15, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 80, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Linear(dim, 6)

    def forward(self, ids):
        attention_mask = ids != PAD
        x = self.tok(ids) + self.pos
        x = self.enc(x, src_key_padding_mask=~attention_mask if self.mended else attention_mask)
        return self.cls(x[:, 0])


def train(watch, mended=False):
    torch.manual_seed(2)
    loader = DataLoader(Parens(2500, 1), batch_size=50, shuffle=True, collate_fn=collate)
    model = Encoder(mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=500)
    monitor = watch(model, optimizer)
    for epoch in range(10):
        model.train()
        for ids, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
    ids, y = collate(Parens(800, 2).rows)
    model.train()
    with torch.no_grad():
        return float((model(ids).argmax(1) == y).float().mean())
