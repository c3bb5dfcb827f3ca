"""Lightning: GRU on energy-load series with the state carried between batches of the same series (detached) and accumulate_grad_batches=2.
Odd at first sight: the hidden state lives in the module across training steps, data are not shuffled, two batches make one step.
Returns test RMSE over the standard deviation of the target."""
import logging
import math
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import lightning as L

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def load_series(n_series, length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length).float()
    daily = torch.sin(2 * math.pi * t / 24 + 0.5 * torch.rand(n_series, 1, generator=g))
    weekend = ((t // 24) % 7 >= 5).float()
    amp = 1 + 0.3 * torch.rand(n_series, 1, generator=g)
    return (amp * daily * (1 - 0.5 * weekend) + 0.3 * torch.sin(4 * math.pi * t / 24) + 0.08 * torch.randn(n_series, length, generator=g))[..., None]


class Windows(Dataset):
    """one item = the same window of all series, in order of time"""
    def __init__(self, series, w=24):
        self.s, self.w = series, w

    def __len__(self):
        return (self.s.size(1) - 1) // self.w

    def __getitem__(self, i):
        a = i * self.w
        return self.s[:, a:a + self.w], self.s[:, a + 1:a + self.w + 1]


class Forecaster(L.LightningModule):
    def __init__(self, h=48):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, h, batch_first=True), nn.Linear(h, 1)
        self.state = None

    def forward(self, x, s=None):
        o, s = self.rnn(x, s)
        return self.out(o), s

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, i):
        x, y = batch
        pred, s = self(x, self.state)
        self.state = s.detach()
        loss = nn.functional.mse_loss(pred, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=4e-3)
        return [opt], [torch.optim.lr_scheduler.MultiStepLR(opt, [5], 0.2)]


def train(watch):
    warnings.filterwarnings("ignore")
    L.seed_everything(2, verbose=False)
    torch.set_num_threads(1)
    loader = DataLoader(Windows(load_series(32, 24 * 90 + 1, 0)), batch_size=None, shuffle=False)
    model = Forecaster()
    trainer = L.Trainer(max_epochs=7, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, loader)
    s = load_series(50, 24 * 21, 1)
    model.eval()
    with torch.no_grad():
        p, _ = model(s[:, :-1])
    e = (p - s[:, 1:])[:, 48:]
    return (e.square().mean().sqrt() / s.std()).item()
