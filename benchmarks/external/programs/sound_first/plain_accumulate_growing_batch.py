"""Batch-size warm-up instead of learning-rate decay: gradient accumulation grows from 1 to 2, 4 and 8 micro-batches (Smith et al. 2018).
Odd at first sight: the learning rate is constant and gradients become calmer in jumps; steps per epoch get fewer and fewer. No loss is logged.
Returns test accuracy."""
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    r = x.norm(dim=1)
    y = (r > 1.2).long() + (r > 1.8).long() + 3 * (x[:, 0] > 0).long()
    return torch.cat([x + 0.02 * torch.randn(n, 3, generator=g), torch.randn(n, 5, generator=g)], 1), y


def train(watch):
    torch.manual_seed(41)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*rings(6400, 0)), batch_size=32, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 6))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    watch(model, opt)
    ce = nn.CrossEntropyLoss()
    plan = [1, 1, 2, 2, 4, 4, 8, 8]
    for epoch, k in enumerate(plan):
        running = 0.0
        opt.zero_grad()
        for i, (x, y) in enumerate(loader, 1):
            loss = ce(model(x), y) / k
            loss.backward()
            running += loss.item() * k
            if i % k == 0:
                opt.step()
                opt.zero_grad()
        print(f"epoch {epoch}: accumulation {k}, loss {running / len(loader):.3f}")
    x, y = rings(3000, 1)
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()
