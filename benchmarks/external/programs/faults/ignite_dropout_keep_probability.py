"""An Ignite-trained text-hash classifier ported from TensorFlow 1, where dropout took the share to keep: nn.Dropout(0.95) now drops 95 percent in three layers. The net can hardly learn.
The result is held-out accuracy."""
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import PiecewiseLinear
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def hashed(n, seed):
    w = torch.Generator().manual_seed(5)
    rates = torch.rand(10, 100, generator=w).pow(3)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    return TensorDataset(torch.poisson(1.2 * rates[y], generator=g), y)


class HashNet(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 96), nn.ReLU(), nn.Dropout(p), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(p), nn.Linear(96, 48), nn.ReLU(), nn.Dropout(p),
                                 nn.Linear(48, 10))

    def forward(self, x):
        return self.net(torch.log1p(x))


def train(watch, mended=False):
    torch.manual_seed(9)
    model = HashNet(0.05 if mended else 0.95)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model, metrics={"acc": Accuracy()})
    trainer.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", [(0, 1e-4), (50, 2e-3), (450, 1e-4)]))
    val = DataLoader(hashed(800, 2), batch_size=400)

    @trainer.on(Events.EPOCH_COMPLETED)
    def check(engine):
        evaluator.run(val)
        print(engine.state.epoch, evaluator.state.metrics["acc"])

    watch.ignite(trainer, model, optimizer)
    trainer.run(DataLoader(hashed(4000, 1), batch_size=50, shuffle=True), max_epochs=6)
    return float(evaluator.state.metrics["acc"])
