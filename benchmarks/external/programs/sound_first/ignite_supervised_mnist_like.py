"""Ignite's create_supervised_trainer with metrics and a learning-rate scheduler handler on self-made seven-segment pictures.
Entirely ordinary. Returns test accuracy."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ignite.engine import Events, create_supervised_trainer, create_supervised_evaluator
from ignite.metrics import Accuracy, Loss
from ignite.handlers import CosineAnnealingScheduler

SEG = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
BAR = [(0, slice(1, 4)), (slice(1, 4), 0), (slice(1, 4), 4), (4, slice(1, 4)), (slice(5, 8), 0), (slice(5, 8), 4), (8, slice(1, 4))]


def pictures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    x = torch.zeros(n, 1, 12, 10)
    for i in range(n):
        a, b = (int(v) for v in torch.randint(0, 4, (2,), generator=g))
        for on, (r, c) in zip(SEG[int(y[i])], BAR):
            if on == "1":
                r = slice(r.start + a, r.stop + a) if isinstance(r, slice) else r + a
                c = slice(c.start + b, c.stop + b) if isinstance(c, slice) else c + b
                x[i, 0, r, c] = 1.0
    return TensorDataset(x + 0.3 * torch.randn(x.shape, generator=g), y)


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 30, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(pictures(4000, 0), batch_size=64, shuffle=True)
    trainer = create_supervised_trainer(model, opt, nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model, metrics={"acc": Accuracy(), "nll": Loss(nn.CrossEntropyLoss())})
    sched = CosineAnnealingScheduler(opt, "lr", 0.05, 0.001, cycle_size=5 * len(loader))
    trainer.add_event_handler(Events.ITERATION_STARTED, sched)
    watch.ignite(trainer, model, opt)
    test = DataLoader(pictures(1000, 1), batch_size=500)

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        evaluator.run(test)
        print(engine.state.epoch, evaluator.state.metrics)

    trainer.run(loader, max_epochs=5)
    return evaluator.state.metrics["acc"]
