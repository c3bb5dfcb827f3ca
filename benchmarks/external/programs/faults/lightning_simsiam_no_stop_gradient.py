"""SimSiam-like self-supervision of augmented vectors in Lightning. The .detach() on the target projections is missing, so both branches collapse onto one constant vector while the loss looks
perfect (-1). The result is the accuracy of a linear probe on the normalised features."""
import torch
import lightning as L
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __init__(self, n, seed, augment=True):
        w = torch.Generator().manual_seed(90)
        self.centers, self.lift = torch.randn(8, 6, generator=w), torch.randn(6, 50, generator=w) / 2
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(8, (n,), generator=g)
        self.x = torch.tanh((self.centers[self.y] + 0.45 * torch.randn(n, 6, generator=g)) @ self.lift)
        self.augment = augment

    def view(self, x):
        return (x + 0.3 * torch.randn_like(x)) * (torch.rand_like(x) > 0.2)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.view(self.x[i]), self.view(self.x[i])


class SimSiam(L.LightningModule):
    def __init__(self, mended, dim=32):
        super().__init__()
        self.mended = mended
        self.encoder = nn.Sequential(nn.Linear(50, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

    def training_step(self, batch, _):
        a, b = batch
        za, zb = self.encoder(a), self.encoder(b)
        pa, pb = self.predictor(za), self.predictor(zb)
        if self.mended:
            za, zb = za.detach(), zb.detach()
        loss = -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) / 2
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)]


def probe(encoder, data, test):
    encoder.eval()
    with torch.no_grad():
        h, ht = (F.normalize(encoder(d.x)) for d in (data, test))
    lin = nn.Linear(h.shape[1], 8)
    opt = torch.optim.SGD(lin.parameters(), lr=0.5, momentum=0.9)
    for _ in range(100):
        opt.zero_grad()
        F.cross_entropy(lin(h), data.y).backward()
        opt.step()
    return float((lin(ht).argmax(1) == test.y).float().mean())


def train(watch, mended=False):
    L.seed_everything(0, verbose=False)
    data, test = Views(3200, 1), Views(800, 2)
    model = SimSiam(mended)
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(data, 64, shuffle=True, drop_last=True))
    return probe(model.encoder, data, test)
