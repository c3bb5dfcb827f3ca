"""Lightning's StochasticWeightAveraging callback on a regression net; the rate is constant and then anneals to the SWA rate.
Looks odd: the weights are swapped for their average at the end of the fit, and the batch-norm statistics are computed anew in an extra epoch."""
import torch
import torch.nn as nn
import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset


def concrete(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 7, generator=g)
    ratio = x[:, 1] / (x[:, 0] + .5)
    y = 30 * x[:, 0] + 12 * torch.log1p(9 * x[:, 2]) - 25 * ratio + 8 * x[:, 3] * x[:, 4] + 3 * torch.randn(n, generator=g)
    return (x - .5) * 3.46, y


class Strength(L.LightningModule):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean); self.register_buffer("std", std)
        self.net = nn.Sequential(nn.Linear(7, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x): return self.net(x).squeeze(-1) * self.std + self.mean

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), (y - self.mean) / self.std)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=.03, momentum=.9, weight_decay=1e-4)


def train(watch):
    L.seed_everything(3, verbose=False)
    x, y = concrete(3200, 0)
    xv, yv = concrete(800, 1)
    model = Strength(y.mean(), y.std())
    trainer = L.Trainer(max_epochs=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[*watch.callbacks("lightning"), StochasticWeightAveraging(swa_lrs=.01, swa_epoch_start=.6, annealing_epochs=2)])
    trainer.fit(model, DataLoader(TensorDataset(x, y), 64, shuffle=True))
    model.eval()
    with torch.no_grad(): return float(1 - ((model(xv) - yv) ** 2).mean() / yv.var())
