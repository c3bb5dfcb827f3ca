"""A vanilla RNN forecasts a chaotic series with SGD and gradient clipping. params = model.parameters() is a generator that the optimizer used up, so clip_grad_norm_(params, ...) clips
nothing, and the recurrent net explodes. The result is the test MSE."""
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def henon(n, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = (0.1 * torch.rand(1, generator=g)).item(), 0.0
    out = []
    for _ in range(n + 100):
        x, y = 1 - 1.4 * x * x + y, 0.3 * x
        out.append(x)
    return torch.tensor(out[100:])


def windows(series, T=50):
    w = series.unfold(0, T + 1, 5)
    return TensorDataset(w[:, :-1].unsqueeze(-1).clone(), w[:, 1:].unsqueeze(-1).clone())


class Forecaster(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.rnn = nn.RNN(1, h, batch_first=True, nonlinearity="relu")
        self.out = nn.Linear(h, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, 1.5)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def train(watch, mended=False):
    warnings.filterwarnings("ignore", message=".*generator.*")
    torch.manual_seed(0)
    model = Forecaster()
    params = list(model.parameters()) if mended else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    loader = DataLoader(windows(henon(6000, 1)), batch_size=32, shuffle=True, drop_last=True)
    monitor = watch(model, optimizer)
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, max_norm=0.5)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    x, y = windows(henon(2000, 2)).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))
