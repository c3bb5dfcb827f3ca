"""Ignite trains a BiGRU tagger of noisy sensor states (a smoothed hidden Markov chain) with Adam and an exponential schedule.
Ordinary; validation accuracy is printed by a handler at each epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, TensorDataset


def chains(n, seed, T=24, k=4):
    g = torch.Generator().manual_seed(seed)
    emit = torch.randn(k, 5, generator=torch.Generator().manual_seed(2))
    s = torch.zeros(n, T, dtype=torch.long)
    s[:, 0] = torch.randint(0, k, (n,), generator=g)
    for t in range(1, T):
        jump = torch.rand(n, generator=g) < .15
        s[:, t] = torch.where(jump, torch.randint(0, k, (n,), generator=g), s[:, t - 1])
    return TensorDataset(emit[s] + 1.3 * torch.randn(n, T, 5, generator=g), s)


class Tagger(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.rnn, self.out = nn.GRU(5, h, batch_first=True, bidirectional=True), nn.Linear(2 * h, 4)

    def forward(self, x): return self.out(self.rnn(x)[0])


def train(watch):
    torch.manual_seed(4)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, .75)
    dl = DataLoader(chains(3000, 0), 50, shuffle=True)
    xv, yv = chains(600, 1).tensors

    def step(engine, batch):
        model.train()
        opt.zero_grad()
        x, y = batch
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        return loss.item()

    trainer = Engine(step)
    score = {}

    @trainer.on(Events.EPOCH_COMPLETED)
    def epoch_end(engine):
        sched.step()
        model.eval()
        with torch.no_grad(): score["acc"] = (model(xv).argmax(-1) == yv).float().mean().item()
        print(engine.state.epoch, engine.state.output, score["acc"])

    watch.ignite(trainer, model, opt)
    trainer.run(dl, max_epochs=6)
    return score["acc"]
