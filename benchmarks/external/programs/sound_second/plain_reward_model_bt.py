"""A Bradley-Terry reward model on pairs of summaries (bags of tokens) with noisy human choices.
Looks odd: the loss begins at 0.693 and can only come down to about 0.5, since annotators disagree; the mean reward drifts freely, as only differences count."""
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader


@dataclass
class Args:
    vocab: int = 200
    length: int = 20
    dim: int = 32
    lr: float = 1e-3
    epochs: int = 3
    batch: int = 64


class Pairs(Dataset):
    def __init__(self, n, seed, a):
        g = torch.Generator().manual_seed(seed)
        value = torch.randn(a.vocab, generator=torch.Generator().manual_seed(5))
        self.a = torch.randint(0, a.vocab, (n, a.length), generator=g)
        self.b = torch.randint(0, a.vocab, (n, a.length), generator=g)
        q = lambda s: value[s].mean(1) * 4 + (value[s[:, 0]] > 0.5) * 1.0
        self.true = q(self.a) > q(self.b)
        win = torch.rand(n, generator=g) < torch.sigmoid(1.5 * (q(self.a) - q(self.b)))
        self.chosen = torch.where(win[:, None], self.a, self.b)
        self.rejected = torch.where(win[:, None], self.b, self.a)

    def __len__(self): return len(self.a)
    def __getitem__(self, i): return self.chosen[i], self.rejected[i]


class RewardModel(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.emb = nn.Embedding(a.vocab, a.dim)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.pos = nn.Parameter(torch.ones(a.length, 1))
        self.body = nn.Sequential(nn.Linear(a.dim, 64), nn.GELU(), nn.Dropout(0.1))
        self.score = nn.Linear(64, 1, bias=False)
        nn.init.normal_(self.score.weight, std=1 / 65 ** .5)

    def forward(self, s): return self.score(self.body((self.emb(s) * self.pos).mean(1) * 4)).squeeze(1)


def train(watch):
    a = Args()
    torch.manual_seed(1)
    tr, te = Pairs(12000, 0, a), Pairs(2000, 1, a)
    model = RewardModel(a)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.01)
    dl = DataLoader(tr, a.batch, shuffle=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * len(dl))
    monitor = watch(model, opt)
    for _ in range(a.epochs):
        for c, r in dl:
            both = model(torch.cat([c, r]))                        # one pass for both sides
            rc, rr = both.chunk(2)
            loss = -F.logsigmoid(rc - rr).mean()
            opt.zero_grad(); loss.backward(); opt.step(); sched.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return ((model(te.a) > model(te.b)) == te.true).float().mean().item()
