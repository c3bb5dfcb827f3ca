"""A part-of-speech-like tagger with an LSTM, SGD with momentum and a rate that suits a mean loss. CrossEntropyLoss(reduction='sum') adds over all tokens of the batch, so the steps are hundreds of
times too long and the net does not settle. The result is the test loss per token."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD_TAG = -100


class Corpus(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            L = int(torch.randint(6, 20, (1,), generator=g))
            words = torch.randint(1, 60, (L,), generator=g)
            verb = words < 20
            seen = verb.cumsum(0) % 2
            self.rows.append((words, torch.where(verb, 0, torch.where(seen == 1, 1, 2))))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad(rows):
    x = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    y = nn.utils.rnn.pad_sequence([r[1] for r in rows], batch_first=True, padding_value=PAD_TAG)
    return x, y


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.fc = nn.Linear(32, 3)

    def forward(self, x):
        return self.fc(self.lstm(self.emb(x))[0])


def train(watch, mended=False):
    torch.manual_seed(0)
    model = Tagger()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_TAG, reduction="mean" if mended else "sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    monitor = watch(model, optimizer)
    for epoch in range(8):
        model.train()
        for x, y in DataLoader(Corpus(2000, 1), batch_size=40, shuffle=True, collate_fn=pad):
            optimizer.zero_grad()
            loss = criterion(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    x, y = pad(Corpus(400, 2).rows)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD_TAG))
