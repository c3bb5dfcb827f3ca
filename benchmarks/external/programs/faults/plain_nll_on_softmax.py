"""A bag-of-words text classifier with an EmbeddingBag. forward() returns softmax probabilities and the loss is NLLLoss, which wants log-probabilities;
the loss is negative and the gradient tiny where the net is wrong. Returns the log-loss on new texts (with the probabilities it predicts)."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, n, seed):
        topics = torch.Generator().manual_seed(77)
        self.word_p = torch.softmax(1.2 * torch.randn(40, 300, generator=topics), 1)
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(40, (n,), generator=g)
        self.len = torch.randint(8, 40, (n,), generator=g)
        self.words = torch.multinomial(self.word_p[self.y], 40, replacement=True, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.words[i, :self.len[i]], self.y[i]


def collate(batch):
    words, ys = zip(*batch)
    lens = torch.tensor([0] + [len(w) for w in words[:-1]])
    return torch.cat(words), lens.cumsum(0), torch.stack(ys)


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(300, 32, mode="mean")
        self.fc = nn.Linear(32, 40)

    def forward(self, words, offsets):
        return torch.softmax(self.fc(torch.tanh(self.bag(words, offsets))), dim=-1)


def train(watch, mended=False):
    torch.manual_seed(0)
    loader = DataLoader(Texts(3000, 1), batch_size=50, shuffle=True, collate_fn=collate)
    val = DataLoader(Texts(600, 2), batch_size=600, collate_fn=collate)
    model = TextModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.NLLLoss()
    monitor = watch(model, optimizer)
    for epoch in range(8):
        total = 0.0
        for words, offsets, y in loader:
            prob = model(words, offsets)
            loss = criterion(torch.log(prob + 1e-9) if mended else prob, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
        print(epoch, total / len(loader))
    with torch.no_grad():
        words, offsets, y = next(iter(val))
        return float(-torch.log(model(words, offsets).gather(1, y.unsqueeze(1)) + 1e-9).mean())
