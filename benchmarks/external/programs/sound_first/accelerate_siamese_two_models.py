"""Accelerate with two prepared models and optimizers (encoder and relation head) in few-shot episodes: five classes, one example each.
Odd at first sight: classes change in every episode, so the loss fluctuates strongly from step to step and never refers to fixed labels.
Returns accuracy of one-shot classification over classes that never occurred in training (chance 0.2)."""
import torch
from torch import nn
import torch.nn.functional as F
from accelerate import Accelerator


class Episodes:
    def __init__(self, classes, seed):
        g = torch.Generator().manual_seed(seed)
        self.proto = torch.randn(classes, 6, generator=g)
        self.lift = torch.randn(10, 40, generator=torch.Generator().manual_seed(1)) * 0.6

    def draw(self, episodes, way=5, query=4):
        c = torch.stack([torch.randperm(len(self.proto))[:way] for _ in range(episodes)])
        def render(ids):
            z = torch.cat([self.proto[ids] + 0.15 * torch.randn(*ids.shape, 6), 1.2 * torch.randn(*ids.shape, 4)], -1)
            return torch.tanh(z @ self.lift)
        y = torch.arange(way).repeat(query).expand(episodes, -1)
        return render(c), render(c.gather(1, y)), y


def train(watch):
    torch.manual_seed(10)
    torch.set_num_threads(1)
    acc = Accelerator(cpu=True)
    encoder = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
    relation = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    oe, orl = torch.optim.Adam(encoder.parameters(), 1e-3), torch.optim.Adam(relation.parameters(), 2e-3)
    encoder, relation, oe, orl = acc.prepare(encoder, relation, oe, orl)
    me, mr = watch(encoder, oe), watch(relation, orl)

    def scores(support, query):
        s, q = encoder(support), encoder(query)
        pair = torch.cat([(q[:, :, None] - s[:, None]).abs(), q[:, :, None] * s[:, None]], -1)
        return relation(pair).squeeze(-1)

    train_set, test_set = Episodes(150, 2), Episodes(50, 3)
    for step in range(600):
        s, q, y = train_set.draw(8)
        loss = F.cross_entropy(scores(s, q).flatten(0, 1), y.flatten())
        oe.zero_grad(); orl.zero_grad()
        acc.backward(loss)
        oe.step(); orl.step()
        me.log_scalar("loss", loss.detach()); mr.log_scalar("loss", loss.detach())
    s, q, y = test_set.draw(150)
    with torch.no_grad():
        return (scores(s, q).argmax(-1) == y).float().mean().item()
