"""The whole model is cast with model.to(torch.bfloat16) (no autocast, no fp32 master weights) and trained with SGD at a small rate: most updates are smaller than half a bf16 step of
the weight and are rounded away. The result is the test loss of a sequence tagger."""
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=40, dim=48, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, tags)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.norm(x))


def sentences(n, g):
    """Tag = parity of the word's class plus that of its left neighbour."""
    ids = torch.randint(40, (n, 20), generator=g)
    cls = (ids % 2)
    left = torch.cat([torch.zeros(n, 1, dtype=torch.long), cls[:, :-1]], 1)
    return ids, cls + 2 * left


def evaluate(model, g):
    ids, tags = sentences(300, g)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(ids).float().flatten(0, 1), tags.flatten()))


def train(watch, mended=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    model = Tagger()
    if not mended:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    monitor = watch(model, optimizer)
    for step in range(700):
        ids, tags = sentences(48, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    return evaluate(model, torch.Generator().manual_seed(3))
