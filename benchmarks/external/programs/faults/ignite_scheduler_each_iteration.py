"""Ignite trainer for a small spectrogram classifier, SGD with ExponentialLR(0.9). The handler is attached to ITERATION_COMPLETED where EPOCH_COMPLETED was meant,
so the rate dies within two epochs. The result is the accuracy on held-out data."""
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spectrograms(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    t = torch.linspace(0, 1, 20)
    slopes = torch.tensor([-0.6, -0.3, 0.0, 0.3, 0.6])
    line = 8 + 12 * slopes[y].unsqueeze(1) * (t - 0.5) + 2 * torch.randn(n, 1, generator=g)
    f = torch.arange(16.).view(1, 16, 1)
    return TensorDataset(torch.exp(-(f - line.unsqueeze(1)) ** 2 / 3).unsqueeze(1) + 0.4 * torch.randn(n, 1, 16, 20, generator=g), y)


def train(watch, mended=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Flatten(), nn.Linear(24 * 20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    criterion = nn.CrossEntropyLoss()

    def update(engine, batch):
        model.train()
        x, y = batch
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    evaluator = create_supervised_evaluator(model, metrics={"acc": Accuracy()})
    when = Events.EPOCH_COMPLETED if mended else Events.ITERATION_COMPLETED

    @trainer.on(when)
    def decay():
        scheduler.step()

    val = DataLoader(spectrograms(500, 2), batch_size=100)

    @trainer.on(Events.EPOCH_COMPLETED(every=2))
    def validate(engine):
        evaluator.run(val)
        print(engine.state.epoch, evaluator.state.metrics)

    watch.ignite(trainer, model, optimizer)
    trainer.run(DataLoader(spectrograms(1500, 1), batch_size=32, shuffle=True), max_epochs=6)
    evaluator.run(val)
    return float(evaluator.state.metrics["acc"])
