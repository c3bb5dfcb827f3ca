"""Four-fold cross-validation of a small tabular classifier. The model is made anew in each fold, but the optimizer was made once above the loop,
so folds two to four train a net that nobody looks at. The result is the mean accuracy over the folds."""
import numpy as np
import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))


def kfold(n, k, seed=0):
    idx = np.random.default_rng(seed).permutation(n)
    parts = np.array_split(idx, k)
    for i in range(k):
        yield np.concatenate([p for j, p in enumerate(parts) if j != i]), parts[i]


def make_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 12, generator=g)
    w = torch.randn(3, 12, generator=g)
    score = x @ w.T + 1.5 * torch.stack([x[:, 0] * x[:, 1], x[:, 2] ** 2 - 1, x[:, 3] * x[:, 4]], 1)
    return x, score.argmax(1)


def train(watch, mended=False):
    torch.manual_seed(5)
    X, Y = make_data()
    scores = []
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for fold, (tr, va) in enumerate(kfold(len(X), 4)):
        model = make_model()
        if mended:
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        monitor = watch(model, optimizer)
        xtr, ytr, xva, yva = X[tr], Y[tr], X[va], Y[va]
        for epoch in range(8):
            model.train()
            for b in torch.randperm(len(xtr)).split(64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(xtr[b]), ytr[b])
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            acc = (model(xva).argmax(1) == yva).float().mean().item()
        print("fold", fold, acc)
        scores.append(acc)
    return float(np.mean(scores))
