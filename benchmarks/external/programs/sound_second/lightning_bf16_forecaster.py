"""A Lightning LSTM forecaster with precision="bf16-mixed", gradient clipping and accumulation over two batches.
Looks odd: the forward pass is in bfloat16 on the CPU and there are half as many steps as batches."""
import numpy as np
import torch
import torch.nn as nn
import lightning as L
from torch.utils.data import Dataset, DataLoader


class Windows(Dataset):
    def __init__(self, lo, hi, back=36, ahead=6, seed=0):
        r = np.random.default_rng(seed)
        t = np.arange(1200)
        s = []
        for _ in range(12):
            p = r.choice([8, 12, 16])
            x = np.sin(2 * np.pi * t / p + r.random() * 6) + .5 * np.sin(2 * np.pi * t / 50 + r.random() * 6) + .15 * r.normal(size=1200)
            s.append(x)
        self.s = torch.tensor(np.stack(s), dtype=torch.float32)[:, lo:hi]
        self.back, self.ahead = back, ahead
        self.per = (self.s.shape[1] - back - ahead) // 3

    def __len__(self): return 12 * self.per

    def __getitem__(self, k):
        i, t = k // self.per, 3 * (k % self.per)
        w = self.s[i, t:t + self.back + self.ahead]
        return w[:self.back, None], w[self.back:]


class Forecaster(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 32, batch_first=True)
        self.out = nn.Linear(32, 6)

    def forward(self, x): return self.out(self.rnn(x)[0][:, -1])

    def training_step(self, b, _):
        loss = nn.functional.mse_loss(self(b[0]).float(), b[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=1e-3)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.estimated_stepping_batches), "interval": "step"}}


def train(watch):
    L.seed_everything(7, verbose=False)
    tr, te = Windows(0, 900), Windows(900, 1200)
    model = Forecaster()
    trainer = L.Trainer(max_epochs=6, precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2, accelerator="cpu", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(tr, 32, shuffle=True))
    model.eval()
    x, y = map(torch.stack, zip(*[te[i] for i in range(len(te))]))
    with torch.no_grad(): return float(1 - ((model(x) - y) ** 2).mean() / y.var())
