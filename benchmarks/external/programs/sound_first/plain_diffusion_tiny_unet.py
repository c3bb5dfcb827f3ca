"""Small convolutional denoiser with skip connections on 8x8 blobs, v-prediction, and a zero-initialised last convolution in each residual block and output.
Odd at first sight: the model's output is exactly zero at the start, so the inner layers receive exactly zero gradients in the first step.
Returns the denoising loss on held-out pictures (predicting zero: about 0.5)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader


class Blobs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        c = torch.rand(n, 2, 1, 1, generator=g) * 5 + 1
        w = torch.rand(n, 1, 1, generator=g) * 1.5 + 0.8
        yy, xx = torch.meshgrid(torch.arange(8.), torch.arange(8.), indexing="ij")
        r = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2
        self.x = (2 * torch.exp(-r / (2 * w ** 2)) - 1)[:, None]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def zero(m):
    nn.init.zeros_(m.weight); nn.init.zeros_(m.bias)
    return m


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1)
        self.t = nn.Linear(32, c)
        self.n2, self.c2 = nn.GroupNorm(4, c), zero(nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.t(t)[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class Tiny(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.inp, self.d1 = nn.Conv2d(1, c, 3, padding=1), Res(c)
        self.down, self.mid = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), Res(2 * c)
        self.up, self.u1 = nn.ConvTranspose2d(2 * c, c, 2, stride=2), Res(c)
        self.out = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), zero(nn.Conv2d(c, 1, 3, padding=1)))

    def forward(self, x, t):
        e = self.temb(t[:, None])
        a = self.d1(self.inp(x), e)
        b = self.mid(self.down(a), e)
        return self.out(self.u1(self.up(b) + a, e))


def v_loss(model, x):
    t = torch.rand(len(x))
    a, s = torch.cos(t * torch.pi / 2)[:, None, None, None], torch.sin(t * torch.pi / 2)[:, None, None, None]
    n = torch.randn_like(x)
    return F.mse_loss(model(a * x + s * n, t), a * n - s * x)


def train(watch):
    torch.manual_seed(6)
    torch.set_num_threads(1)
    loader = DataLoader(Blobs(2048, 0), batch_size=64, shuffle=True, drop_last=True)
    model = Tiny()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    watch(model, opt)
    for epoch in range(9):
        model.train()
        for x in loader:
            loss = v_loss(model, x)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        print(epoch, loss.item())
    model.eval()
    with torch.no_grad():
        return v_loss(model, Blobs(2000, 1).x).item()
