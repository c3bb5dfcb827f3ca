"""Kim's text CNN on token sequences with phrases (two- and three-word patterns) as the signal; dropout, Adam, validation at the end of each epoch.
Ordinary in every respect."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def phrases(n, seed, vocab=150, length=24, classes=5):
    g = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(12)
    bank = torch.randint(1, vocab, (classes, 6, 3), generator=fixed)
    x = torch.randint(1, vocab, (n, length), generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    for i in range(n):
        for c, k in ((int(y[i]), 2), (int(torch.randint(0, classes, (1,), generator=g)), 1)):     # two phrases of the class, one of any
            for _ in range(k):
                p = bank[c, int(torch.randint(0, 6, (1,), generator=g))]
                s = int(torch.randint(0, length - 3, (1,), generator=g))
                x[i, s:s + 3] = p
    return TensorDataset(x, y)


class TextCNN(nn.Module):
    def __init__(self, vocab=150, d=32, maps=32, classes=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(d, maps, k, padding=k // 2) for k in (2, 3, 4))
        self.drop, self.fc = nn.Dropout(.4), nn.Linear(3 * maps, classes)

    def forward(self, x):
        z = self.emb(x).transpose(1, 2)
        return self.fc(self.drop(torch.cat([F.relu(c(z)).amax(2) for c in self.convs], 1)))


def train(watch):
    torch.manual_seed(0)
    tr, va = DataLoader(phrases(4000, 0), 64, shuffle=True), DataLoader(phrases(1000, 1), 500)
    model = TextCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3, weight_decay=1e-5)
    monitor = watch(model, optimizer)
    for epoch in range(7):
        model.train()
        for x, y in tr:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
        model.eval()
        with torch.no_grad(): acc = sum((model(x).argmax(1) == y).sum().item() for x, y in va) / 1000
        print(epoch, loss.item(), acc)
    return acc
