"""A small tanh net is fitted full batch with LBFGS and a strong-Wolfe line search, the closure way, with an L2 penalty.
Looks odd: several backward passes for each step, learning rate 1.0, no sampling noise at all, and the loss falls monotonically in uneven strides."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    s = torch.stack([x[:, 0] ** 2 - 1, x[:, 1] * x[:, 2], torch.sin(2 * x[:, 3]), x[:, 4]], 1) * 1.5
    return x, (s - torch.empty_like(s).exponential_(generator=g).log() * .5).argmax(1)


def penalty(model): return sum(p.square().sum() for n, p in model.named_parameters() if "weight" in n)


def train(watch):
    torch.manual_seed(2)
    x, y = data(3000, 0)
    xv, yv = data(1000, 1)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))
    for m in model:
        if isinstance(m, nn.Linear): nn.init.xavier_normal_(m.weight); nn.init.zeros_(m.bias)
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4, history_size=20, line_search_fn="strong_wolfe")
    monitor = watch(model, opt)

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-4 * penalty(model)
        loss.backward()
        return loss

    for step in range(160):
        loss = opt.step(closure)
        monitor.log_scalar("loss", loss.detach())
        if step % 20 == 0:
            with torch.no_grad(): print(step, loss.item(), F.cross_entropy(model(xv), yv).item())
    with torch.no_grad(): return (model(xv).argmax(1) == yv).float().mean().item()
