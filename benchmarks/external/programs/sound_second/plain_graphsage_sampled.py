"""GraphSAGE with neighbour sampling in mini-batches on a graph of communities; features alone are weak, neighbours help.
Ordinary; each batch draws at most six neighbours for two hops."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def build(n=2500, classes=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    by = [(y == c).nonzero().flatten() for c in range(classes)]
    nbr = torch.empty(n, 10, dtype=torch.long)
    for i in range(n):
        own = by[int(y[i])]
        same = own[torch.randint(0, len(own), (10,), generator=g)]
        other = torch.randint(0, n, (10,), generator=g)
        nbr[i] = torch.where(torch.rand(10, generator=g) < .65, same, other)
    centre = torch.randn(classes, 16, generator=g)
    return centre[y] * .6 + torch.randn(n, 16, generator=g), nbr, y


class Sage(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.s1, self.n1 = nn.Linear(i, h), nn.Linear(i, h, bias=False)
        self.s2, self.n2 = nn.Linear(h, h), nn.Linear(h, h, bias=False)
        self.out = nn.Linear(h, o)

    def forward(self, x, nbr, ids, k=6):
        pick = lambda v: nbr[v][..., torch.randperm(10)[:k]]
        one = pick(ids)                              # B x k
        two = pick(one)                              # B x k x k
        h_self = F.relu(self.s1(x[ids]) + self.n1(x[one].mean(1)))
        h_nbr = F.relu(self.s1(x[one]) + self.n1(x[two].mean(2)))
        h = F.relu(self.s2(h_self) + self.n2(h_nbr.mean(1)))
        return self.out(F.dropout(F.normalize(h) * 4, .2, self.training))


def train(watch):
    torch.manual_seed(1)
    x, nbr, y = build()
    perm = torch.randperm(len(y))
    tr, te = perm[:1500], perm[1500:]
    model = Sage(16, 48, 6)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=5e-4)
    watch(model, opt)
    for epoch in range(8):
        model.train()
        for b in tr[torch.randperm(len(tr))].split(50):
            loss = F.cross_entropy(model(x, nbr, b), y[b])
            opt.zero_grad(); loss.backward(); opt.step()
        model.eval()
        with torch.no_grad(): acc = (model(x, nbr, te, k=10).argmax(1) == y[te]).float().mean().item()
        print(epoch, round(loss.item(), 3), round(acc, 3))
    return acc
