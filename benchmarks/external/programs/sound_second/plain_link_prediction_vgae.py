"""A variational graph autoencoder predicts missing edges; negatives are sampled anew in each step and the KL term has a small weight.
Looks odd: full batch in each step with other negatives each time, and the loss makes a first quick drop and then sinks slowly and bumpily."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def community_graph(n=500, k=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    pos = torch.rand(n, 2, generator=g)
    d = torch.cdist(pos, pos)
    a = torch.triu(torch.rand(n, n, generator=g) < torch.exp(-(d / .07) ** 2) * .7, 1)
    x = torch.exp(-torch.cdist(pos, torch.rand(16, 2, generator=g)) ** 2 / .08) + .3 * torch.randn(n, 16, generator=g)
    return x, a.nonzero()


class VGAE(nn.Module):
    def __init__(self, d, h=48, z=16):
        super().__init__()
        self.w0, self.mu, self.ls = nn.Linear(d, h), nn.Linear(h, z), nn.Linear(h, z)
        self.bias = nn.Parameter(torch.zeros(()))

    def encode(self, x, adj):
        h = F.relu(self.w0(adj @ x))
        h = adj @ h
        return self.mu(h), self.ls(h).clamp(max=2) - 2

    def decode(self, z, pairs): return (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1) + self.bias


def auc(p, n): return float((p[:, None] > n[None]).float().mean())


def train(watch):
    torch.manual_seed(2)
    x, edges = community_graph()
    n = len(x)
    perm = torch.randperm(len(edges))
    te, tr = edges[perm[:len(edges) // 10]], edges[perm[len(edges) // 10:]]
    a = torch.eye(n)
    a[tr[:, 0], tr[:, 1]] = a[tr[:, 1], tr[:, 0]] = 1
    dinv = a.sum(1).rsqrt()
    adj = dinv[:, None] * a * dinv[None]
    full = a.clone(); full[te[:, 0], te[:, 1]] = full[te[:, 1], te[:, 0]] = 1

    def negatives(k):
        p = torch.randint(0, n, (3 * k, 2))
        return p[full[p[:, 0], p[:, 1]] == 0][:k]

    model = VGAE(16)
    opt = torch.optim.Adam(model.parameters(), lr=.01)
    monitor = watch(model, opt)
    for step in range(300):
        mu, ls = model.encode(x, adj)
        z = mu + torch.randn_like(mu) * ls.exp()
        neg = negatives(len(tr))
        rec = F.softplus(-model.decode(z, tr)).mean() + F.softplus(model.decode(z, neg)).mean()
        kl = -.5 * (1 + 2 * ls - mu ** 2 - (2 * ls).exp()).sum(1).mean()
        loss = rec + .005 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        monitor.log_scalar("loss", loss.detach())
        if step % 50 == 0:
            with torch.no_grad(): print(step, rec.item(), kl.item())
    with torch.no_grad():
        z, _ = model.encode(x, adj)
        return auc(model.decode(z, te), model.decode(z, negatives(1000)))
