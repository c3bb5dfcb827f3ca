"""A variational autoencoder in Lightning with KL warm-up over the first third of the training.
Looks odd: the objective changes under way (the KL weight grows from zero to one in the first 150 steps), so losses of different steps cannot be compared."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


def bumps(n, seed):
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    c = torch.rand(n, 2, 1, 1, generator=g) * 1.2 - .6
    w = .03 + .12 * torch.rand(n, 1, 1, generator=g)
    return (torch.exp(-((y - c[:, 0]) ** 2 + (x - c[:, 1]) ** 2) / w) + .1 * torch.randn(n, 12, 12, generator=g)).flatten(1)


class VAE(L.LightningModule):
    def __init__(self, d=144, h=96, z=6, warm=150, sigma=.1):
        super().__init__()
        self.save_hyperparameters()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, d))

    def elbo(self, x):
        mu, lv = self.enc(x).chunk(2, 1)
        lv = lv.clamp(-8, 4)
        z = mu + torch.randn_like(mu) * (.5 * lv).exp()
        rec = F.mse_loss(self.dec(z), x, reduction="none").sum(1).mean() / (2 * self.hparams.sigma ** 2)
        kl = -.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean()
        return rec, kl

    def training_step(self, batch, _):
        rec, kl = self.elbo(batch[0])
        beta = min(1.0, self.global_step / self.hparams.warm)
        loss = (rec + beta * kl) / 144
        self.log_dict({"loss": loss, "rec": rec, "kl": kl})
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=1.5e-3)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 480), "interval": "step"}]


def train(watch):
    L.seed_everything(6, verbose=False)
    model = VAE()
    trainer = L.Trainer(max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        gradient_clip_val=5.0, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(TensorDataset(bumps(3840, 0)), 64, shuffle=True))
    model.eval()
    with torch.no_grad():
        rec, kl = model.elbo(bumps(1000, 1))
        return float((rec + kl) / 144)          # noise alone costs 0.5
