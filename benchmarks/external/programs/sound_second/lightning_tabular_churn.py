"""Churn prediction in Lightning: embeddings for three categorical columns, six numeric ones, AdamW with OneCycle per step.
Ordinary in every respect."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

CARDS = (12, 30, 5)


def customers(n, seed):
    g = torch.Generator().manual_seed(seed)
    f = torch.Generator().manual_seed(1)
    cat = torch.stack([torch.randint(0, c, (n,), generator=g) for c in CARDS], 1)
    num = torch.randn(n, 6, generator=g)
    eff = [torch.randn(c, generator=f) * .8 for c in CARDS]
    s = sum(e[cat[:, k]] for k, e in enumerate(eff)) + num[:, 0] * 1.2 - num[:, 1] ** 2 * .7 + num[:, 2] * eff[2][cat[:, 2]]
    return TensorDataset(cat, num, (torch.rand(n, generator=g) < (1.5 * s).sigmoid()).float())


class Churn(pl.LightningModule):
    def __init__(self, total_steps, dim=6, h=64, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embs = nn.ModuleList(nn.Embedding(c, dim) for c in CARDS)
        self.mlp = nn.Sequential(nn.Linear(3 * dim + 6, h), nn.ReLU(), nn.Dropout(.1), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, cat, num): return self.mlp(torch.cat([e(cat[:, k]) for k, e in enumerate(self.embs)] + [num], 1)).squeeze(1)

    def _loss(self, batch):
        cat, num, y = batch
        out = self(cat, num)
        return F.binary_cross_entropy_with_logits(out, y), ((out > 0) == (y > .5)).float().mean()

    def training_step(self, batch, _):
        loss, acc = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss, acc = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_acc": acc})

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=.01)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(opt, self.hparams.lr, total_steps=self.hparams.total_steps), "interval": "step"}]


def train(watch):
    pl.seed_everything(8, verbose=False)
    dl = DataLoader(customers(10000, 0), 125, shuffle=True)
    model = Churn(total_steps=6 * len(dl))
    trainer = pl.Trainer(max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, dl, DataLoader(customers(2000, 1), 500))
    return float(trainer.callback_metrics["val_acc"])
