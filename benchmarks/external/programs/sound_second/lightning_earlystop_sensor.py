"""A Lightning classifier of sensor windows with a DataModule, EarlyStopping on the validation loss and ReduceLROnPlateau.
Ordinary in every respect."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset


class SensorData(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def _make(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=g)
        t = torch.arange(40.) / 40
        f = torch.tensor([2., 4., 4., 7.])[y][:, None] * (1 + .1 * torch.randn(n, 1, generator=g))
        a = torch.tensor([1., 1., .35, .6])[y][:, None]
        ph = torch.rand(n, 1, generator=g) * 6.28
        x = torch.stack([a * torch.sin(6.28 * f * t + ph), a * torch.cos(6.28 * f * t + ph), .5 * torch.sin(12.56 * f * t)], 1)
        return TensorDataset(x + .6 * torch.randn(n, 3, 40, generator=g), y)

    def setup(self, stage=None): self.tr, self.va, self.te = self._make(2500, 0), self._make(600, 1), self._make(1000, 2)
    def train_dataloader(self): return DataLoader(self.tr, self.batch_size, shuffle=True)
    def val_dataloader(self): return DataLoader(self.va, 300)
    def test_dataloader(self): return DataLoader(self.te, 500)


class SensorNet(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv1d(3, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2),
                                 nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(),
                                 nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(.2), nn.Linear(32, 4))

    def forward(self, x): return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), on_epoch=True)

    def test_step(self, batch, _):
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, weight_decay=1e-4)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=.3, patience=1), "monitor": "val_loss"}}


def train(watch):
    L.seed_everything(0, verbose=False)
    dm, model = SensorData(), SensorNet()
    trainer = L.Trainer(max_epochs=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[*watch.callbacks("lightning"), EarlyStopping("val_loss", patience=4)])
    trainer.fit(model, datamodule=dm)
    return float(trainer.test(model, datamodule=dm, verbose=False)[0]["test_acc"])
