"""Lightning with warm restarts per step and an EMA callback that swaps averaged weights in for validation and swaps the training weights back.
Odd at first sight: parameters change abruptly around validation (swapped in and out), and the rate jumps at each restart.
Returns validation accuracy of the EMA weights (checker-like tabular problem, four classes)."""
import copy
import logging
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning as L

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class EMACallback(L.Callback):
    def __init__(self, decay=0.98):
        self.decay, self.shadow, self.backup = decay, None, None

    def on_train_start(self, trainer, pl_module):
        self.shadow = copy.deepcopy(pl_module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *args):
        for k, v in pl_module.state_dict().items():
            if v.is_floating_point():
                self.shadow[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        if self.shadow is not None:
            self.backup = copy.deepcopy(pl_module.state_dict())
            pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, pl_module):
        if self.backup is not None:
            pl_module.load_state_dict(self.backup)
            self.backup = None


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self.f(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.log("val_acc", (self.f(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.15, momentum=0.9, weight_decay=1e-4)
        s = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=140, eta_min=1e-3)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": s, "interval": "step"}}


def tab(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = (torch.sin(2 * x[:, 0]) * x[:, 1] > 0).long() + 2 * (x[:, 2] + 0.5 * x[:, 3] ** 2 > 0.5).long()
    return TensorDataset(x, y)


def train(watch):
    warnings.filterwarnings("ignore")
    L.seed_everything(5, verbose=False)
    torch.set_num_threads(1)
    model = Net()
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        num_sanity_val_steps=0, callbacks=[*watch.callbacks("lightning"), EMACallback()])
    trainer.fit(model, DataLoader(tab(8960, 0), batch_size=128, shuffle=True), DataLoader(tab(2000, 1), batch_size=1000))
    return trainer.callback_metrics["val_acc"].item()
