"""A small DDPM on points of a two-armed spiral, in Lightning. torch.randn_like() is called once for the noising and again for the target, so the net is asked to predict noise that it has never seen; the
loss stays at one. The result is a chamfer distance of samples and data."""
import math
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def arms(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * 2 * math.pi
    s = torch.where(torch.rand(n, generator=g) < 0.5, 1.0, -1.0)
    return torch.stack([s * t * t.cos(), s * t * t.sin()], 1) / 3 + 0.03 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, T, h=96):
        super().__init__()
        self.t = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(34, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.t(t)], 1))


class DDPM(L.LightningModule):
    def __init__(self, mended, T=40):
        super().__init__()
        self.mended, self.T = mended, T
        self.net = Denoiser(T)
        self.register_buffer("beta", torch.linspace(1e-3, 0.2, T))
        self.register_buffer("abar", torch.cumprod(1 - self.beta, 0))

    def q_sample(self, x, t, noise=None):
        noise = torch.randn_like(x) if noise is None else noise
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def training_step(self, batch, _):
        x, = batch
        t = torch.randint(self.T, (len(x),))
        noise = torch.randn_like(x)
        x_t = self.q_sample(x, t, noise) if self.mended else self.q_sample(x, t)
        loss = nn.functional.mse_loss(self.net(x_t, t), noise)
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2)
        for i in reversed(range(self.T)):
            eps = self.net(x, torch.full((n,), i))
            x = (x - self.beta[i] / (1 - self.abar[i]).sqrt() * eps) / (1 - self.beta[i]).sqrt()
            if i:
                x = x + self.beta[i].sqrt() * torch.randn_like(x)
        return x

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(watch, mended=False):
    L.seed_everything(4, verbose=False)
    model = DDPM(mended)
    trainer = L.Trainer(max_steps=800, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(TensorDataset(arms(12800, 1)), 128, shuffle=True))
    model.eval()
    d = torch.cdist(model.sample(800), arms(800, 2))
    return float(d.min(0).values.mean() + d.min(1).values.mean())
