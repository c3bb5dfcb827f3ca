"""Ignite with create_supervised_trainer, an evaluator, EarlyStopping and a best-weights handler, on a nonlinear tabular problem.
Ordinary; evaluation runs at each epoch's end and the best weights are put back at the end."""
import copy
import torch
import torch.nn as nn
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping
from ignite.metrics import Accuracy, Loss
from torch.utils.data import DataLoader, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 15, generator=g)
    s = torch.stack([x[:, 0] + x[:, 1] * x[:, 2], x[:, 3] ** 2 - 1, torch.sin(2 * x[:, 4]) + x[:, 5]], 1)
    return TensorDataset(x, (s + .4 * torch.randn(n, 3, generator=g)).argmax(1))


def train(watch):
    torch.manual_seed(21)
    tr, va, te = (DataLoader(make(n, s), 64, shuffle=(s == 0)) for n, s in ((4000, 0), (800, 1), (1000, 2)))
    model = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 3))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    crit = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, opt, crit)
    evaluator = create_supervised_evaluator(model, {"acc": Accuracy(), "nll": Loss(crit)})
    best = {"nll": float("inf")}

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(va)
        m = evaluator.state.metrics
        if m["nll"] < best["nll"]: best.update(nll=m["nll"], state=copy.deepcopy(model.state_dict()))
        print(engine.state.epoch, m)

    evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(patience=4, score_function=lambda e: -e.state.metrics["nll"], trainer=trainer))
    watch.ignite(trainer, model, opt)
    trainer.run(tr, max_epochs=10)
    model.load_state_dict(best["state"])
    evaluator.run(te)
    return float(evaluator.state.metrics["acc"])
