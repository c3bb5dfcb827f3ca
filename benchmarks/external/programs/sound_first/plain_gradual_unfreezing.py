"""ULMFiT-style fine-tuning: discriminative learning rates per layer (halved per depth), slanted triangular schedule, and gradual unfreezing from the top.
Odd at first sight: lower layers are in the optimizer from the start but receive no gradient until they are unfrozen, epoch by epoch.
Returns accuracy on the target task (reviews, two classes, 1500 training texts)."""
import torch
from torch import nn
import torch.nn.functional as F


class LM(nn.Module):
    def __init__(self, v=50, d=32, h=48):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.l1, self.l2 = nn.LSTM(d, h, batch_first=True), nn.LSTM(h, h, batch_first=True)
        self.head = nn.Linear(h, v)

    def body(self, x):
        return self.l2(self.l1(self.emb(x))[0])[0]

    def forward(self, x):
        return self.head(self.body(x))


class Classifier(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.emb, self.l1, self.l2 = lm.emb, lm.l1, lm.l2
        self.head = nn.Sequential(nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        h = self.l2(self.l1(self.emb(x))[0])[0]
        return self.head(torch.cat([h.mean(1), h.max(1).values], 1))


def text(n):
    """words 0-9 are positive, 10-19 negative, a negation (20) turns the next one."""
    y = torch.randint(0, 2, (n,))
    w = torch.randint(21, 50, (n, 20))
    for k in range(3):
        pos = 1 + 6 * k + torch.randint(0, 5, (n,))
        neg = torch.rand(n) < 0.15
        s = torch.where(neg, 1 - y, y)
        word = torch.randint(0, 10, (n,)) + 10 * (1 - s)
        w[torch.arange(n), pos] = word
        w[torch.arange(n), pos - 1] = torch.where(neg, torch.full_like(word, 20), w[torch.arange(n), pos - 1])
    return w, y


def train(watch):
    torch.manual_seed(6)
    torch.set_num_threads(1)
    corpus, _ = text(4000)
    lm = LM()
    o = torch.optim.Adam(lm.parameters(), 4e-3)
    for _ in range(150):
        b = corpus[torch.randint(0, 4000, (64,))]
        l = F.cross_entropy(lm(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())
        o.zero_grad(); l.backward(); o.step()
    x, y = text(1500)
    xt, yt = text(1000)
    net = Classifier(lm)
    layers = [net.head, net.l2, net.l1, net.emb]
    opt = torch.optim.Adam([{"params": m.parameters(), "lr": 1e-2 / 2.0 ** k} for k, m in enumerate(layers)], betas=(0.8, 0.99))
    epochs, per = 10, 23
    total, cut = epochs * per, int(0.2 * epochs * per)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: (t + 1) / cut if t < cut else max(0.03, 1 - (t - cut) / (total - cut)))
    monitor = watch(net, opt)
    for ep in range(epochs):
        for k, m in enumerate(layers):
            m.requires_grad_(k <= ep)
        for idx in torch.randperm(1500).split(66):
            loss = F.cross_entropy(net(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            monitor.log_scalar("loss", loss.detach())
    net.eval()
    with torch.no_grad():
        return (net(xt).argmax(1) == yt).float().mean().item()
