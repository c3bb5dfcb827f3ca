"""Accelerate: accumulation, clipping, a scheduler, and one tracker that gets all values, on scikit-learn's digits.

The loop of Accelerate's documentation, with three lines for the monitor. One group of batches is spoiled and skipped; a line
asks the monitor before the scheduler steps. ``pip install accelerate scikit-learn``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_gradmon as gradmon
from torch_gradmon.integrations.accelerate import GradmonTracker

EPOCHS, SPOILED = 6, 150


class Table(GeneralTracker):
    """In place of W&B, TensorBoard or another tracker: keeps its rows."""

    name, requires_logging_directory, tracker = "table", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, values: dict[str, float], step: int = 0, **_: Any) -> None:
        """Take values of a step, from the loop or from the monitor."""
        self.rows.setdefault(step, {}).update(values)


def digits() -> DataLoader[Any]:
    """Batches of 16 digits, the same every time."""
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(found.target))
    return DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(0))


def main() -> None:
    """Train, and print the rows of the tracker."""
    warnings.simplefilter("ignore", gradmon.GradmonWarning)  # without the warning about the spike
    monitor = gradmon.ModuleMonitor(on_spike="skip", preset="standard")  # 1: a monitor and its metrics
    table = Table()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, log_with=[GradmonTracker(monitor), table])  # 2
    accelerator.init_trackers("digits")

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = digits()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS * len(loader) // 4)
    model, optimizer, loader, scheduler = accelerator.prepare(net, adam, loader, cosine)
    monitor.set_module(model)  # 3: the model, the optimizer, and the outputs
    monitor.attach(optimizer)
    monitor.add_sink(accelerator)

    batch = right = 0
    for epoch in range(EPOCHS):
        right = 0
        for images, labels in loader:
            with accelerator.accumulate(model):
                outputs = model(images * (1e3 if batch == SPOILED else 1))
                loss = nn.functional.cross_entropy(outputs, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if not monitor.step_was_skipped:  # Accelerate only checks for an overflow, and a skip is none
                    scheduler.step()
                optimizer.zero_grad()
            batch += 1
            right += int((outputs.argmax(1) == labels).sum())
            if accelerator.sync_gradients:
                accelerator.log({"loss": loss.item(), "epoch": epoch}, step=monitor.current_step)
    accelerator.end_training()

    print(f"{'step':>5}{'loss':>9}{'grad_norm':>11}{'clipped':>9}{'skipped so far':>16}")
    for step in (0, 20, 36, 37, 38, 60, 100, max(table.rows)):
        row = table.rows[step]
        told = (row["gradmon/grad_norm"], row["gradmon/grad_norm_after_clip"], row.get("gradmon/steps_skipped", 0))
        print(f"{step:>5}{row['loss']:>9.3f}{told[0]:>11.3g}{told[1]:>9.3g}{told[2]:>16.0f}")
    print(f"{right / 1797:.1%} right in the last epoch; {monitor.get_step_counts()}")
    print(monitor.why())


if __name__ == "__main__":
    main()
