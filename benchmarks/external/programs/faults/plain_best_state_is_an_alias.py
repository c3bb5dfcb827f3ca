"""Early stopping on 120 noisy samples with a big net: the best weights are kept as best = model.state_dict(), which points at the living tensors, so what is restored at the end are the overfitted weights of the
last epoch. Returns the test loss of the restored model."""
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def assay(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    z = 1.5 * x[:, 0] - x[:, 1] + x[:, 2]
    return x, (torch.sigmoid(1.2 * z) > torch.rand(n, generator=g)).float()


class Early:
    def __init__(self, deep):
        self.best, self.state, self.deep = float("inf"), None, deep

    def __call__(self, value, model):
        if value < self.best:
            self.best = value
            self.state = copy.deepcopy(model.state_dict()) if self.deep else model.state_dict()


def train(watch, mended=False):
    torch.manual_seed(0)
    x, y = assay(160, 1)
    xv, yv = assay(400, 2)
    xt, yt = assay(1500, 3)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    early = Early(deep=mended)
    monitor = watch(model, optimizer)
    for epoch in range(60):
        model.train()
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            early(criterion(model(xv), yv).item(), model)
    model.load_state_dict(early.state)
    with torch.no_grad():
        return float(criterion(model(xt), yt))
