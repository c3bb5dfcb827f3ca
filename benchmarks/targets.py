"""Targets of the figures, and their distance from them. No test depends on timing: this only prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One target, with a stretch target; for one thread of a CPU.

    Attributes:
        set: of gradients.
        ours: the contender of the figure.
        than: None for a ratio to the floor, which should be small; else the contender that should take that multiple of the time.
        aim, stretch: the figures.
    """

    set: str
    ours: str
    than: str | None
    aim: float
    stretch: float


TARGETS = (
    Target("gpt2_124m", "eager", None, 4.8, 4.0),
    Target("gpt2_124m", "eager_but_near_zero", None, 3.2, 2.7),
    Target("gpt2_124m", "fused", None, 2.3, 1.8),
    Target("gpt2_124m", "eager", "torch_module_monitor", 3.5, 4.5),
    Target("gpt2_124m", "fused", "torch_module_monitor", 8, 10),
    Target("gpt2_124m", "eager", "wandb_watch", 8, 14),
    Target("gpt2_124m", "fused", "wandb_watch", 16, 30),
    Target("small_16_shapes", "eager", "torch_module_monitor", 14, 22),
    Target("small_distinct", "eager", "torch_module_monitor", 8, 12),
)
#: The monitor's own time in percent of a training step.
STEP_AIM, STEP_STRETCH = 2.0, 1.2


def verdict(value: float, aim: float, stretch: float, small_is_good: bool) -> str:
    """The value beside both figures, with the distance to each in percent of it."""
    sign = "<=" if small_is_good else ">="
    return f"{value:.2f} ({sign} {aim:g}: {_distance(value, aim, small_is_good)}; {stretch:g}: {_distance(value, stretch, small_is_good)})"


def _distance(value: float, figure: float, small_is_good: bool) -> str:
    percent = 100 * (figure - value) / figure * (1 if small_is_good else -1)
    return f"{'met' if percent >= 0 else 'missed'} by {abs(percent):.0f} %"


def judge(result: Mapping[str, Any]) -> Iterator[str]:
    """A line for each target with a figure in this result."""
    sections = {s["set"]: s for s in result["gradients"] if s["device"] == "cpu" and s["threads"] == 1}
    for target in TARGETS:
        section = sections.get(target.set)
        if section is None or target.ours not in section["contenders"]:
            continue
        where = f"{section['title']}, {target.ours}"
        if target.than is None:
            value = section["contenders"][target.ours]["ratio"]["median"]
            yield f"{where}, x floor: {verdict(value, target.aim, target.stretch, small_is_good=True)}"
            continue
        for entry in section["times_faster"]:
            if (entry["ours"], entry["than"]) == (target.ours, target.than):
                told = verdict(entry["median"], target.aim, target.stretch, small_is_good=False)
                yield f"{where}, times as fast as {target.than}: {told}"
    for step in result["training"]:
        if step["device"] == "cpu" and step["threads"] == 1:
            told = verdict(step["own_pct"]["median"], STEP_AIM, STEP_STRETCH, small_is_good=True)
            yield f"{step['title']}, whole step, own time in %: {told}"
