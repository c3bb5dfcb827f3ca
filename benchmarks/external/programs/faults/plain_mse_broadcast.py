"""Prediction of a concrete-like strength from eight ingredients. The net gives (N, 1), the target is (N,), and MSE broadcasts them
to (N, N): the best it can do is the mean of the targets. The result is R squared on new data."""
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Mixes(Dataset):
    def __init__(self, n=2000):
        g = torch.Generator().manual_seed(3)
        self.x = torch.rand(n, 8, generator=g)
        x = self.x
        y = 3 * x[:, 0] / (0.4 + x[:, 1]) + 2 * torch.log1p(5 * x[:, 2]) - x[:, 3] * x[:, 4] + 0.1 * torch.randn(n, generator=g)
        self.y = (y - y.mean()) / y.std()
        self.x = (x - x.mean(0)) / x.std(0)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        return self.out(self.body(x))


def train(watch, mended=False):
    warnings.filterwarnings("ignore", message="Using a target size")
    torch.manual_seed(0)
    tr, te = random_split(Mixes(), [1600, 400], generator=torch.Generator().manual_seed(0))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    monitor = watch(model, optimizer)
    for epoch in range(15):
        model.train()
        for x, y in DataLoader(tr, batch_size=40, shuffle=True):
            pred = model(x)
            loss = criterion(pred.squeeze(1) if mended else pred, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("mse", loss.detach())
    model.eval()
    x, y = map(torch.stack, zip(*[te[i] for i in range(len(te))]))
    with torch.no_grad():
        p = model(x).squeeze(1)
    return float(1 - (p - y).pow(2).sum() / (y - y.mean()).pow(2).sum())
