"""Stochastic weight averaging: after two thirds of the epochs the learning rate is raised to a constant SWA rate and weights are averaged with AveragedModel.
Odd at first sight: the learning rate goes UP late in training and the raw loss gets worse, but the average is what is used (with BatchNorm statistics recomputed).
Returns test accuracy of the averaged model."""
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
from torch.utils.data import TensorDataset, DataLoader


def gestures(n, seed):
    W = torch.randn(8, 3, 30, generator=torch.Generator().manual_seed(25)).cumsum(2)
    W = W / W.std(2, keepdim=True)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 8, (n,), generator=g)
    x = W[y] + 2.4 * torch.randn(n, 3, 30, generator=g) + torch.randn(n, 3, 1, generator=g)
    return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(90, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))

    def forward(self, x):
        return self.f(x)


def train(watch):
    torch.manual_seed(53)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*gestures(4000, 0)), batch_size=80, shuffle=True)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=5e-4)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8, eta_min=0.01)
    swa_model, swa_sched = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=1)
    monitor = watch(model, opt)
    for epoch in range(14):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
        if epoch >= 8:
            swa_model.update_parameters(model)
            swa_sched.step()
        else:
            cos.step()
    update_bn(loader, swa_model)
    swa_model.eval()
    x, y = gestures(2000, 1)
    with torch.no_grad():
        return (swa_model(x).argmax(1) == y).float().mean().item()
