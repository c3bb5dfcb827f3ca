"""Lightning, manual optimization: embeddings (Adagrad, every batch) and a transformer body (AdamW, every second batch with accumulated gradients) for set-sum regression.
Odd at first sight: the two optimizers step at different rhythms, so the body's gradients accumulate over two batches while embeddings move at once.
Returns R^2 on held-out sets."""
import logging
import warnings
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader
import lightning as L

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Baskets(Dataset):
    def __init__(self, n, seed):
        price = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 2
        g = torch.Generator().manual_seed(seed)
        self.items = torch.randint(0, 40, (n, 8), generator=g)
        total = price[self.items].sum(1)
        repeated = (self.items[:, :, None] == self.items[:, None]).sum((1, 2)) > 8
        self.y = (total - 8) * torch.where(repeated, 0.8, 1.0)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.items[i], self.y[i]


class Body(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.att(h, h, h, need_weights=False)[0]
        x = x + self.ff(self.n2(x))
        return self.out(x.mean(1)).squeeze(1)


class BasketModel(L.LightningModule):
    every = 2

    def __init__(self, d=32):
        super().__init__()
        self.automatic_optimization = False
        self.emb, self.body = nn.Embedding(40, d), Body(d)

    def forward(self, x):
        return self.body(self.emb(x))

    def training_step(self, batch, i):
        x, y = batch
        oe, ob = self.optimizers()
        loss = nn.functional.huber_loss(self(x), y)
        oe.zero_grad()
        self.manual_backward(loss)
        oe.step()
        if (i + 1) % self.every == 0:
            for p in self.body.parameters():
                p.grad /= self.every
            ob.step()
            ob.zero_grad()
            self.lr_schedulers().step()
        self.log("loss", loss)

    def configure_optimizers(self):
        oe = torch.optim.Adagrad(self.emb.parameters(), lr=0.05)
        ob = torch.optim.AdamW(self.body.parameters(), lr=3e-3, weight_decay=0.01)
        return [oe, ob], [torch.optim.lr_scheduler.CosineAnnealingLR(ob, 250, eta_min=1e-4)]


def train(watch):
    warnings.filterwarnings("ignore")
    L.seed_everything(9, verbose=False)
    torch.set_num_threads(1)
    model = BasketModel()
    trainer = L.Trainer(max_steps=-1, max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(Baskets(6400, 1), batch_size=64, shuffle=True))
    t = Baskets(2000, 2)
    model.eval()
    with torch.no_grad():
        return (1 - (model(t.items) - t.y).square().mean() / t.y.var()).item()
