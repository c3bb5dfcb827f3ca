"""Three accidents in a training, and the monitor's report on each.

A small GPT learns the help texts that come with Python. One batch has shuffled labels, one step is taken with a huge learning
rate, and in one step the loss overflows. ``python examples/spikes.py picture.svg`` draws it, which needs matplotlib.
"""

from __future__ import annotations

import math
import sys
import warnings

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.cli.demo_model import CharacterGPT, Sizes, corpus, draw

STEPS = 180
SHUFFLED, HUGE_RATE, OVERFLOW = 80, 120, 170
RATE, SIZES = 2e-3, Sizes(blocks=2, width=64, heads=2, context=32)


def train(model: nn.Module, monitor: gradmon.ModuleMonitor, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    """The training, with the accidents in it."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        characters, following = draw(data, SIZES, generator)
        if step == SHUFFLED:
            following = torch.randint(int(data.max()) + 1, following.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (300 if step == HUGE_RATE else 1)
        loss = model(characters, following) * (math.inf if step == OVERFLOW else 1)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.item())
        optimizer.step()


def draw_picture(steps: dict[int, dict[str, float]], file: str) -> None:
    """Loss, gradient norm and score over the steps, with the accidents marked."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for axis, key in zip(axes, ("loss", "gradmon/grad_norm", "gradmon/spike_score"), strict=True):
        known = {step: values[key] for step, values in steps.items() if math.isfinite(values.get(key, math.nan))}
        axis.plot(known.keys(), known.values(), linewidth=1)
        axis.set_ylabel(key.removeprefix("gradmon/"))
        for accident in (SHUFFLED, HUGE_RATE, OVERFLOW):
            axis.axvline(accident, color="tab:red", linewidth=0.8, linestyle=":")
    axes[1].set_yscale("log")
    axes[2].axhline(5.5, color="tab:gray", linewidth=0.8)
    for step, name in ((SHUFFLED, "shuffled labels"), (HUGE_RATE, "huge learning rate"), (OVERFLOW, "overflow")):
        axes[0].annotate(
            name, (step, axes[0].get_ylim()[1]), xytext=(2, 2), textcoords="offset points", fontsize=8, annotation_clip=False
        )
    axes[2].set_xlabel("step")
    figure.savefig(file)


def main() -> None:
    """Train, and print the reports."""
    torch.manual_seed(0)
    _, data, characters = corpus()
    model = CharacterGPT(characters, SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    monitor = gradmon.watch(model, optimizer, on_spike="warn")
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", gradmon.GradmonWarning)
        train(model, monitor, optimizer, data)
        monitor.detach()
    print("Warnings during training:")
    for warning in said:
        print(" -", warning.message)
    for step in (SHUFFLED, HUGE_RATE + 1, OVERFLOW):
        print(f"\nprint(monitor.why({step}))\n\n{monitor.why(step)}")
    if len(sys.argv) > 1:
        draw_picture(monitor.get_all_metrics(), sys.argv[1])


if __name__ == "__main__":
    main()
