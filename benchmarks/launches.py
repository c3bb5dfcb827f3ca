"""Count what the monitor adds to a training step on an accelerator: ``python -m benchmarks.launches``.

The accelerator is the simulated one, so nothing here is a time. Writes the table of the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import testing

from .report import write_section

#: Linear layers of one shape, with two parameters each; 722 parameters are as many as those of ResNet-like models.
LAYERS = (2, 32, 361)
#: Title, preset, and more arguments of ``watch``.
SETTINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("minimal", "minimal", {}),
    ("standard", "standard", {}),
    ('standard, `on_spike="skip"`', "standard", {"on_spike": "skip"}),
    ("full", "full", {}),
)
#: Of the counted steps: one without updates, one with.
MOST, WITH_UPDATES = 7, 10

Counts = dict[str, int]


class Loop:
    """A training loop on the simulated device, watched or not."""

    def __init__(self, model: nn.Module, preset: str | None = None, **options: Any) -> None:
        self.model = model.to(testing.simulated_device().torch_device)
        # foreach looks at exact types, and a tensor of this device has a type of its own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.monitor = None if preset is None else gradmon.watch(self.model, self.optimizer, preset=preset, **options)
        self.inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(testing.simulated_device().torch_device)

    def step(self, factor: float = 1.0) -> None:
        """One step."""
        loss = self.model(self.inputs).square().mean() * factor
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self.optimizer.step()


def layers(count: int) -> nn.Module:
    """``count`` linear layers of one shape."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])


def launches_without(count: int) -> int:
    """Launches of a step without a monitor, once the optimizer has its state."""
    bare = Loop(layers(count))
    bare.step()
    with testing.simulated_device().counted() as work:
        bare.step()
    return work.launches


def added(count: int, without: int, preset: str, **options: Any) -> dict[int, Counts]:
    """What the monitor adds to ``without`` launches, by step from the second on."""
    watched = Loop(layers(count), preset, **options)
    watched.step()
    found = {}
    for number in range(1, WITH_UPDATES + 1):
        with testing.simulated_device().counted() as work:
            watched.step()
        found[number] = {
            "launches": work.launches - without,
            "reads": sum(work.reads.values()),
            "copies": len(work.copies_to_host),
            "blocking": sum(waits for _, waits in work.copies_to_host) + len(work.copies_to_device),
        }
    assert watched.monitor is not None
    watched.monitor.detach()
    return found


def count() -> dict[str, dict[int, dict[int, Counts]]]:
    """The counts of all settings, by title and number of parameters."""
    without = {number: launches_without(number) for number in LAYERS}
    return {
        title: {2 * number: added(number, without[number], preset, **options) for number in LAYERS}
        for title, preset, options in SETTINGS
    }


def cell(by_step: Mapping[int, Counts]) -> str:
    """Launches of a step without updates, and of one with them."""
    return f"{by_step[MOST]['launches']:,} ({by_step[WITH_UPDATES]['launches']:,})"


def markdown(counts: Mapping[str, Mapping[int, Mapping[int, Counts]]]) -> str:
    """The table of the documentation."""
    sizes = [2 * number for number in LAYERS]
    head = [*(f"{size} parameters" for size in sizes), "host reads", "copies to the host", "of them blocking"]
    lines = [f"| launches added to a step | {' | '.join(head)} |", f"| --- |{' ---: |' * len(head)}"]
    for title, by_size in counts.items():
        cells = [cell(by_size[size]) for size in sizes]
        last = by_size[sizes[-1]][MOST]
        lines.append(f"| {title} | {' | '.join(cells)} | {last['reads']} | {last['copies']} | {last['blocking']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    table = markdown(count())
    print(table)
    write_section("launches", table)
