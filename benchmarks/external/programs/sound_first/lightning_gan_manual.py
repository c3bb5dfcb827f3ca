"""Lightning GAN with manual optimization (two optimizers, toggle/untoggle) that learns a two-dimensional banana distribution.
Odd at first sight: automatic_optimization is False, losses do not fall but settle, and each network is frozen in turn by toggling.
Returns the energy distance to held-out samples (untrained: about 0.9)."""
import logging
import warnings
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import lightning as L

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def banana(n, g):
    a = torch.randn(n, generator=g)
    return torch.stack([a, 0.7 * a ** 2 - 0.7 + 0.2 * torch.randn(n, generator=g)], 1)


class BananaGAN(L.LightningModule):
    def __init__(self, z=4, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.G = nn.Sequential(nn.Linear(z, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
        self.D = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))

    def sample(self, n):
        return self.G(torch.randn(n, self.hparams.z, device=self.device))

    def training_step(self, batch, _):
        (x,) = batch
        og, od = self.optimizers()
        self.toggle_optimizer(od)
        with torch.no_grad():
            fake = self.sample(len(x))
        d_loss = F.softplus(-self.D(x)).mean() + F.softplus(self.D(fake)).mean()
        od.zero_grad()
        self.manual_backward(d_loss)
        od.step()
        self.untoggle_optimizer(od)
        self.toggle_optimizer(og)
        g_loss = F.softplus(-self.D(self.sample(len(x)))).mean()
        og.zero_grad()
        self.manual_backward(g_loss)
        og.step()
        self.untoggle_optimizer(og)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self):
        return (torch.optim.Adam(self.G.parameters(), self.hparams.lr, betas=(0.5, 0.999)),
                torch.optim.Adam(self.D.parameters(), self.hparams.lr, betas=(0.5, 0.999)))


def train(watch):
    warnings.filterwarnings("ignore")
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(banana(10240, g)), batch_size=256, shuffle=True, num_workers=0)
    model = BananaGAN()
    trainer = L.Trainer(max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, loader)
    with torch.no_grad():
        a, b = model.sample(1500), banana(1500, g)
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()
