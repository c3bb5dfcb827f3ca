"""Ignite with hand-made gradient accumulation over eight micro-batches of two samples. zero_grad() stands at the top of the update function and not after the step,
so each step uses only the last micro-batch, divided by eight. Returns the test loss."""
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def gestures(n, seed):
    w = torch.Generator().manual_seed(11)
    curves = torch.randn(7, 3, 6, generator=w)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(7, (n,), generator=g)
    path = nn.functional.interpolate(curves[y] + 0.3 * torch.randn(n, 3, 6, generator=g), size=24, mode="linear")
    return TensorDataset(path + 0.6 * torch.randn(n, 3, 24, generator=g), y)


class GestureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 32, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(64, 7)

    def forward(self, x):
        return self.fc(self.rnn(x.transpose(1, 2))[0].mean(1))


def train(watch, mended=False, accumulation=8):
    torch.manual_seed(0)
    model = GestureNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    def update(engine, batch):
        model.train()
        if not mended:
            optimizer.zero_grad()
        x, y = batch
        loss = loss_fn(model(x), y) / accumulation
        loss.backward()
        if engine.state.iteration % accumulation == 0:
            optimizer.step()
            if mended:
                optimizer.zero_grad()
        return loss.item() * accumulation

    trainer = Engine(update)
    evaluator = create_supervised_evaluator(model, metrics={"acc": Accuracy(), "nll": Loss(loss_fn)})
    watch.ignite(trainer, model, optimizer)

    @trainer.on(Events.ITERATION_COMPLETED(every=400))
    def log(engine):
        print(engine.state.iteration, engine.state.output)

    trainer.run(DataLoader(gestures(1400, 1), batch_size=2, shuffle=True), max_epochs=3)
    evaluator.run(DataLoader(gestures(700, 2), batch_size=350))
    return float(evaluator.state.metrics["nll"])
