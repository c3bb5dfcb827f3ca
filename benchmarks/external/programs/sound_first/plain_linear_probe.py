"""Linear probing of a frozen masked-autoencoder encoder; only the final linear layer is in the optimizer, inputs are batch-normalised without affine (MAE recipe).
Ordinary use; odd only in the high learning rate (0.5, SGD) without weight decay, which is customary for probes.
Returns probe accuracy on test data (5 classes)."""
import torch
from torch import nn
import torch.nn.functional as F


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    t = torch.arange(40).float()
    decay = torch.exp(-t / (6.0 + 5.0 * y[:, None]))
    phase = torch.rand(n, 1, generator=g) * 6.28
    return decay * torch.sin(0.8 * t + phase) + 0.05 * torch.randn(n, 40, generator=g), y


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(80, 128), nn.GELU(), nn.Linear(128, 64))
        self.decoder = nn.Sequential(nn.GELU(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 40))

    def encode(self, x, mask):
        return self.encoder(torch.cat([x * mask, mask], 1))

    def forward(self, x):
        mask = (torch.rand(len(x), 10) > 0.5).float().repeat_interleave(4, 1)
        rec = self.decoder(self.encode(x, mask))
        return (((rec - x) ** 2) * (1 - mask)).sum() / (1 - mask).sum()


def train(watch):
    torch.manual_seed(2); torch.set_num_threads(1)
    x, y = signals(5000, 0)
    xt, yt = signals(1500, 1)
    mae = MAE()
    pre = torch.optim.AdamW(mae.parameters(), lr=2e-3)
    for i in range(400):
        loss = mae(x[torch.randint(0, 5000, (256,))])
        pre.zero_grad(); loss.backward(); pre.step()
    print("reconstruction", loss.item())
    for p in mae.parameters():
        p.requires_grad = False
    probe = nn.Sequential(nn.BatchNorm1d(64, affine=False), nn.Linear(64, 5))
    model = nn.ModuleDict({"encoder": mae, "probe": probe})
    opt = torch.optim.SGD(probe.parameters(), lr=0.5, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400)
    watch(model, opt)
    for i in range(400):
        j = torch.randint(0, 5000, (512,))
        with torch.no_grad():
            f = mae.encode(x[j], torch.ones(512, 40))
        loss = F.cross_entropy(probe(f), y[j])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    probe.eval()
    with torch.no_grad():
        return (probe(mae.encode(xt, torch.ones(len(xt), 40))).argmax(1) == yt).float().mean().item()
