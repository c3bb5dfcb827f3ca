"""The width sweep: train a model at several widths for a few steps, and see how each layer's terms depend on the width."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import display, nearest
from ...core.formatting import ProgressBar
from ...core.torch_modes import all_in_use, untouched_generators
from .recipe import OPTIMIZERS, LayerTerms, Recipe, TermProbe, failing_at_width, own_parameters, placed, run_all, usual_loss
from .result import WidthSweep
from .verdicts import KEYWORDS, Expected, Family, Layer, kind_of, standard, user_expectations

# --- A trial of the models; errors name the width and the remedy ---


def run_preflight(
    recipe: Recipe, widths: Sequence[int], seed: int, dtype: torch.dtype
) -> tuple[dict[str, Layer], Any, list[str]]:
    """Build the model at every width, run it once and compare; at the smallest width one whole step is made and measured.

    Returns the layers in execution order, the optimizer of the smallest width, and the names of trained parameters that are in no layer.

    Raises ValueError or TypeError where a width cannot be built or run, or its model differs; with the remedy.
    """
    batch = recipe.batches(seed, 1)[0]
    first: tuple[nn.Module, Any, dict[str, LayerTerms]] | None = None
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    rates: dict[int, dict[str, float]] = {}
    for width in widths:
        model, given = recipe.model(width, seed)
        shapes[width] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
        _same_names(shapes, widths[0], width)
        with failing_at_width(
            width, "the optimizer cannot be made", "the function given as optimizer is called with the model and the width"
        ):
            optimizer = recipe.optimizer_of(model, width, given)
        rates[width] = _rates(model, optimizer, width)
        if first is None:
            first = model, optimizer, _try_step(recipe, model, optimizer, batch, width, dtype)
        else:
            with failing_at_width(width, "the model does not run on the batch", "the batch must fit all widths"):
                _checked_loss(recipe.loss(model, placed(batch, model)), width)
    assert first is not None, "there are widths"
    _growing(shapes, widths)
    layers = _layers(first[0], first[2], shapes, rates, widths)
    return layers, first[1], _unmeasured(first[0], layers, rates[widths[0]])


def _unmeasured(model: nn.Module, layers: dict[str, Layer], rates: dict[str, float]) -> list[str]:
    """Trained parameters in no layer: a module without them uses them, or their module returns no tensor."""
    inside = {id(parameter) for name in layers for parameter in model.get_submodule(name).parameters()}
    return [name for name, parameter in model.named_parameters() if name in rates and id(parameter) not in inside]


def expectations(named: Any, layers: dict[str, Layer], optimizer: Any) -> dict[str, Expected]:
    if named is None or named == "stable":
        return {name: Expected() for name in layers}
    if named == "standard":
        return standard(layers, _family(optimizer))
    if not isinstance(named, dict):
        raise TypeError(
            f"expected must be one of {', '.join(KEYWORDS)}, or a dict of patterns and exponents, got {display(named)}"
        )
    return user_expectations(named, layers)


def _family(optimizer: Any) -> Family:
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)):
        return "adam"
    raise ValueError(
        f'expected="standard" is known for SGD and Adam, not for {type(optimizer).__name__}; give the exponents as a dict of patterns'
    )


def _same_names(shapes: dict[int, dict[str, tuple[int, ...]]], one: int, other: int) -> None:
    strange = sorted(shapes[one].keys() ^ shapes[other].keys())
    if strange:
        where = one if strange[0] in shapes[one] else other
        raise ValueError(
            f"the models of widths {one} and {other} are not the same: {strange[0]} is only in that of width {where}; "
            "the factory must change sizes, not layers"
        )
    bent = [name for name, shape in shapes[one].items() if len(shape) != len(shapes[other][name])]
    if bent:
        raise ValueError(f"{bent[0]} has {shapes[one][bent[0]]} at width {one}, but {shapes[other][bent[0]]} at width {other}")


def _growing(shapes: dict[int, dict[str, tuple[int, ...]]], widths: Sequence[int]) -> None:
    for narrow, wide in pairwise(sorted(widths)):
        pairs = [(name, a, b) for name, shape in shapes[narrow].items() for a, b in zip(shape, shapes[wide][name], strict=True)]
        if all(a == b for _, a, b in pairs):
            raise ValueError(
                f"the models of widths {narrow} and {wide} have the same sizes: the factory does not use the width, or rounds both to one"
            )
        shrunk = next(((name, a, b) for name, a, b in pairs if b < a), None)
        if shrunk:
            raise ValueError(
                f"{shrunk[0]} has a side of {shrunk[1]} at width {narrow}, but of {shrunk[2]} at width {wide}; sizes must grow with it"
            )


def _rates(model: nn.Module, optimizer: Any, width: int) -> dict[str, float]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not callable(getattr(optimizer, "step", None)) or not callable(getattr(optimizer, "zero_grad", None)):
        raise TypeError(f"the optimizer of width {width} must be one like those of torch.optim, got {display(optimizer)}")
    by_id = {id(parameter): float(group.get("lr", math.nan)) for group in groups for parameter in group["params"]}
    found = {
        name: by_id[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in by_id and parameter.requires_grad
    }
    if not found:
        raise ValueError(
            f"the optimizer of width {width} holds no parameter of its model that is trained; make both in the same call of the factory"
        )
    return found


def _try_step(
    recipe: Recipe, model: nn.Module, optimizer: Any, batch: Any, width: int, dtype: torch.dtype
) -> dict[str, LayerTerms]:
    with failing_at_width(width, "the model cannot be copied", "fix the factory"):
        probe = TermProbe(model, dtype)
    here = placed(batch, model)
    with failing_at_width(width, "the model does not run on the batch", "fix the factory, or give data= and loss= that fit it"):
        loss = _checked_loss(recipe.loss(model, here), width)
    with failing_at_width(width, "a step cannot be made", "the optimizer must step without a closure"):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    measured = placed(batch, model, dtype)
    with failing_at_width(
        width,
        f"a copy of the model in {dtype} does not run",
        "if it requires another dtype, give probe_dtype=torch.float32, at the cost of accuracy",
    ):
        return probe.measure(model, lambda copy: recipe.loss(copy, measured))


def _checked_loss(loss: Any, width: int) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else display(loss)
        raise TypeError(f"the loss at width {width} must be one number with a gradient, got {what}")
    if not math.isfinite(loss.item()):
        raise ValueError(
            f"the loss at width {width} is {loss.item()} before the first step; initialise the model so that it is finite"
        )
    return loss


def _layers(
    model: nn.Module,
    terms: dict[str, LayerTerms],
    shapes: dict[int, dict[str, tuple[int, ...]]],
    rates: dict[int, dict[str, float]],
    widths: Sequence[int],
) -> dict[str, Layer]:
    narrow, wide = min(widths), max(widths)
    found = {}
    for name, term in terms.items():
        if term.update is None:
            continue
        module = model.get_submodule(name)
        own = [f"{name}.{part}" if name else part for part in own_parameters(module)]
        kind = kind_of(module, *({path: shapes[width][path] for path in own} for width in (narrow, wide)))
        rated = [path for path in own if rates[narrow].get(path, 0) > 0 and rates[wide].get(path, 0) > 0]
        exponent = math.log(rates[wide][rated[0]] / rates[narrow][rated[0]], wide / narrow) if rated else None
        found[name] = Layer(kind, exponent)
    if not found:
        raise ValueError("no module has its own parameters and returns a tensor, so there is nothing to measure")
    return found


# --- Checks of a sweep's arguments, before anything is built ---

#: A line through fewer widths has hardly any scatter.
FEWEST = 3


def whole_numbers(name: str, values: Any) -> list[Any]:
    """The items of ``values``, with the integers of other packages as int."""
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{name}={values!r} must be a list of whole numbers, got {display(values)}") from None
    return [_as_int(item) for item in items]


def _as_int(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def check_arguments(widths: Sequence[int], seeds: Sequence[int], steps: int, tolerance: float, confidence: float) -> None:
    for name, values, least in (("widths", widths, 1), ("seeds", seeds, 0)):
        if not all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values):
            raise ValueError(f"{name}={list(values)!r} must be whole numbers of at least {least}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)!r} names one twice")
    if len(widths) < FEWEST:
        raise ValueError(
            f"widths={list(widths)!r}: an exponent with an interval needs {FEWEST} widths or more, such as 64, 128, 256"
        )
    if not seeds:
        raise ValueError("seeds=[] runs nothing; give at least one")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a positive int")
    _check_real(tolerance=tolerance, confidence=confidence)
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"tolerance={tolerance!r} must be a positive number; theoretical exponents are halves, which 0.25 distinguishes"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be a share between 0 and 1, such as 0.95")


def _check_real(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {display(value)}")


def check_recipe(recipe: Recipe, named: Any, dtype: Any) -> None:
    for name, value in (("factory", recipe.factory), ("loss", recipe.loss)):
        if not callable(value) or isinstance(value, nn.Module):
            raise TypeError(f"{name} must be a function{' of the width' if name == 'factory' else ''}, got {display(value)}")
    if isinstance(recipe.optimizer, str):
        if recipe.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={recipe.optimizer!r} is not known{nearest(recipe.optimizer, OPTIMIZERS)}; or give a function"
            )
        _check_real(lr=recipe.lr, lr_exponent=recipe.lr_exponent)
        if not 0 < recipe.lr < math.inf or not math.isfinite(recipe.lr_exponent):
            raise ValueError(f"lr={recipe.lr!r} must be positive, and lr_exponent={recipe.lr_exponent!r} a number")
    elif not callable(recipe.optimizer):
        raise TypeError(f"optimizer must be a name or a function of the model and the width, got {display(recipe.optimizer)}")
    if isinstance(named, str) and named not in KEYWORDS:
        raise ValueError(f"expected={named!r} is not known{nearest(named, KEYWORDS)}; or give a dict of patterns and exponents")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"probe_dtype must be torch.float64 or another floating-point dtype, got {display(dtype)}")


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
    with torch.random.fork_rng(devices=[]), untouched_generators(all_in_use()):
        layers, trained_by, unmeasured = run_preflight(recipe, sizes, numbers[0], probe_dtype)
        aims = expectations(expected, layers, trained_by)
        with ProgressBar(len(sizes) * len(numbers), "width sweep", "run", progress) as bar:
            runs = list(run_all(recipe, sizes, numbers, steps, probe_dtype, bar.advance))
    kept = {name: _for_json(given[name]) for name in ("optimizer", "lr", "lr_exponent", "expected")}
    settings = {"widths": sizes, "seeds": numbers, "steps": steps, **kept, "probe_dtype": str(probe_dtype).removeprefix("torch.")}
    return WidthSweep(runs, layers, aims, tolerance, confidence, settings, unmeasured)


def _for_json(value: Any) -> Any:
    """A setting for JSON; a function becomes its name."""
    if isinstance(value, Mapping):
        return {pattern: list(item) if isinstance(item, tuple) else item for pattern, item in value.items()}
    if isinstance(value, Real):
        return float(value)  # JSON cannot hold a number of NumPy
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value
