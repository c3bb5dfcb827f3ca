"""CLIP-like training of two towers (a "picture" vector tower and a token-sequence tower) with a learnable, clamped temperature.
Odd at first sight: the logit scale is a single scalar parameter that drifts slowly over the whole run; it sits in a group without weight decay.
Returns top-1 retrieval accuracy among 128 held-out pairs."""
import math
import torch
from torch import nn
import torch.nn.functional as F


class Pairs(torch.utils.data.Dataset):
    """Caption: 6 tokens, each one of 12 attribute values; picture: a fixed random rendering of the attributes plus noise."""
    render = torch.randn(6, 12, 48, generator=torch.Generator().manual_seed(123))

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.tok = torch.randint(0, 12, (n, 6), generator=g)
        self.img = sum(self.render[k][self.tok[:, k]] for k in range(6)) + 0.3 * torch.randn(n, 48, generator=g)

    def __len__(self):
        return len(self.tok)

    def __getitem__(self, i):
        return self.img[i], self.tok[i]


class TextTower(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(12, d), nn.Parameter(torch.randn(6, d) * 0.5)
        self.enc = nn.TransformerEncoderLayer(d, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, 32)

    def forward(self, t):
        return self.out(self.enc(self.emb(t) + self.pos).mean(1))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = TextTower()
        self.image = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, img, tok):
        a, b = F.normalize(self.image(img), dim=1), F.normalize(self.text(tok), dim=1)
        return self.logit_scale.exp() * a @ b.T


def train(watch):
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = Clip()
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.98))
    loader = torch.utils.data.DataLoader(Pairs(6400, 0), batch_size=128, shuffle=True, drop_last=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=8 * len(loader), pct_start=0.1)
    monitor = watch(model, opt)
    for epoch in range(8):
        for img, tok in loader:
            logits = model(img, tok)
            target = torch.arange(len(img))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                model.logit_scale.clamp_(max=math.log(100))
            monitor.log_scalar("loss", loss.detach())
            monitor.log_scalar("scale", model.logit_scale.detach().exp())
    ds = Pairs(128, 1)
    with torch.no_grad():
        return (model(ds.img, ds.tok).argmax(1) == torch.arange(128)).float().mean().item()
