"""Energy use of buildings from raw columns (area in m2, year, wall thickness in mm, ...) with a ReLU net and SGD with momentum, the target scaled. The StandardScaler line for the inputs was
forgotten, and the numbers in the thousands make the first steps huge. The result is the test MSE."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class StandardScaler:
    def fit(self, x):
        self.m, self.s = x.mean(0), x.std(0)
        return self

    def transform(self, x):
        return (x - self.m) / self.s


def buildings(n, seed):
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, 5, generator=g)
    area, year, wall, floors, glass = 50 + 2000 * u[:, 0], 1900 + 120 * u[:, 1], 100 + 400 * u[:, 2], 1 + (u[:, 3] * 10).floor(), u[:, 4]
    use = 0.05 * area * (1 + 2 * glass) * (2050 - year) / wall + 4 * floors ** 1.5
    return torch.stack([area, year, wall, floors, glass], 1), torch.log(use).unsqueeze(1)


def train(watch, mended=False):
    torch.manual_seed(0)
    x, y = buildings(2000, 1)
    xt, yt = buildings(500, 2)
    sy = StandardScaler().fit(y)
    y, yt = sy.transform(y), sy.transform(yt)
    if mended:
        sx = StandardScaler().fit(x)
        x, xt = sx.transform(x), sx.transform(xt)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9, nesterov=True)
    monitor = watch(model, optimizer)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for epoch in range(15):
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(xt), yt))
