"""Three tasks (two regressions of different noise and one classification) on a shared trunk with Kendall's learned log variances.
Looks odd: the total loss becomes negative and keeps sinking while the single losses hardly move, and three scalars have their own larger learning rate."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader


def make(n, g):
    x = torch.randn(n, 12, generator=g)
    z = torch.tanh(x[:, :4] @ torch.tensor([[1., .5], [-.5, 1.], [.7, -.7], [.2, .9]]))
    a = z[:, 0] * 1.5 + .05 * torch.randn(n, generator=g)
    b = z[:, 1] + x[:, 5] * .5 + .6 * torch.randn(n, generator=g)
    logits = torch.stack([z[:, 0] * 3, z[:, 1] * 3, x[:, 6] * 2], 1)
    c = (logits - torch.empty_like(logits).exponential_(generator=g).log()).argmax(1)
    return x, a, b, c


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.a, self.b, self.c = nn.Linear(64, 1), nn.Linear(64, 1), nn.Linear(64, 3)
        self.log_var = nn.Parameter(torch.zeros(3))

    def losses(self, x, a, b, c):
        h = self.trunk(x)
        return torch.stack([F.mse_loss(self.a(h).squeeze(1), a), F.mse_loss(self.b(h).squeeze(1), b), F.cross_entropy(self.c(h), c)])

    def total(self, ls):
        w = torch.tensor([.5, .5, 1.])
        return (w * torch.exp(-self.log_var) * ls + .5 * self.log_var).sum()


def train(watch):
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(0)
    dl = DataLoader(TensorDataset(*make(8000, g)), batch_size=128, shuffle=True)
    test = make(3000, g)
    net = MultiTask()
    main = [p for n, p in net.named_parameters() if n != "log_var"]
    opt = torch.optim.AdamW([{"params": main, "lr": 1e-3, "weight_decay": 1e-2}, {"params": [net.log_var], "lr": 1e-2, "weight_decay": 0.0}])
    monitor = watch(net, opt)
    for ep in range(10):
        for batch in dl:
            ls = net.losses(*batch)
            loss = net.total(ls)
            opt.zero_grad(); loss.backward(); opt.step()
            monitor.log_scalar("loss", loss.detach())
        print(ep, ls.tolist(), net.log_var.tolist())
    with torch.no_grad():
        return (net.c(net.trunk(test[0])).argmax(1) == test[3]).float().mean().item()
