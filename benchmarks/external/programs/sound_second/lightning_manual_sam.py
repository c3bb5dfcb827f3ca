"""Lightning with manual optimization for a sharpness-aware step: backward, climb, backward again, return and step.
Looks odd: two manual_backward calls for one optimizer step, weights are changed in between under no_grad and put back."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset


def grid_patterns(n, seed, noisy):
    """9x9 tiles: five kinds of periodic texture"""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    r, c = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    k = torch.stack([r % 3, c % 3, (r + c) % 3, (r - c) % 3, ((r // 2) + (c // 2)) % 2 * 2]).float() - 1
    x = torch.stack([torch.roll(k[int(v)], tuple(torch.randint(0, 6, (2,), generator=g).tolist()), (0, 1)) for v in y])
    x = x + 1.5 * torch.randn(n, 9, 9, generator=g)
    if noisy:
        bad = torch.rand(n, generator=g) < .1
        y = torch.where(bad, torch.randint(0, 5, (n,), generator=g), y)
    return TensorDataset(x[:, None], y)


class SamModule(pl.LightningModule):
    def __init__(self, rho=0.05, lr=0.05, total=400):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.ReLU(),
                                 nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))

    def training_step(self, batch, _):
        x, y = batch
        opt, sched = self.optimizers(), self.lr_schedulers()
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        params = [p for p in self.net.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
            moves = [p.grad * (self.hparams.rho / norm) for p in params]
            for p, e in zip(params, moves): p.add_(e)
        opt.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        with torch.no_grad():
            for p, e in zip(params, moves): p.sub_(e)
        opt.step()
        opt.zero_grad()
        sched.step()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=.9, weight_decay=5e-4)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.total)]


def train(watch):
    pl.seed_everything(1, verbose=False)
    dl = DataLoader(grid_patterns(2560, 0, True), 64, shuffle=True)
    test = grid_patterns(1000, 1, False)
    m = SamModule()
    pl.Trainer(max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
               callbacks=[*watch.callbacks("lightning")]).fit(m, dl)
    m.eval()
    with torch.no_grad(): return (m.net(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean().item()
