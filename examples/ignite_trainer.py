"""PyTorch-Ignite on scikit-learn's digits: one batch is poisoned, and skipped without an edit of the training step.

The handler is attached to Ignite's stock trainer. The network is trained three times: on clean batches, with the poisoned one, and
with the poisoned one skipped. ``pip install pytorch-ignite scikit-learn``.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import CosineAnnealingScheduler
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.integrations.ignite import GradmonHandler

EPOCHS, BATCH, POISONED = 4, 64, 40
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both, of the shape of ``x``, ``[batch, channels, 8, 8]``."""
        return x + self.second(torch.relu(self.first(torch.relu(x)))) / 4


def network() -> nn.Module:
    """A residual network of 15,000 parameters, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *(Block(16) for _ in range(3)), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 10)
    )


def data() -> tuple[list[Batch], list[Batch]]:
    """Batches to train on, and held-out ones."""
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    batches = [(images[part], labels[part]) for part in order.split(BATCH)]
    return batches[:22], batches[22:]


def train(name: str, batches: list[Batch], held_out: list[Batch], poisons: bool, on_spike: Any) -> None:
    """Train with Ignite's own trainer, and print the effect of the spike."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    events: list[SpikeEvent] = []
    handler = GradmonHandler(on_spike=on_spike, callback=lambda engine, event: events.append(event))
    handler.attach(trainer, model, optimizer)
    scheduler = CosineAnnealingScheduler(optimizer, "lr", 5e-3, 5e-4, 2 * EPOCHS * len(batches))
    trainer.add_event_handler(Events.ITERATION_STARTED(event_filter=handler.unless_skipped), scheduler)

    @trainer.on(Events.ITERATION_STARTED(once=POISONED))
    def poison(engine: Engine) -> None:
        if poisons:
            inputs, labels = engine.state.batch
            engine.state.batch = inputs * 1e4, labels

    @trainer.on(Events.ITERATION_COMPLETED)
    def show(engine: Engine) -> None:
        if engine.state.iteration in range(POISONED - 1, POISONED + 3):
            norm = engine.state.metrics["gradmon/grad_norm"]  # any logger of Ignite finds it there
            spike = "  a spike" if engine.state.unhealthy_spike else ""
            print(f"  iteration {engine.state.iteration}: loss {engine.state.output:.3g}, grad_norm {norm:.3g}{spike}")

    print(name)
    trainer.run(batches, max_epochs=EPOCHS)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    accuracy = evaluator.run(held_out).metrics["accuracy"]
    monitor = handler.monitor
    assert monitor is not None
    counts = monitor.get_step_counts()
    print(f"  {accuracy:.1%} of the held-out digits; {counts.skipped} of {counts.attempted} steps skipped")
    if events:
        print(f"  spikes: {len(events)}, the first: {events[0].reason}")


def main() -> None:
    """Train three times."""
    logging.getLogger("ignite").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", gradmon.GradmonWarning)  # without warnings about spikes
    batches, held_out = data()
    train("clean batches", batches, held_out, poisons=False, on_spike=None)
    train(f"\nbatch {POISONED} is poisoned", batches, held_out, poisons=True, on_spike=None)
    train(f"\nbatch {POISONED} is poisoned, and skipped", batches, held_out, poisons=True, on_spike="skip")


if __name__ == "__main__":
    main()
