"""The width sweep: train a model at several widths for a few steps, and see how each layer's terms depend on the width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ...core import torch_modes as accelerator
from ...core.formatting import ProgressBar
from .arguments import check_arguments, check_recipe, whole_numbers
from .preflight import expectations, run_preflight
from .recipe import Recipe, usual_loss
from .result import WidthSweep
from .training import run_all


def width_sweep(
    factory: Callable[[int], Any],
    data: Any,
    *,
    widths: Sequence[int] = (64, 128, 256, 512, 1024),
    seeds: int | Sequence[int] = 5,
    steps: int = 3,
    optimizer: str | Callable[[nn.Module, int], Any] = "adamw",
    lr: float = 1e-3,
    lr_exponent: float = 0.0,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    expected: str | Mapping[str, Any] | None = None,
    tolerance: float = 0.25,
    confidence: float = 0.95,
    probe_dtype: torch.dtype = torch.float64,
    progress: bool | None = None,
) -> WidthSweep:
    """Fit, for each layer, the exponents over the width of the two terms of the refined coordinate check.

    After t steps a layer's output has changed by its own update, (W_t - W_0) x_t, and by changes from below, W_0 (x_t - x_0) (Haas et al.
    2025, arXiv 2505.22491). If the learning rate and the initialisation suit all widths, the root mean squares of both are independent of
    the width. The mean of ``|output|`` of every module is recorded too, as in the coordinate check of microsoft/mup.

    Wrong arguments are found before the sweep starts, on the first batch of the first seed. The global random generators of torch are left
    as they were. Every measurement synchronises the device.

    Modules with their own parameters that return a tensor are measured. Parameters used outside of such a module are listed in
    :attr:`WidthSweep.unmeasured`; the verdict names them, but does not depend on them.

    Args:
        factory: called with a width, returns a new model, or a pair (model, optimizer).
        data: a batch, a list of batches (or another re-iterable, such as a DataLoader), or a function of the seed that returns either;
            fewer batches than steps are repeated. A batch is a pair (inputs, targets), or an argument of ``loss``. All widths get the same.
            The terms are measured on the first batch.
        widths: three or more.
        seeds: how many, from 0, or which.
        steps: of training in each run; the verdict is on the state after the last.
        optimizer: "sgd", "adam" or "adamw", or a function of the model and the width. Unused if the factory returns one.
        lr: learning rate of a named optimizer at the smallest width.
        lr_exponent: a named optimizer has ``lr * (width / smallest width) ** lr_exponent``.
        loss: a function of the model and a batch that returns a scalar; by default cross-entropy for integer targets, squared error for
            others, or the loss that the model returns.
        expected: "stable" (the default: all exponents about 0, as in muP); "standard": the theory of the standard parametrisation after one
            step; or a dict from patterns of module names to an exponent, a pair (update, propagated), or None for terms that are not
            judged.
        tolerance: how far from the expected exponent a whole confidence interval may reach. Theoretical exponents are halves.
        confidence: of the interval.
        probe_dtype: of the copies on which the terms are measured. In float32, terms below about 1e-6 of the output are noise.
        progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

    Raises:
        ValueError, TypeError: a wrong argument, model, optimizer, batch or loss; with the width and the remedy.
    """
    given = {**locals()}
    numbers = whole_numbers("seeds", range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds)
    sizes = whole_numbers("widths", widths)
    if all(isinstance(width, int) for width in sizes):
        sizes.sort()
    check_arguments(sizes, numbers, steps, tolerance, confidence)
    recipe = Recipe(factory, data, optimizer, lr, lr_exponent, sizes[0], loss if loss is not None else usual_loss)
    check_recipe(recipe, expected, probe_dtype)
    with torch.random.fork_rng(devices=[]), accelerator.untouched_generators(accelerator.all_in_use()):
        found = run_preflight(recipe, sizes, numbers[0], probe_dtype)
        aims = expectations(expected, found.layers, found.optimizer)
        with ProgressBar(len(sizes) * len(numbers), "width sweep", "run", progress) as bar:
            runs = list(run_all(recipe, sizes, numbers, steps, probe_dtype, bar.advance))
    kept = {name: _for_json(given[name]) for name in ("optimizer", "lr", "lr_exponent", "expected")}
    settings = {"widths": sizes, "seeds": numbers, "steps": steps, **kept, "probe_dtype": str(probe_dtype).removeprefix("torch.")}
    return WidthSweep(runs, found.layers, aims, tolerance, confidence, settings, found.unmeasured)


def _for_json(value: Any) -> Any:
    """A setting for JSON; a function becomes its name."""
    if isinstance(value, Mapping):
        return {pattern: list(item) if isinstance(item, tuple) else item for pattern, item in value.items()}
    if isinstance(value, Real):
        return float(value)  # JSON cannot hold a number of NumPy
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value
