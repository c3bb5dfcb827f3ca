"""A convolutional autoencoder removes noise from small pictures of random strokes; the score is the share of the noise that is taken away.
Ordinary in every respect: Adam, fixed rate with two cuts, mean squared error."""
import torch
import torch.nn as nn


def strokes(n, seed, s=20):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, s), torch.linspace(-1, 1, s), indexing="ij")
    img = torch.zeros(n, s, s)
    for _ in range(2):
        th, off = torch.rand(n, 1, 1, generator=g) * 3.14, torch.rand(n, 1, 1, generator=g) - .5
        d = xx * th.cos() + yy * th.sin() - off
        along = -xx * th.sin() + yy * th.cos()
        img = torch.maximum(img, torch.exp(-(d / .12) ** 2) * (along.abs() < .8))
    return img[:, None], (img + .4 * torch.randn(n, s, s, generator=g))[:, None]


class Autoencoder(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, c, 3, 1, 1), nn.ReLU(), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.ReLU(), nn.Conv2d(2 * c, 2 * c, 3, 1, 1), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ReLU(), nn.Conv2d(c, 1, 3, 1, 1))

    def forward(self, x): return self.decoder(self.encoder(x))


def train(watch):
    torch.manual_seed(1)
    clean, noisy = strokes(1600, 0)
    cv, nv = strokes(300, 1)
    net = Autoencoder()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [5, 7], .3)
    monitor = watch(net, opt)
    for ep in range(8):
        for b in torch.randperm(1600).split(40):
            loss = nn.functional.mse_loss(net(noisy[b]), clean[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.log_scalar("mse", loss.detach())
        sched.step()
        with torch.no_grad(): gain = 1 - (nn.functional.mse_loss(net(nv), cv) / nn.functional.mse_loss(nv, cv)).item()
        print(ep, loss.item(), gain)
    return gain
