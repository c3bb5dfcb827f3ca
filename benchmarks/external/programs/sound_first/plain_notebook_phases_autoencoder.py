"""Notebook in phases: (1) denoising autoencoder on unlabelled data, (2) classifier head on the frozen code, (3) everything together with a small rate; one watch per phase.
Odd at first sight: losses of different kinds and scales follow one another, and the encoder stands still in the second phase.
Returns test accuracy with only 200 labelled samples (7 classes)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def spectra(n, seed):
    peaks = torch.rand(7, 3, generator=torch.Generator().manual_seed(4)) * 50 + 7
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 7, (n,), generator=g)
    grid = torch.arange(64.)
    h = 0.5 + torch.rand(n, 3, 1, generator=g)
    shift = 1.2 * torch.randn(n, 1, 1, generator=g)
    s = (h * torch.exp(-(grid - peaks[y][:, :, None] - shift) ** 2 / 8)).sum(1)
    return s + 0.15 * torch.randn(n, 64, generator=g), y


class Code(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
        self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 64))
        self.head = nn.Linear(16, 7)


def train(watch):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    U, _ = spectra(4000, 0)
    L, yl = spectra(200, 1)
    T, yt = spectra(1500, 2)
    net = Code()

    # [12] autoencoder
    opt1 = torch.optim.Adam([*net.encoder.parameters(), *net.decoder.parameters()], lr=2e-3)
    m1 = watch(net, opt1)
    for step in range(300):
        x = U[torch.randint(0, len(U), (128,))]
        loss = F.mse_loss(net.decoder(net.encoder(x + 0.2 * torch.randn_like(x))), x)
        opt1.zero_grad(); loss.backward(); opt1.step()
        m1.log_scalar("reconstruction", loss.detach())

    # [15] head only
    net.encoder.requires_grad_(False)
    opt2 = torch.optim.Adam(net.head.parameters(), lr=2e-2)
    m2 = watch(net, opt2)
    for step in range(150):
        i = torch.randint(0, 200, (50,))
        loss = F.cross_entropy(net.head(net.encoder(L[i])), yl[i])
        opt2.zero_grad(); loss.backward(); opt2.step()
        m2.log_scalar("loss", loss.detach())
    acc = lambda: (net.head(net.encoder(T)).argmax(1) == yt).float().mean().item()
    with torch.no_grad():
        print("frozen:", acc())

    # [18] fine-tune
    net.encoder.requires_grad_(True)
    opt3 = torch.optim.Adam([*net.encoder.parameters(), *net.head.parameters()], lr=3e-4)
    m3 = watch(net, opt3)
    for step in range(120):
        i = torch.randint(0, 200, (50,))
        loss = F.cross_entropy(net.head(net.encoder(L[i] + 0.1 * torch.randn(50, 64))), yl[i])
        opt3.zero_grad(); loss.backward(); opt3.step()
        m3.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return acc()
