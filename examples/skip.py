"""Does it help to skip a step with a spike? The accidents of ``spikes.py``, each treated in several ways, over five seeds.

It prints the final loss on held-out text, minus that of the same run without an accident: the mean over the
seeds, and the range. ``python examples/skip.py --seeds 1 --accidents overflow`` is quick.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.cli.demo_model import CharacterGPT, Sizes, corpus, draw

STEPS, RATE, SIZES = 180, 2e-3, Sizes(blocks=2, width=64, heads=2, context=32)
ACCIDENTS = {"shuffled labels": 80, "huge learning rate": 120, "overflow": 150}
TREATMENTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "clip at 1": lambda: None,
    "clip by zclip": lambda: None,
    "skip": gradmon.Skip,
    "skip, clip at 1": gradmon.Skip,
    "roll back": lambda: gradmon.Rollback(every=20, margin=5),
}


def train(seed: int, accidents: set[str], treatment: str, data: torch.Tensor, characters: int) -> tuple[float, int, int]:
    """The loss on held-out text after a training with these accidents, and how many steps were skipped and rolled back."""
    torch.manual_seed(seed)
    model: nn.Module = CharacterGPT(characters, SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    monitor = gradmon.watch(model, optimizer, on_spike=TREATMENTS[treatment]())
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    held_out, seen = data[-20_000:], data[:-20_000]
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        happens = {name for name in accidents if ACCIDENTS[name] == step}
        text, following = draw(seen, SIZES, generator)
        other = torch.randint(characters, following.shape, generator=generator)
        loss = model(text, other if "shuffled labels" in happens else following)
        loss = loss * (math.inf if "overflow" in happens else 1)
        optimizer.param_groups[0]["lr"] = RATE * (300 if "huge learning rate" in happens else 1)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss)  # before the optimizer steps, for the decision
        if "clip" in treatment:
            monitor.clip_grad_norm_("zclip" if "zclip" in treatment else 1.0)
        optimizer.step()
    counts = monitor.get_step_counts()
    monitor.detach()
    judge = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [model(*draw(held_out, SIZES, judge)).item() for _ in range(20)]
    return statistics.fmean(losses), counts.skipped, counts.rolled_back


def main() -> None:
    """Train with each accident and each treatment, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--accidents", nargs="+", choices=list(ACCIDENTS), default=list(ACCIDENTS))
    options = parser.parse_args()
    seeds = range(options.seeds)
    warnings.simplefilter("ignore", gradmon.GradmonWarning)  # without warnings about spikes
    _, data, characters = corpus()
    clips = ("nothing", "clip at 1", "clip by zclip")
    calm = {(seed, clip): train(seed, set(), clip, data, characters)[0] for seed in seeds for clip in clips}
    told = ", ".join(f"{statistics.fmean(calm[seed, clip] for seed in seeds):.3f} with {clip}" for clip in clips)
    print(f"without accidents: {told}, in nats per character\n")
    print(f"{'accident':<20}{'treatment':<17}{'loss above':>10}  {'from':>7} {'to':>7}  {'skipped':>7}  {'back':>4}")
    for accident in options.accidents:
        for treatment in TREATMENTS:
            runs = [train(seed, {accident}, treatment, data, characters) for seed in seeds]
            clip = next((clip for clip in clips if clip in treatment), "nothing")
            above = [loss - calm[seed, clip] for seed, (loss, *_) in zip(seeds, runs, strict=True)]
            skipped, back = (statistics.fmean(counts) for counts in list(zip(*runs, strict=True))[1:])
            told = f"{statistics.fmean(above):>10.3f}  {min(above):>7.3f} {max(above):>7.3f}"
            print(f"{accident:<20}{treatment:<17}{told}  {skipped:>7.1f}  {back:>4.1f}")


if __name__ == "__main__":
    main()
