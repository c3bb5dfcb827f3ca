"""A character GRU language model on text from a little grammar, SGD with momentum. The loop was rewritten from a
Keras habit: optimizer.zero_grad() is nowhere, so every step uses the sum of all gradients since the beginning."""
import random
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_text(n, seed):
    rng = random.Random(seed)
    subj, verb, obj = ["the cat", "a dog", "my aunt", "the old man"], ["sees", "eats", "likes", "paints"], ["fish", "a house", "the sea", "bread"]
    return "".join(f"{rng.choice(subj)} {rng.choice(verb)} {rng.choice(obj)}. " for _ in range(n))


class CharData(Dataset):
    def __init__(self, text, vocab, block=48):
        self.ids = torch.tensor([vocab[c] for c in text])
        self.block = block

    def __len__(self):
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        return self.ids[s:s + self.block], self.ids[s + 1:s + self.block + 1]


class CharGRU(nn.Module):
    def __init__(self, n_vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(n_vocab, 24)
        self.rnn = nn.GRU(24, dim, batch_first=True)
        self.out = nn.Linear(dim, n_vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


@torch.no_grad()
def evaluate(model, loader, loss_fn):
    model.eval()
    losses = [loss_fn(model(x).flatten(0, 1), y.flatten()).item() for x, y in loader if len(x) > 0]
    model.train()
    return sum(losses) / len(losses)


def train(watch, mended=False):
    torch.manual_seed(0)
    text, held = make_text(900, 1), make_text(150, 2)
    vocab = {c: i for i, c in enumerate(sorted(set(text + held)))}
    loader = DataLoader(CharData(text, vocab), batch_size=16, shuffle=True, drop_last=True)
    val = DataLoader(CharData(held, vocab), batch_size=16, drop_last=True)
    model = CharGRU(len(vocab))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    monitor = watch(model, optimizer)
    for epoch in range(12):
        for x, y in loader:
            if mended:
                optimizer.zero_grad()
            loss = loss_fn(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
        print(epoch, evaluate(model, val, loss_fn))
    return float(evaluate(model, val, loss_fn))
