"""Translation of polar curves into Cartesian ones by an encoder and a decoder with separate optimizers. By copy and paste the last lines read opt_enc.step() twice; the decoder is never stepped.
Returns the translation error on new data."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """Paths in polar form and their sampled Cartesian curve."""
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        coef = torch.randn(n, 6, generator=g) * 0.5
        t = torch.linspace(0, 6.28, 20)
        r = 1 + sum(coef[:, k:k + 1] * torch.cos((k + 1) * t) * 0.4 for k in range(3))
        phi = t + sum(coef[:, 3 + k:4 + k] * torch.sin((k + 1) * t) * 0.3 for k in range(3))
        self.x, self.y = torch.stack([r, phi - t], 1).flatten(1), torch.stack([r * phi.cos(), r * phi.sin()], 1).flatten(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 96), nn.ELU(), nn.Linear(96, 12))

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 96), nn.ELU(), nn.Linear(96, 96), nn.ELU(), nn.Linear(96, 40))

    def forward(self, z):
        return self.net(z)


def train(watch, mended=False):
    torch.manual_seed(0)
    encoder, decoder = Encoder(), Decoder()
    opt_enc = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    opt_dec = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    loader = DataLoader(Pairs(3000, 1), batch_size=60, shuffle=True)
    monitor = watch(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), opt_enc, opt_dec)
    for epoch in range(10):
        for x, y in loader:
            out = decoder(encoder(x))
            loss = nn.functional.mse_loss(out, y)
            opt_enc.zero_grad()
            opt_dec.zero_grad()
            loss.backward()
            opt_enc.step()
            (opt_dec if mended else opt_enc).step()
            monitor.log_scalar("loss", loss.detach())
    test = Pairs(600, 2)
    with torch.no_grad():
        return float(nn.functional.mse_loss(decoder(encoder(test.x)), test.y))
