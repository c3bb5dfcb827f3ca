"""One run of the sweep: a few steps of training, measured after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .recipe import Recipe, failing_at, placed
from .terms import LayerTerms, TermProbe


@dataclass(frozen=True)
class SweepRun:
    """The measurements at one width with one seed.

    Attributes:
        width: of the model.
        seed: of its initialisation and its data.
        losses: before each step.
        steps: by module, after each step.
    """

    width: int
    seed: int
    losses: list[float]
    steps: list[dict[str, LayerTerms]]


def train(recipe: Recipe, batches: Sequence[Any], width: int, seed: int, steps: int, dtype: torch.dtype) -> SweepRun:
    """Train a new model and measure it after every step, on the first batch.

    A loss that is not finite does not end the run; the measurements are then not finite either.

    Raises:
        ValueError: a step raised; with the width, the seed and the step.
    """
    model, given = recipe.model(width, seed)
    optimizer = recipe.optimizer_of(model, width, given)
    probe = TermProbe(model, dtype)
    measured = placed(batches[0], model, dtype)
    found = SweepRun(width, seed, [], [])
    for step in range(steps):
        with failing_at(width, f"step {step + 1} with seed {seed} failed", "earlier runs and steps were made"):
            optimizer.zero_grad()
            loss = recipe.loss(model, placed(batches[step % len(batches)], model))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.losses.append(loss.item())
            found.steps.append(probe.measure(model, lambda copy: recipe.loss(copy, measured)))
    return found


def run_all(
    recipe: Recipe, widths: Sequence[int], seeds: Sequence[int], steps: int, dtype: torch.dtype, advance: Callable[[], object]
) -> Iterator[SweepRun]:
    """All runs, seed by seed; ``advance`` is called after each."""
    for seed in seeds:
        batches = recipe.batches(seed, steps)
        for width in widths:
            yield train(recipe, batches, width, seed, steps, dtype)
            advance()
