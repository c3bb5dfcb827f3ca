"""Regression of a damped oscillator's parameters from its curve, in Lightning with ReduceLROnPlateau on val_loss. mode='max' was copied from a project that watched accuracy, so each improvement of the loss
counts as none and the rate is cut again and again. The result is the validation loss."""
import math
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Oscillators(L.LightningDataModule):
    def make(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        freq, damp = 1 + 3 * torch.rand(n, 1, generator=g), 0.1 + torch.rand(n, 1, generator=g)
        t = torch.linspace(0, 3, 40)
        x = torch.exp(-damp * t) * torch.cos(2 * math.pi * freq * t / 2) + 0.05 * torch.randn(n, 40, generator=g)
        return TensorDataset(x.unsqueeze(1), torch.cat([freq - 2.5, damp - 0.6], 1))

    def train_dataloader(self):
        return DataLoader(self.make(1600, 1), 64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.make(500, 2), 250)


class Net(L.LightningModule):
    def __init__(self, mode):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
                                 nn.Flatten(), nn.Linear(320, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=5e-4)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode=self.hparams.mode, factor=0.2, patience=1)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_loss"}}


def train(watch, mended=False):
    L.seed_everything(2, verbose=False)
    model = Net("min" if mended else "max")
    trainer = L.Trainer(max_epochs=16, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, datamodule=Oscillators())
    return float(trainer.callback_metrics["val_loss"])
