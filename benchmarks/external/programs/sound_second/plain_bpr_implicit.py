"""Bayesian personalised ranking for implicit feedback with a LightGCN-like smoothing of user and item vectors.
Looks odd: the only parameters are two embedding tables, the loss begins at 0.693, and weight decay is done by hand on the rows of the batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class LightGCN(nn.Module):
    def __init__(self, users, items, adj, dim=24, layers=2):
        super().__init__()
        self.users, self.items, self.layers = users, items, layers
        self.emb = nn.Embedding(users + items, dim)
        nn.init.normal_(self.emb.weight, std=.1)
        self.register_buffer("adj", adj)

    def forward(self):
        h = [self.emb.weight]
        for _ in range(self.layers): h.append(self.adj @ h[-1])
        return torch.stack(h).mean(0).split([self.users, self.items])


def plays(users=300, items=200, per=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    p, q = torch.randn(users, 4, generator=g), torch.randn(items, 4, generator=g)
    s = p @ q.T * 1.2 + .5 * torch.randn(items, generator=g)
    return torch.stack([torch.multinomial(torch.softmax(r, 0), per, generator=g) for r in s])


def train(watch):
    torch.manual_seed(0)
    U, I = 300, 200
    liked = plays(U, I)
    tr, te = liked[:, :18], liked[:, 18:]
    a = torch.zeros(U, I).scatter(1, tr, 1)
    full = torch.zeros(U + I, U + I)
    full[:U, U:], full[U:, :U] = a, a.T
    d = full.sum(1).clamp(min=1).rsqrt()
    model = LightGCN(U, I, d[:, None] * full * d[None])
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, opt)
    for step in range(600):
        u = torch.randint(0, U, (256,))
        i = tr[u, torch.randint(0, tr.shape[1], (256,))]
        j = torch.randint(0, I, (256,))
        ok = a[u, j] == 0
        u, i, j = u[ok], i[ok], j[ok]
        eu, ei = model()
        x = (eu[u] * (ei[i] - ei[j])).sum(1)
        raw = model.emb.weight
        reg = (raw[u].square().sum() + raw[U + i].square().sum() + raw[U + j].square().sum()) / len(u)
        loss = -F.logsigmoid(x).mean() + 1e-3 * reg
        opt.zero_grad()
        loss.backward()
        opt.step()
        monitor.log_scalar("bpr", loss.detach())
    with torch.no_grad():
        eu, ei = model()
        top = (eu @ ei.T).masked_fill(a > 0, -1e9).topk(20).indices
        return (top[:, :, None] == te[:, None]).any(1).float().mean().item()          # recall@20; chance is 0.11
