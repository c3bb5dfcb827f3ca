"""Lightning with manual optimization: SparseAdam for the embedding tables and Adam for the dense scorer, gradients of two micro-batches summed before a step.
Looks odd: automatic_optimization is False, one loss, two optimizers, and only every second batch ends in a step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

USERS, ITEMS = 250, 150


def ratings(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    p, q = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    bu, bi = .4 * torch.randn(USERS, generator=g), .4 * torch.randn(ITEMS, generator=g)
    u, i = torch.randint(0, USERS, (n,), generator=g), torch.randint(0, ITEMS, (n,), generator=g)
    r = 3.5 + .45 * (p[u] * q[i]).sum(1) + bu[u] + bi[i] + .35 * torch.randn(n, generator=g)
    return u, i, r.clamp(1, 5)


class Recommender(L.LightningModule):
    def __init__(self, dim=8, accumulate=2):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.user, self.item = nn.Embedding(USERS, dim, sparse=True), nn.Embedding(ITEMS, dim, sparse=True)
        self.ub, self.ib = nn.Embedding(USERS, 1, sparse=True), nn.Embedding(ITEMS, 1, sparse=True)
        for e in (self.user, self.item): nn.init.normal_(e.weight, std=.3)
        for e in (self.ub, self.ib): nn.init.zeros_(e.weight)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.mu = nn.Parameter(torch.tensor(3.5))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return self.mu + (a * b).sum(1) + self.ub(u)[:, 0] + self.ib(i)[:, 0] + self.mlp(torch.cat([a, b], 1))[:, 0]

    def training_step(self, batch, batch_idx):
        u, i, r = batch
        sparse, dense = self.optimizers()
        loss = F.mse_loss(self(u, i), r)
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            sparse.step(); dense.step()
            sparse.zero_grad(); dense.zero_grad()
        self.log("train_mse", loss)
        return loss

    def configure_optimizers(self):
        emb = [m.weight for m in (self.user, self.item, self.ub, self.ib)]
        return [torch.optim.SparseAdam(emb, lr=8e-3), torch.optim.Adam([*self.mlp.parameters(), self.mu], lr=2e-3)]


def train(watch):
    L.seed_everything(4, verbose=False)
    u, i, r = ratings(30000)
    dl = DataLoader(TensorDataset(u[:25600], i[:25600], r[:25600]), 128, shuffle=True, drop_last=True)
    model = Recommender()
    trainer = L.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, dl)
    model.eval()
    with torch.no_grad():
        mse = F.mse_loss(model(u[25600:], i[25600:]), r[25600:])
    return float(1 - mse / r[25600:].var())
