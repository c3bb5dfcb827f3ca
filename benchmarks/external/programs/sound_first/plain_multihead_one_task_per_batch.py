"""Multi-task net with a shared trunk and three heads; each batch belongs to one task only (drawn at random), as with data sets of different owners.
Odd at first sight: in each step two of the three heads have no gradient (None), and the logged loss mixes tasks of different scale.
Returns the mean of the three tasks' normalised scores (two accuracies and an R^2)."""
import random
import torch
from torch import nn
import torch.nn.functional as F

MIX = torch.randn(6, 24, generator=torch.Generator().manual_seed(90))


def batch(task, n):
    z = torch.randn(n, 6)
    x = torch.tanh(z @ MIX) + 0.05 * torch.randn(n, 24)
    if task == "sign":
        y = (z[:, 0] * z[:, 1] > 0).float()
    elif task == "argmax":
        y = z[:, 2:5].argmax(1)
    else:
        y = z[:, 0] + z[:, 5] ** 2
    return x, y


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.heads = nn.ModuleDict({"sign": nn.Linear(128, 1), "argmax": nn.Linear(128, 3), "value": nn.Linear(128, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(-1)


LOSS = {"sign": F.binary_cross_entropy_with_logits, "argmax": F.cross_entropy, "value": lambda p, y: 0.3 * F.mse_loss(p, y)}


def train(watch):
    random.seed(0); torch.manual_seed(0); torch.set_num_threads(1)
    model = Shared()
    opt = torch.optim.Adam(model.parameters(), lr=1.5e-3)
    watch(model, opt)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 800, eta_min=1e-4)
    for step in range(800):
        task = random.choice(["sign", "argmax", "value"])
        x, y = batch(task, 128)
        loss = LOSS[task](model(x, task), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
    with torch.no_grad():
        x, y = batch("sign", 2000); a = ((model(x, "sign") > 0).float() == y).float().mean()
        x, y = batch("argmax", 2000); b = (model(x, "argmax").argmax(1) == y).float().mean()
        x, y = batch("value", 2000); c = 1 - F.mse_loss(model(x, "value"), y) / y.var()
    return ((a + b + c) / 3).item()
