"""Five-fold cross-validation of a small MLP on a made-up chemistry table; each fold has its own model, scaler and optimizer.
Ordinary; each fold is watched for itself and the result is the mean accuracy of the held-out folds."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def wine(n=1500, seed=0):
    r = np.random.default_rng(seed)
    y = r.integers(0, 3, n)
    base = r.normal(size=(3, 13)) * 0.8
    mix = r.normal(size=(13, 13)) / 3
    x = (base[y] + r.normal(size=(n, 13)) * np.array([1., 1.3, 0.8])[y][:, None]) @ (np.eye(13) + mix)
    x = x * 10 ** r.uniform(-1, 2.5, 13) + r.uniform(0, 50, 13)           # columns in their own units
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


class KFold:
    def __init__(self, k, seed): self.k, self.seed = k, seed

    def split(self, n):
        p = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)).chunk(self.k)
        for i in range(self.k):
            yield torch.cat([p[j] for j in range(self.k) if j != i]), p[i]


def fit(x, y, watch, epochs=8):
    model = nn.Sequential(nn.Linear(13, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    monitor = watch(model, opt)
    for _ in range(epochs):
        for b in torch.randperm(len(x)).split(64):
            if len(b) < 2: continue
            loss = F.cross_entropy(model(x[b]), y[b])
            opt.zero_grad(); loss.backward(); opt.step()
            monitor.log_scalar("loss", loss.detach())
    return model.eval()


def train(watch):
    torch.manual_seed(9)
    x, y = wine()
    scores = []
    for tr, te in KFold(5, 0).split(len(x)):
        mu, sd = x[tr].mean(0), x[tr].std(0)
        model = fit((x[tr] - mu) / sd, y[tr], watch)
        with torch.no_grad():
            scores.append((model((x[te] - mu) / sd).argmax(1) == y[te]).float().mean().item())
    print(scores)
    return float(np.mean(scores))
