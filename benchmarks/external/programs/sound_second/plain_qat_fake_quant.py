"""Quantisation-aware training: a float MLP is trained first, then fake quantisation (4 bit, straight-through, EMA ranges) is switched on and it is fine-tuned at a tenth of the rate.
Looks odd: the rounding has no true gradient, activations outside of the running range get none, and the loss makes a small step where the quantisers are switched on."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def fake_quant(x, lo, hi, bits):
    n = 2 ** bits - 1
    scale = ((hi - lo) / n).clamp(min=1e-8)
    q = (((x - lo) / scale).round().clamp(0, n)) * scale + lo
    inside = x.clamp(lo.item(), hi.item())      # gradient only for values in range
    return inside + (q - inside).detach()


class QLinear(nn.Linear):
    def __init__(self, i, o, bits=4):
        super().__init__(i, o)
        self.bits, self.enabled = bits, False
        self.register_buffer("lo", torch.tensor(0.0)); self.register_buffer("hi", torch.tensor(1.0))
        self.seen = False

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                if not self.seen: self.lo.copy_(x.min()); self.hi.copy_(x.max()); self.seen = True
                else: self.lo.lerp_(x.min(), 0.05); self.hi.lerp_(x.max(), 0.05)
        if not self.enabled: return super().forward(x)
        w = fake_quant(self.weight, self.weight.detach().min(), self.weight.detach().max(), self.bits)
        return F.linear(fake_quant(x, self.lo, self.hi, self.bits), w, self.bias)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g) * 2 - 1
    score = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] * 2 + x[:, 3] ** 2 - x[:, 4] + .3 * torch.randn(n, generator=g)
    return x, torch.bucketize(score, torch.tensor([-.9, 0., .5, 1.3]))


def epoch(net, opt, x, y, monitor):
    net.train()
    for b in torch.randperm(len(x)).split(128):
        loss = F.cross_entropy(net(x[b]), y[b])
        opt.zero_grad(); loss.backward(); opt.step()
        monitor.log_scalar("loss", loss.detach())


def test(net, x, y):
    net.eval()
    with torch.no_grad(): return (net(x).argmax(1) == y).float().mean().item()


def train(watch):
    torch.manual_seed(0)
    xt, yt = make(6400, 0)
    xv, yv = make(2000, 1)
    net = nn.Sequential(QLinear(10, 64), nn.ReLU(), QLinear(64, 64), nn.ReLU(), QLinear(64, 5))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor = watch(net, opt)
    for _ in range(8): epoch(net, opt, xt, yt, monitor)
    print("float", test(net, xv, yv))
    for m in net:
        if isinstance(m, QLinear): m.enabled = True
    print("post-training quantisation", test(net, xv, yv))
    for g in opt.param_groups: g["lr"] = 3e-4
    for _ in range(6): epoch(net, opt, xt, yt, monitor)
    return test(net, xv, yv)
