"""A VAE on pictures of two bars, in Lightning. The reconstruction is averaged over the pixels too (the MSELoss default) while the KL term is summed over the latents, so KL weighs 144 times too much
and the posterior collapses onto the prior. The result is the reconstruction error on new pictures."""
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(L.LightningModule):
    def __init__(self, mended, z=6):
        super().__init__()
        self.mended = mended
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(144, 96), nn.ReLU())
        self.mu, self.logvar = nn.Linear(96, z), nn.Linear(96, z)
        self.dec = nn.Sequential(nn.Linear(z, 96), nn.ReLU(), nn.Linear(96, 144))

    def step(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
        return self.dec(z), mu, logvar

    def training_step(self, batch, _):
        x, = batch
        out, mu, logvar = self.step(x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        if self.mended:
            rec = nn.functional.mse_loss(out, x.flatten(1), reduction="sum") / len(x)
        else:
            rec = nn.functional.mse_loss(out, x.flatten(1))
        self.log_dict({"rec": rec, "kl": kl})
        return rec / 0.1 + kl

    def validation_step(self, batch, _):
        x, = batch
        self.log("val_rec", nn.functional.mse_loss(self.step(x)[0], x.flatten(1)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def bars(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.rand(n, 1, 1, generator=g) * 11, torch.rand(n, 1, 1, generator=g) * 11
    yy, xx = torch.meshgrid(torch.arange(12.), torch.arange(12.), indexing="ij")
    return TensorDataset(torch.exp(-(yy - a) ** 2 / 2) + torch.exp(-(xx - b) ** 2 / 2))


def train(watch, mended=False):
    L.seed_everything(1, verbose=False)
    model = VAE(mended)
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(bars(3200, 1), 32, shuffle=True), DataLoader(bars(640, 2), 320))
    return float(trainer.callback_metrics["val_rec"])
