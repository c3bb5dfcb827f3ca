"""A Lightning module with AdamW and linear warm-up over 200 steps, for the classification of sums of digits in a short sequence. The scheduler
is returned without interval='step', so Lightning advances it once an epoch and the rate stays at a few hundredths."""
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SumNet(L.LightningModule):
    def __init__(self, mended):
        super().__init__()
        self.mended = mended
        self.emb = nn.Embedding(10, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Linear(32, 2)

    def forward(self, x):
        return self.cls(self.enc(self.emb(x)).mean(1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=2e-3)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 200))
        if self.mended:
            return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched}}


def data(n, g):
    x = torch.randint(10, (n, 8), generator=g)
    return TensorDataset(x, (x.sum(1) > 36).long())


def train(watch, mended=False):
    L.seed_everything(0, verbose=False)
    g = torch.Generator().manual_seed(1)
    tr, va = data(4800, g), data(1000, g)
    module = SumNet(mended)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(module, DataLoader(tr, 32, shuffle=True), DataLoader(va, 250))
    return float(trainer.callback_metrics["val_acc"])
