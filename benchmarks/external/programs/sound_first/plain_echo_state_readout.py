"""Echo-state network: a fixed random recurrent reservoir (spectral radius 0.9) with only a linear readout trained by Adam, for the prediction of the chaotic Mackey-Glass series.
Odd at first sight: the recurrent weights are parameters with requires_grad=False, far more numerous than the trained ones.
Returns the normalised RMSE of six-steps-ahead prediction on a later part of the series (predicting the mean: 1)."""
import torch
from torch import nn


class Reservoir(nn.Module):
    def __init__(self, n=200, rho=0.9, leak=0.5):
        super().__init__()
        W = torch.randn(n, n) * (torch.rand(n, n) < 0.1)
        W *= rho / torch.linalg.eigvals(W).abs().max()
        self.W = nn.Parameter(W, requires_grad=False)
        self.Win = nn.Parameter(torch.rand(n, 2) - 0.5, requires_grad=False)
        self.leak = leak
        self.norm = nn.BatchNorm1d(n, affine=False, momentum=0.05)
        self.readout = nn.Linear(n, 1)

    @torch.no_grad()
    def states(self, u):
        s, out = torch.zeros(self.W.size(0)), []
        for v in u:
            s = (1 - self.leak) * s + self.leak * torch.tanh(self.W @ s + self.Win @ torch.stack([v, torch.ones(())]))
            out.append(s)
        return torch.stack(out)

    def forward(self, s):
        return self.readout(self.norm(s)).squeeze(1)


def mackey_glass(n, tau=17):
    x = [1.2] * (tau + 1)
    for _ in range(n + 200):
        x.append(x[-1] + 0.2 * x[-1 - tau] / (1 + x[-1 - tau] ** 10) - 0.1 * x[-1])
    s = torch.tensor(x[-n:])
    return (s - s.mean()) / s.std()


def train(watch):
    torch.manual_seed(4)
    torch.set_num_threads(1)
    series = mackey_glass(4006)
    net = Reservoir()
    S = net.states(series[:-6])
    Y = series[6:]                              # six steps ahead
    tr, te = slice(100, 3000), slice(3100, 4000)
    opt = torch.optim.Adam(net.readout.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 600)
    monitor = watch(net, opt)
    for step in range(600):
        i = torch.randint(tr.start, tr.stop, (256,))
        loss = nn.functional.mse_loss(net(S[i]), Y[i])
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        monitor.log_scalar("loss", loss.detach())
    net.eval()
    with torch.no_grad():
        return ((net(S[te]) - Y[te]).square().mean().sqrt() / Y[te].std()).item()
