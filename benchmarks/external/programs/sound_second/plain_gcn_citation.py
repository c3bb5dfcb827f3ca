"""Kipf and Welling's GCN on a synthetic citation graph, full batch, 20 labelled nodes for each class.
Looks odd: every step sees the same single batch, dropout is 0.5 and the few labelled nodes are fitted while 90% of the nodes carry no loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def citation_graph(n=1200, classes=5, feats=200, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    same = y[:, None] == y[None]
    p = torch.where(same, 0.012, 0.0012)
    a = torch.triu(torch.rand(n, n, generator=g) < p, 1)
    a = (a | a.T)
    topic = torch.rand(classes, feats, generator=g) ** 4 * 0.08 + 0.004
    x = (torch.rand(n, feats, generator=g) < topic[y]).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    a = a.float() + torch.eye(n)
    d = a.sum(1).rsqrt()
    return x, (d[:, None] * a * d[None]).to_sparse_coo().coalesce(), y


class GraphConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.bias = nn.Parameter(torch.zeros(o))
        nn.init.xavier_uniform_(self.lin.weight)

    def forward(self, x, adj):
        return torch.sparse.mm(adj, self.lin(x)) + self.bias


class GCN(nn.Module):
    def __init__(self, i, h, o, p=0.5):
        super().__init__()
        self.c1, self.c2, self.p = GraphConv(i, h), GraphConv(h, o), p

    def forward(self, x, adj):
        x = F.dropout(x, self.p, self.training)
        x = F.relu(self.c1(x, adj))
        return self.c2(F.dropout(x, self.p, self.training), adj)


def train(watch):
    torch.manual_seed(42)
    x, adj, y = citation_graph()
    train_idx = torch.cat([(y == c).nonzero().flatten()[:20] for c in range(5)])
    rest = torch.ones(len(y), dtype=torch.bool); rest[train_idx] = False
    rest = rest.nonzero().flatten()
    val_idx, test_idx = rest[:300], rest[300:]
    model = GCN(x.shape[1], 16, 5)
    optimizer = torch.optim.Adam([{"params": model.c1.parameters(), "weight_decay": 5e-4},
                                  {"params": model.c2.parameters(), "weight_decay": 0}], lr=0.01)
    monitor = watch(model, optimizer)
    for epoch in range(250):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adj)[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        if epoch % 25 == 24:
            model.eval()
            with torch.no_grad(): pred = model(x, adj).argmax(1)
            print(epoch, loss.item(), (pred[val_idx] == y[val_idx]).float().mean().item())
    model.eval()
    with torch.no_grad(): pred = model(x, adj).argmax(1)
    return (pred[test_idx] == y[test_idx]).float().mean().item()
