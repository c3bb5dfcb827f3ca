"""An ordinary Lightning classifier on synthetic phoneme-like vectors with a DataModule, validation loop, early stopping and cosine schedule per epoch.
Entirely ordinary. Returns test accuracy (nine classes)."""
import logging
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Phonemes(L.LightningDataModule):
    def setup(self, stage=None):
        g = torch.Generator().manual_seed(11)
        mean = 1.1 * torch.randn(9, 2, 24, generator=g)
        y = torch.randint(0, 9, (7000,), generator=g)
        mode = torch.randint(0, 2, (7000,), generator=g)
        x = mean[y, mode] + torch.randn(7000, 24, generator=g)
        ds = TensorDataset(x, y)
        self.tr, self.va, self.te = random_split(ds, [5000, 1000, 1000], generator=g)

    def train_dataloader(self):
        return DataLoader(self.tr, batch_size=100, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.va, batch_size=500)

    def test_dataloader(self):
        return DataLoader(self.te, batch_size=500)


class Classifier(L.LightningModule):
    def __init__(self, width=96, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(24, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 9))
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.05)

    def training_step(self, batch, _):
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def _eval(self, batch, tag):
        x, y = batch
        out = self.net(x)
        self.log(f"{tag}_loss", self.loss(out, y), on_epoch=True)
        self.log(f"{tag}_acc", (out.argmax(1) == y).float().mean(), on_epoch=True)

    def validation_step(self, batch, _):
        self._eval(batch, "val")

    def test_step(self, batch, _):
        self._eval(batch, "test")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)}


def train(watch):
    warnings.filterwarnings("ignore")
    L.seed_everything(3, verbose=False)
    torch.set_num_threads(1)
    model, dm = Classifier(), Phonemes()
    trainer = L.Trainer(max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        gradient_clip_val=1.0, callbacks=[*watch.callbacks("lightning"), EarlyStopping("val_loss", patience=4)])
    trainer.fit(model, dm)
    return trainer.test(model, dm, verbose=False)[0]["test_acc"]
