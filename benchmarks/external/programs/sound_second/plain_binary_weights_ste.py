"""A BinaryConnect-like net: weights are sign(w) times a scale in the forward pass, gradients go straight through to the latent weights, which are clamped to [-1, 1].
Looks odd: gradients for latent weights ignore the sign function, many latents sit at the clamp, and the loss is noisier than with float weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, g):
        w, = ctx.saved_tensors
        return g * (w.abs() <= 1)


class BinaryLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(o, i).uniform_(-0.5, 0.5))
        self.scale = i ** -0.5

    def forward(self, x): return F.linear(x, SignSTE.apply(self.weight)) * self.scale

    @torch.no_grad()
    def clamp(self): self.weight.clamp_(-1, 1)


class Net(nn.Module):
    def __init__(self, d=64, h=128, c=6):
        super().__init__()
        self.l1, self.b1 = BinaryLinear(d, h), nn.BatchNorm1d(h)
        self.l2, self.b2 = BinaryLinear(h, h), nn.BatchNorm1d(h)
        self.out = nn.Linear(h, c)

    def forward(self, x):
        x = F.hardtanh(self.b1(self.l1(x)))
        x = F.hardtanh(self.b2(self.l2(x)))
        return self.out(x)


def data():
    c = torch.randn(18, 64)
    k = torch.randint(0, 18, (7000,))
    x = c[k] + 2.2 * torch.randn(7000, 64)
    return x / x.std(), k % 6


def train(watch):
    torch.manual_seed(8)
    x, y = data()
    xt, yt, xv, yv = x[:6000], y[:6000], x[6000:], y[6000:]
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.01, total_iters=8 * 60)
    monitor = watch(net, opt)
    for ep in range(8):
        net.train()
        for b in torch.randperm(6000).split(100):
            loss = F.cross_entropy(net(xt[b]), yt[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            for m in net.modules():
                if isinstance(m, BinaryLinear): m.clamp()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
        net.eval()
        with torch.no_grad():
            acc = (net(xv).argmax(1) == yv).float().mean().item()
        print(ep, loss.item(), acc)
    return acc
