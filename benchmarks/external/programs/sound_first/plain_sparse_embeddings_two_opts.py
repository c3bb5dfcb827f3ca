"""Recommender (matrix factorisation plus small MLP) with sparse embedding gradients: SparseAdam for the tables, Adam for the dense part.
Odd at first sight: the embedding gradients are sparse tensors and most rows have no gradient in a given step.
Returns the held-out AUC."""
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader


class Clicks(Dataset):
    U, I = 300, 400

    def __init__(self, n, seed):
        g0, g = torch.Generator().manual_seed(70), torch.Generator().manual_seed(seed)
        pu, qi, bi = torch.randn(self.U, 4, generator=g0), torch.randn(self.I, 4, generator=g0), torch.randn(self.I, generator=g0)
        self.u = (torch.rand(n, generator=g) ** 2 * self.U).long()
        self.i = (torch.rand(n, generator=g) ** 2 * self.I).long()
        logit = 1.2 * (pu[self.u] * qi[self.i]).sum(1) + bi[self.i]
        self.y = (torch.rand(n, generator=g) < logit.sigmoid()).float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        return self.u[k], self.i[k], self.y[k]


class Rec(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.user, self.item = nn.Embedding(Clicks.U, d, sparse=True), nn.Embedding(Clicks.I, d, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1); nn.init.normal_(self.item.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(3 * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return self.mlp(torch.cat([a, b, a * b], 1)).squeeze(1) + (a * b).sum(1)


def auc(score, y):
    r = torch.empty_like(score)
    r[score.argsort()] = torch.arange(1, len(score) + 1).float()
    p = y.sum()
    return ((r[y == 1].sum() - p * (p + 1) / 2) / (p * (len(y) - p))).item()


def train(watch):
    torch.manual_seed(26); torch.set_num_threads(1)
    loader = DataLoader(Clicks(40000, 0), batch_size=256, shuffle=True)
    net = Rec()
    sparse = torch.optim.SparseAdam([net.user.weight, net.item.weight], lr=4e-3)
    dense = torch.optim.Adam(net.mlp.parameters(), lr=1e-3, weight_decay=1e-4)
    watch(net, sparse, dense)
    for epoch in range(4):
        for u, i, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(u, i), y)
            sparse.zero_grad(); dense.zero_grad()
            loss.backward()
            sparse.step(); dense.step()
    t = Clicks(10000, 1)
    with torch.no_grad():
        return auc(net(t.u, t.i), t.y)
