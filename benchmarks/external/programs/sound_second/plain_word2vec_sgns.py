"""Skip-gram with negative sampling on a made-up corpus of topics; the test is whether nearest neighbours share the topic.
Looks odd: sparse embeddings with plain SGD at a rate that looks huge (the loss is a sum over the batch rows that touch a word, averaged over 512), decaying to zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F

V, TOPICS = 240, 12


def corpus(n, g):
    """sentences of eight words; two in three words come from the sentence's topic"""
    topic = torch.randint(0, TOPICS, (n, 1), generator=g)
    own = topic + TOPICS * (torch.rand(n, 8, generator=g) ** 2 * (V // TOPICS)).long()
    return torch.where(torch.rand(n, 8, generator=g) < .67, own, torch.randint(0, V, (n, 8), generator=g))


class SGNS(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inp, self.out = nn.Embedding(V, dim, sparse=True), nn.Embedding(V, dim, sparse=True)
        nn.init.uniform_(self.inp.weight, -.5 / dim, .5 / dim)
        nn.init.normal_(self.out.weight, std=.1)

    def forward(self, c, o, neg):
        v = self.inp(c)
        pos = (v * self.out(o)).sum(1)
        ng = torch.bmm(self.out(neg), v[:, :, None]).squeeze(2)
        return -(F.logsigmoid(pos) + F.logsigmoid(-ng).sum(1)).mean()


def train(watch):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    s = corpus(6000, g)
    counts = torch.bincount(s.flatten(), minlength=V).float() ** .75
    model = SGNS()
    steps, lr = 700, 20.0
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    monitor = watch(model, opt)
    for step in range(steps):
        opt.param_groups[0]["lr"] = lr * (1 - step / steps)
        row = torch.randint(0, len(s), (512,), generator=g)
        i = torch.randint(0, 8, (512,), generator=g)
        j = (i + torch.randint(1, 3, (512,), generator=g) * (torch.randint(0, 2, (512,), generator=g) * 2 - 1)) % 8
        neg = torch.multinomial(counts, 512 * 5, replacement=True, generator=g).view(512, 5)
        loss = model(s[row, i], s[row, j], neg)
        opt.zero_grad()
        loss.backward()
        opt.step()
        monitor.log_scalar("loss", loss.detach())
    w = F.normalize(model.inp.weight.detach())
    top = (w @ w.T).fill_diagonal_(-1).topk(5, 1).indices
    return float((top % TOPICS == torch.arange(V)[:, None] % TOPICS).float().mean())        # chance is 0.08
