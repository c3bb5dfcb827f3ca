"""A plain regression of a building's heating load on eight standardised columns, mini-batches, Adam, and a held-out R squared.
Ordinary, as in a notebook; the loss is printed but not logged."""
import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(42)


def load_building_table(n):
    compact, surface, wall, roof, height, orient, glaze, spread = rng.uniform(-1, 1, size=(8, n))
    load = 22 + 6 * height + 3 * compact * height - 2.5 * surface ** 2 + 4 * np.exp(-2 * (glaze - .3) ** 2) + np.sin(3 * orient) * glaze + rng.normal(0, .8, n)
    return np.stack([compact, surface, wall, roof, height, orient, glaze, spread], 1).astype("float32"), load.astype("float32")


def train(watch):
    global rng
    rng = np.random.default_rng(42)
    torch.manual_seed(42)
    X, y = load_building_table(5000)
    split = 4000
    mean, std = X[:split].mean(0), X[:split].std(0)
    X = torch.from_numpy((X - mean) / std)
    ym, ys = y[:split].mean(), y[:split].std()
    y = torch.from_numpy((y - ym) / ys)[:, None]

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    watch(model, optimizer)
    for epoch in range(12):
        order = torch.randperm(split)
        for i in range(0, split, 64):
            idx = order[i:i + 64]
            optimizer.zero_grad()
            loss = loss_fn(model(X[idx]), y[idx])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val = loss_fn(model(X[split:]), y[split:]).item()
        print(f"epoch {epoch:2d}  train {loss.item():.4f}  val {val:.4f}")
    with torch.no_grad():
        return float(1 - val / y[split:].var())
