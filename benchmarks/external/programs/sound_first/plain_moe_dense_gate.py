"""Classical (Jacobs 1991) mixture of four small experts with a soft gate, trained by the mixture negative log-likelihood for data with two branches.
Ordinary, though the loss becomes negative since it is a log-density. Returns held-out negative log-likelihood per sample (single Gaussian: about 1.2)."""
import math
import torch
from torch import nn


class MixtureOfExperts(nn.Module):
    def __init__(self, k=4, h=32):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, k))
        self.mean = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, k))
        self.log_s = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, k))

    def nll(self, x, y):
        logpi = self.gate(x).log_softmax(1)
        s = self.log_s(x).clamp(-4, 2)
        comp = -0.5 * ((y - self.mean(x)) / s.exp()) ** 2 - s - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(logpi + comp, 1).mean()


def branches(n, g):
    x = torch.rand(n, 1, generator=g) * 4 - 2
    side = (torch.rand(n, 1, generator=g) < 0.5).float() * 2 - 1
    return x, side * (0.4 + 0.3 * x ** 2) + 0.08 * torch.randn(n, 1, generator=g)


def train(watch):
    torch.manual_seed(16)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x, y = branches(5000, g)
    model = MixtureOfExperts()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, opt)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=200, shuffle=True)
    for epoch in range(30):
        for xb, yb in batches:
            loss = model.nll(xb, yb)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            monitor.log_scalar("nll", loss.detach())
    with torch.no_grad():
        return model.nll(*branches(2000, g)).item()
