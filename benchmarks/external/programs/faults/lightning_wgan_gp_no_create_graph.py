"""WGAN-GP on a ring of points, Lightning manual optimization with two optimizers. The gradient penalty is computed without create_graph=True, so it is a constant for the critic:
the critic grows without bound and the samples do not find the ring. The result is the mean distance to fresh data."""
import math
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(i, o, h=64):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.1), nn.Linear(h, h), nn.LeakyReLU(0.1), nn.Linear(h, o))


class WGAN(L.LightningModule):
    def __init__(self, mended, nz=3):
        super().__init__()
        self.automatic_optimization = False
        self.mended, self.nz = mended, nz
        self.gen, self.critic = mlp(nz, 2), mlp(2, 1)

    def penalty(self, real, fake):
        eps = torch.rand(len(real), 1)
        mid = (eps * real + (1 - eps) * fake).requires_grad_(True)
        out = self.critic(mid).sum()
        if self.mended:
            grad = torch.autograd.grad(out, mid, create_graph=True)[0]
        else:
            grad = torch.autograd.grad(out, mid)[0]
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, idx):
        real, = batch
        opt_g, opt_c = self.optimizers()
        fake = self.gen(torch.randn(len(real), self.nz))
        loss_c = self.critic(fake.detach()).mean() - self.critic(real).mean() + 2.0 * self.penalty(real, fake.detach())
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        opt_c.step()
        self.log("critic", loss_c, prog_bar=True)
        if idx % 2 == 0:
            self.toggle_optimizer(opt_g)
            loss_g = -self.critic(self.gen(torch.randn(len(real), self.nz))).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("gen", loss_g)

    def configure_optimizers(self):
        return (torch.optim.Adam(self.gen.parameters(), lr=2e-3, betas=(0.0, 0.9)),
                torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.0, 0.9)))


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * 2 * math.pi
    return torch.stack([t.cos(), t.sin()], 1) * 2 + 0.05 * torch.randn(n, 2, generator=g)


def train(watch, mended=False):
    L.seed_everything(0, verbose=False)
    model = WGAN(mended)
    trainer = L.Trainer(max_epochs=7, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(TensorDataset(ring(6400, 1)), 64, shuffle=True))
    with torch.no_grad():
        d = torch.cdist(model.gen(torch.randn(500, 3)), ring(500, 2))
    return float(d.min(0).values.mean() + d.min(1).values.mean())
