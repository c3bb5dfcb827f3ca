"""A two-tower recommender with sparse user and item embeddings (SparseAdam) and a dense ranking head (AdamW).
Looks odd: the embedding gradients are sparse tensors, two optimizers share one backward, and most rows get no gradient in a step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

N_USERS, N_ITEMS, K = 300, 200, 4


def interactions(seed=0, n=40000):
    g = torch.Generator().manual_seed(seed)
    U, V = torch.randn(N_USERS, K, generator=g), torch.randn(N_ITEMS, K, generator=g)
    bu, bi = .5 * torch.randn(N_USERS, generator=g), .7 * torch.randn(N_ITEMS, generator=g)
    pop = torch.rand(N_ITEMS, generator=g) ** 3 + 0.02          # popular and rare items
    u = torch.randint(0, N_USERS, (n,), generator=g)
    i = torch.multinomial(pop, n, replacement=True, generator=g)
    logit = (U[u] * V[i]).sum(1) * 1.0 + bu[u] + bi[i]
    y = (torch.rand(n, generator=g) < logit.sigmoid()).float()
    return u, i, y


class TwoTower(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user = nn.Embedding(N_USERS, dim, sparse=True)
        self.item = nn.Embedding(N_ITEMS, dim, sparse=True)
        self.ubias = nn.Embedding(N_USERS, 1, sparse=True)
        self.ibias = nn.Embedding(N_ITEMS, 1, sparse=True)
        for e in (self.user, self.item): nn.init.normal_(e.weight, std=0.1)
        for e in (self.ubias, self.ibias): nn.init.zeros_(e.weight)
        self.head = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        s = self.head(torch.cat([a, b, a * b], 1)) + (a * b).sum(1, keepdim=True)
        return (s + self.ubias(u) + self.ibias(i)).squeeze(1)


def auc(score, y):
    r = score.argsort().argsort().float() + 1
    p = y.sum()
    return float((r[y == 1].sum() - p * (p + 1) / 2) / (p * (len(y) - p)))


def train(watch):
    torch.manual_seed(0)
    u, i, y = interactions()
    cut = 34000
    dl = DataLoader(TensorDataset(u[:cut], i[:cut], y[:cut]), batch_size=256, shuffle=True, drop_last=True)
    net = TwoTower()
    emb = [net.user.weight, net.item.weight, net.ubias.weight, net.ibias.weight]
    opt_sparse = torch.optim.SparseAdam(emb, lr=0.006)
    opt_dense = torch.optim.AdamW(net.head.parameters(), lr=1e-3, weight_decay=0.01)
    monitor = watch(net, opt_sparse, opt_dense)
    for epoch in range(3):
        net.train()
        for a, b, t in dl:
            loss = F.binary_cross_entropy_with_logits(net(a, b), t)
            opt_sparse.zero_grad(); opt_dense.zero_grad()
            loss.backward()
            opt_sparse.step(); opt_dense.step()
            monitor.log_scalar("loss", loss.detach())
        net.eval()
        with torch.no_grad():
            score = auc(net(u[cut:], i[cut:]), y[cut:])
        print(epoch, loss.item(), score)
    return score
