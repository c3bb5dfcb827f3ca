"""Iterative magnitude pruning with torch.nn.utils.prune: train, prune (half, then 35% of what is left), rewind to the weights of step 50, train again (three rounds).
Looks odd: the loss goes back up at each rewind and, at the end, two thirds of the weights get gradient but have no effect."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import prune


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    th = torch.rand(n, generator=g) * 6.283
    r = 0.5 + 0.5 * y + 0.12 * torch.randn(n, generator=g)
    core = torch.stack([r * th.cos(), r * th.sin()], 1)
    return torch.cat([core, torch.randn(n, 8, generator=g)], 1), y


def linears(net): return [m for m in net if isinstance(m, nn.Linear)]


def weights(net):
    return {i: ((m.weight_orig if hasattr(m, "weight_orig") else m.weight).detach().clone(), m.bias.detach().clone()) for i, m in enumerate(linears(net))}


def train(watch):
    torch.manual_seed(12)
    x, y = rings(6000, 0)
    xv, yv = rings(2000, 1)
    net = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 4))
    for m in linears(net): prune.identity(m, "weight")          # so that the parameters keep their identity from here on
    rewind = None
    for rnd in range(3):
        opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        monitor = watch(net, opt)
        for step in range(0 if rnd == 0 else 50, 250):
            b = torch.randint(0, len(x), (128,))
            loss = F.cross_entropy(net(x[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("loss", loss.detach())
            if rnd == 0 and step == 49: rewind = weights(net)
        net.eval()
        with torch.no_grad(): acc = (net(xv).argmax(1) == yv).float().mean().item()
        net.train()
        sparsity = sum((m.weight_mask == 0).sum().item() for m in linears(net)) / sum(m.weight_mask.numel() for m in linears(net))
        print(f"round {rnd} sparsity {sparsity:.2f} accuracy {acc:.3f}")
        if rnd < 2:
            prune.global_unstructured([(m, "weight") for m in linears(net)], prune.L1Unstructured, amount=0.5 if rnd == 0 else 0.35)
            with torch.no_grad():
                for i, m in enumerate(linears(net)):
                    m.weight_orig.copy_(rewind[i][0]); m.bias.copy_(rewind[i][1])
    return acc
