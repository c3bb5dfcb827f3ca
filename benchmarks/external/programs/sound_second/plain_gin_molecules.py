"""A graph isomorphism network classifies random graphs by their number of triangles; graphs of different sizes are packed in one batch with index_add.
Ordinary; the learnable eps of GIN stays close to zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def random_graph(g):
    n = int(torch.randint(8, 16, (1,), generator=g))
    p = .15 + .3 * float(torch.rand(1, generator=g))
    a = torch.triu(torch.rand(n, n, generator=g) < p, 1)
    a = (a | a.T).float()
    tri = int(torch.trace(a @ a @ a)) // 6
    deg = a.sum(1)
    # features: degree and the clustering of the neighbourhood blurred by noise
    x = torch.stack([deg / 4, (a @ deg) / 16], 1)
    ch = torch.diagonal(a @ a @ a) / 6
    x = torch.cat([x, (ch + 1.0 * torch.randn(n, generator=g))[:, None]], 1)
    return x, a.nonzero().t(), 0 if tri <= 2 else 1 if tri <= 7 else 2


def pack(graphs):
    xs, es, bs, ys, off = [], [], [], [], 0
    for k, (x, e, y) in enumerate(graphs):
        xs.append(x); es.append(e + off); bs.append(torch.full((len(x),), k)); ys.append(y)
        off += len(x)
    return torch.cat(xs), torch.cat(es, 1), torch.cat(bs), torch.tensor(ys)


class GinLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU(), nn.Linear(o, o), nn.BatchNorm1d(o), nn.ReLU())

    def forward(self, x, e):
        agg = torch.zeros_like(x).index_add(0, e[1], x[e[0]])
        return self.mlp((1 + self.eps) * x + agg)


class GIN(nn.Module):
    def __init__(self, h=32, layers=3, classes=3):
        super().__init__()
        self.layers = nn.ModuleList(GinLayer(3 if k == 0 else h, h) for k in range(layers))
        self.heads = nn.ModuleList(nn.Linear(h, classes) for _ in range(layers))       # jumping knowledge

    def forward(self, x, e, b, n):
        out = 0
        for l, head in zip(self.layers, self.heads):
            x = l(x, e)
            pooled = torch.zeros(n, x.shape[1]).index_add(0, b, x) / 10
            out = out + head(pooled)
        return out


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    tr, te = [random_graph(g) for _ in range(2400)], [random_graph(g) for _ in range(600)]
    model = GIN()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, .5)
    watch(model, opt)
    for ep in range(9):
        model.train()
        for idx in torch.randperm(len(tr)).split(48):
            x, e, b, y = pack([tr[i] for i in idx])
            loss = F.cross_entropy(model(x, e, b, len(y)), y)
            opt.zero_grad(); loss.backward(); opt.step()
        sched.step()
        model.eval()
        with torch.no_grad():
            x, e, b, y = pack(te)
            acc = (model(x, e, b, len(y)).argmax(1) == y).float().mean().item()
        print(ep, loss.item(), acc)
    return acc
