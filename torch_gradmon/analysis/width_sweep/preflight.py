"""A trial of a sweep's models before it starts, in seconds; errors name the width and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import display
from .expected import KEYWORDS, Expected, Family, Layer, kind_of, standard, user_expectations
from .recipe import Recipe, failing_at, placed
from .terms import LayerTerms, TermProbe, own_parameters


@dataclass(frozen=True)
class Preflight:
    """What is known before the sweep starts.

    Attributes:
        layers: in execution order.
        optimizer: that of the smallest width.
        unmeasured: names of trained parameters that are in no layer.
    """

    layers: dict[str, Layer]
    optimizer: Any
    unmeasured: list[str]


def run_preflight(recipe: Recipe, widths: Sequence[int], seed: int, dtype: torch.dtype) -> Preflight:
    """Build the model at every width, run it once and compare.

    At the smallest width one whole step is made and measured.

    Raises:
        ValueError, TypeError: a width cannot be built or run, or its model differs; with the remedy.
    """
    batch = recipe.batches(seed, 1)[0]
    first: tuple[nn.Module, Any, dict[str, LayerTerms]] | None = None
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    rates: dict[int, dict[str, float]] = {}
    for width in widths:
        model, given = recipe.model(width, seed)
        shapes[width] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
        _same_names(shapes, widths[0], width)
        with failing_at(
            width, "the optimizer cannot be made", "the function given as optimizer is called with the model and the width"
        ):
            optimizer = recipe.optimizer_of(model, width, given)
        rates[width] = _rates(model, optimizer, width)
        if first is None:
            first = model, optimizer, _try_step(recipe, model, optimizer, batch, width, dtype)
        else:
            with failing_at(width, "the model does not run on the batch", "the batch must fit all widths"):
                _checked_loss(recipe.loss(model, placed(batch, model)), width)
    assert first is not None, "there are widths"
    _growing(shapes, widths)
    layers = _layers(first[0], first[2], shapes, rates, widths)
    return Preflight(layers, first[1], _unmeasured(first[0], layers, rates[widths[0]]))


def _unmeasured(model: nn.Module, layers: dict[str, Layer], rates: dict[str, float]) -> list[str]:
    """Trained parameters in no layer: a module without them uses them, or their module returns no tensor."""
    inside = {id(parameter) for name in layers for parameter in model.get_submodule(name).parameters()}
    return [name for name, parameter in model.named_parameters() if name in rates and id(parameter) not in inside]


def expectations(named: Any, layers: dict[str, Layer], optimizer: Any) -> dict[str, Expected]:
    """The expected exponents of the layers, from a keyword or from patterns.

    Raises:
        ValueError: the theory of the optimizer is unknown here, or a pattern is wrong.
        TypeError: ``named`` is neither a keyword nor a dict.
    """
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
    with failing_at(width, "the model cannot be copied", "fix the factory"):
        probe = TermProbe(model, dtype)
    here = placed(batch, model)
    with failing_at(width, "the model does not run on the batch", "fix the factory, or give data= and loss= that fit it"):
        loss = _checked_loss(recipe.loss(model, here), width)
    with failing_at(width, "a step cannot be made", "the optimizer must step without a closure"):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    measured = placed(batch, model, dtype)
    with failing_at(
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
