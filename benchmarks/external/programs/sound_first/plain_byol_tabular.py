"""BYOL without negatives on correlated tabular data: online network with predictor, EMA target network (momentum 0.97 to 1).
Odd at first sight: the loss falls quickly to a small value and then stands still, and the target net gets no gradient at all; it looks like a collapse but is none.
Returns the accuracy of a k-nearest-neighbour classifier on the learned features (six clusters, chance 0.17)."""
import copy
import math
import torch
from torch import nn
import torch.nn.functional as F

BASIS = torch.randn(6, 40, generator=torch.Generator().manual_seed(8))


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    return torch.tanh(BASIS[y] + 0.8 * torch.randn(n, 40, generator=g)), y


def view(x):
    keep = torch.rand_like(x) > 0.3
    return x * keep + 0.1 * torch.randn_like(x)


def encoder():
    return nn.Sequential(nn.Linear(40, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.pred = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a, b):
        p1, p2 = self.pred(self.online(a)), self.pred(self.online(b))
        with torch.no_grad():
            t1, t2 = self.target(a), self.target(b)
        return 4 - 2 * F.cosine_similarity(p1, t2).mean() - 2 * F.cosine_similarity(p2, t1).mean()

    @torch.no_grad()
    def follow(self, m):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(o, 1 - m)


def train(watch):
    torch.manual_seed(9)
    torch.set_num_threads(1)
    x, y = make(4000, 0)
    model = BYOL()
    opt = torch.optim.SGD([*model.online.parameters(), *model.pred.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = 500
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    monitor = watch(model, opt)
    for i in range(steps):
        b = x[torch.randint(0, 4000, (256,))]
        loss = model(view(b), view(b))
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        model.follow(1 - 0.03 * (math.cos(math.pi * i / steps) + 1) / 2)
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    xt, yt = make(1000, 1)
    with torch.no_grad():
        f, ft = F.normalize(model.online(x), dim=1), F.normalize(model.online(xt), dim=1)
        near = (ft @ f.T).topk(15, dim=1).indices
    return (y[near].mode(1).values == yt).float().mean().item()
