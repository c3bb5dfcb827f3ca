"""Entity embeddings plus continuous columns predict the log sales of a made-up shop chain.
An ordinary tabular run with BatchNorm, dropout, Huber loss and a step schedule."""
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader, random_split


def table(n=12000):
    store, weekday, promo = torch.randint(0, 60, (n,)), torch.randint(0, 7, (n,)), torch.randint(0, 3, (n,))
    effect = torch.randn(60) * .5
    week = torch.tensor([.1, 0, -.1, 0, .3, .6, -.8])
    lift = torch.tensor([0., .25, .5])
    temp, dist = torch.randn(n) * 8 + 12, torch.rand(n).mul(4).exp()
    y = 8 + effect[store] + week[weekday] + lift[promo] * (1 + .5 * effect[store]) - .1 * dist.log() + .02 * (temp - 12) * (weekday >= 5) + .15 * torch.randn(n)
    return torch.stack([store, weekday, promo], 1), torch.stack([temp, dist], 1), y


class TabularNet(nn.Module):
    def __init__(self, cards, n_cont, layers=(128, 64), p=0.05):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, min(16, (c + 1) // 2)) for c in cards)
        for e in self.embs: nn.init.trunc_normal_(e.weight, std=0.01)
        self.bn = nn.BatchNorm1d(n_cont)
        size = sum(e.embedding_dim for e in self.embs) + n_cont
        mods = []
        for l in layers:
            mods += [nn.Linear(size, l), nn.ReLU(inplace=True), nn.BatchNorm1d(l), nn.Dropout(p)]
            size = l
        self.mlp = nn.Sequential(*mods, nn.Linear(size, 1))

    def forward(self, cat, cont):
        z = [e(cat[:, i]) for i, e in enumerate(self.embs)]
        return self.mlp(torch.cat(z + [self.bn(cont)], 1)).squeeze(1)


def train(watch):
    torch.manual_seed(3)
    cat, cont, y = table()
    mean, std = y[:10000].mean(), y[:10000].std()
    ds = TensorDataset(cat, cont, (y - mean) / std)
    tr, va = torch.utils.data.Subset(ds, range(10000)), torch.utils.data.Subset(ds, range(10000, 12000))
    dl = DataLoader(tr, batch_size=256, shuffle=True)
    vdl = DataLoader(va, batch_size=1000)
    model = TabularNet([60, 7, 3], 2)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.3)
    crit = nn.HuberLoss()
    monitor = watch(model, opt)
    for epoch in range(12):
        model.train()
        for c, x, t in dl:
            loss = crit(model(c, x), t)
            opt.zero_grad(); loss.backward(); opt.step()
            monitor.log_scalar("loss", loss.detach())
        sched.step()
        model.eval()
        with torch.no_grad():
            se = torch.cat([(model(c, x) - t) ** 2 for c, x, t in vdl])
            r2 = 1 - se.mean().item()
        print(epoch, round(r2, 4))
    return r2
