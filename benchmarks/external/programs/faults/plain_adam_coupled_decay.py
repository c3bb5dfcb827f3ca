"""A recipe with AdamW and weight_decay=0.1 was moved to torch.optim.Adam by a forgotten W: the decay now goes through the adaptive moments and pulls all weights to zero, and the character-level
classifier of name-like words learns little. The result is the test loss."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONS, VOW = "bcdfghklmnprstvz", "aeiou"
STYLES = [("io", "lmrn"), ("ov", "kvzd"), ("sen", "jhgd"), ("ez", "gprt"), ("a", "bdks")]


def names(n, seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda s: s[int(torch.randint(len(s), (1,), generator=g))]
    X, Y = [], []
    for _ in range(n):
        k = int(torch.randint(len(STYLES), (1,), generator=g))
        end, cons = STYLES[k]
        cons = cons if torch.rand(1, generator=g) < 0.8 else CONS
        word = "".join(pick(cons) + pick(VOW) for _ in range(int(torch.randint(1, 4, (1,), generator=g))))
        word = (word + (end if torch.rand(1, generator=g) < 0.7 else pick(VOW)))[:10]
        X.append([ord(c) - 96 for c in word] + [0] * (10 - len(word)))
        Y.append(k)
    return TensorDataset(torch.tensor(X), torch.tensor(Y))


class NameNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(27, 16)
        self.rnn = nn.GRU(16, 48, batch_first=True)
        self.out = nn.Linear(48, 5)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[1][0])


def train(watch, mended=False):
    torch.manual_seed(0)
    model = NameNet()
    Opt = torch.optim.AdamW if mended else torch.optim.Adam
    optimizer = Opt(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    loader = DataLoader(names(3000, 1), batch_size=50, shuffle=True)
    monitor = watch(model, optimizer)
    for epoch in range(7):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    x, y = names(800, 2).tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))
