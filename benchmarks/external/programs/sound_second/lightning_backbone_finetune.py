"""Lightning's BaseFinetuning: a pretrained backbone is frozen for four epochs, then joins the optimizer at a tenth of the rate.
Looks odd: for the first part the backbone has no gradient and is in eval mode; a parameter group appears later."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader, TensorDataset


def world(n, seed, task):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(24, 6, generator=torch.Generator().manual_seed(9))
    z = torch.randn(n, 6, generator=g)
    x = torch.tanh(z @ w.T) + .3 * torch.randn(n, 24, generator=g)
    if task == "source": y = (z[:, 0] > 0).long() + 2 * (z[:, 1] * z[:, 2] > 0).long() + 4 * (z[:, 3] > .3).long()
    else: y = (z[:, 0] + z[:, 3] > 0).long() + (z[:, 1] * z[:, 2] > .4).long()
    return TensorDataset(x, y)


class FreezeThenTune(BaseFinetuning):
    def __init__(self, at): super().__init__(); self.at = at
    def freeze_before_training(self, m): self.freeze(m.backbone)
    def finetune_function(self, m, epoch, optimizer):
        if epoch == self.at: self.unfreeze_and_add_param_group(m.backbone, optimizer, lr=2e-4)


class Transfer(pl.LightningModule):
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x): return self.head(self.backbone(x))

    def training_step(self, b, _):
        loss = F.cross_entropy(self(b[0]), b[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-3, weight_decay=.01)


def pretrain():
    body = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
    head = nn.Linear(64, 8)
    x, y = world(6000, 1, "source").tensors
    opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 2e-3)
    for _ in range(8):
        for i in torch.randperm(6000).split(100):
            opt.zero_grad(); F.cross_entropy(head(body(x[i])), y[i]).backward(); opt.step()
    return body


def train(watch):
    pl.seed_everything(2, verbose=False)
    model = Transfer(pretrain())
    tr, te = world(1500, 2, "target"), world(2000, 3, "target")
    trainer = pl.Trainer(max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[FreezeThenTune(4), *watch.callbacks("lightning")])
    trainer.fit(model, DataLoader(tr, 50, shuffle=True))
    model.eval()
    with torch.no_grad(): return (model(te.tensors[0]).argmax(1) == te.tensors[1]).float().mean().item()
