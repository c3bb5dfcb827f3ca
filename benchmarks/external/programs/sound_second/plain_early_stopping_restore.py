"""A text-like bag-of-words classifier trained with early stopping on the validation loss; the best checkpoint is kept in memory and loaded back, also when the rate is cut.
Looks odd: parameters and optimizer state jump back to an earlier state in the middle of the run, when the rate is halved."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


def documents(n, seed, vocab=300, topics=8, length=18):
    g = torch.Generator().manual_seed(seed)
    tg = torch.Generator().manual_seed(77)
    word = torch.softmax(2.0 * torch.randn(topics, vocab, generator=tg), 1)
    y = torch.randint(0, topics, (n,), generator=g)
    other = torch.randint(0, topics, (n,), generator=g)
    mix = 0.45 * word[y] + 0.3 * word[other] + 0.25 / vocab
    return torch.multinomial(mix, length, replacement=True, generator=g), y


class BagNet(nn.Module):
    def __init__(self, vocab=300, dim=32, classes=8):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.drop = nn.Dropout(0.3)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, classes))

    def forward(self, tokens): return self.mlp(self.drop(self.bag(tokens)))


class EarlyStopping:
    def __init__(self, patience): self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def update(self, loss, model, opt):
        if loss < self.best - 1e-4:
            self.best, self.bad = loss, 0
            self.state = copy.deepcopy((model.state_dict(), opt.state_dict()))
        else: self.bad += 1
        return self.bad >= self.patience


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad(): out = model(x)
    model.train()
    return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


def train(watch):
    torch.manual_seed(3)
    x, y = documents(4000, 0)
    xv, yv = documents(1000, 1)
    xt, yt = documents(1000, 2)
    model = BagNet()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    stop = EarlyStopping(patience=2)
    monitor = watch(model, opt)
    cuts = 0
    for epoch in range(16):
        for b in torch.randperm(len(x)).split(100):
            loss = F.cross_entropy(model(x[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        vl, va = evaluate(model, xv, yv)
        print(epoch, loss.item(), vl, va, opt.param_groups[0]["lr"])
        if stop.update(vl, model, opt):
            cuts += 1
            if cuts == 3: break
            model.load_state_dict(stop.state[0]); opt.load_state_dict(stop.state[1])
            for g in opt.param_groups: g["lr"] = 4e-3 / 4 ** cuts
            stop.bad = 0
    model.load_state_dict(stop.state[0])
    return evaluate(model, xt, yt)[1]
