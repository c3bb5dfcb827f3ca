"""Iterative magnitude pruning (torch.nn.utils.prune) to 80 % sparsity with fine-tuning in between.
Odd at first sight: a growing part of every weight matrix is exactly zero and gets exactly zero gradient; the loss jumps after each pruning.
Returns test accuracy of the sparse net."""
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset, DataLoader


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(30, 7, generator=torch.Generator().manual_seed(19))
    x = torch.randn(n, 30, generator=g)
    return x, (torch.tanh(x) @ W + 0.15 * (x[:, :7] * x[:, 7:14])).argmax(1)


def run_epoch(model, opt, loader, mon):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mon.log_scalar("loss", loss.detach())


def sparsity(mods):
    return sum((m.weight == 0).sum().item() for m in mods) / sum(m.weight.numel() for m in mods)


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*data(16000, 0)), batch_size=320, shuffle=True)
    model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 7))
    linears = [model[0], model[2], model[4]]
    for m in linears:
        prune.identity(m, "weight")          # masks exist from the start, so the parameters keep their names
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=2e-4)
    monitor = watch(model, opt)
    for epoch in range(5):
        run_epoch(model, opt, loader, monitor)
    for g in opt.param_groups:
        g["lr"] = 0.03
    for level in (0.4, 0.4, 0.45):           # of what is left each time
        prune.global_unstructured([(m, "weight") for m in linears], pruning_method=prune.L1Unstructured, amount=level)
        print("sparsity", round(sparsity(linears), 2))
        for epoch in range(3):
            run_epoch(model, opt, loader, monitor)
    x, y = data(3000, 1)
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()
