"""What exponents a layer should have: none at all (0), what theory says of the standard parametrisation, or what somebody asks for.

The theory is that of a network in the limit of infinite width, with He or LeCun initialisation (entries of W of size
fan_in^-1/2) and a learning rate proportional to width^c. Where it comes from: Yang & Hu 2021 (arXiv 2011.14522), whose counts
of powers of the width these are; Yang et al. 2022 (arXiv 2203.03466), appendix J, for Adam; Haas et al. 2025 (arXiv 2505.22491) for
what happens with c above -1. Written out, with n for the width:

- A gradient with respect to a hidden activation has entries of size n^-1/2, the size of the output weights that it comes through.
- SGD moves a weight matrix by learning rate * gradient * x^T, and (g x^T) x_t = g * (x . x_t), where x . x_t is about the fan-in:
  n^(c - 1/2) in a layer whose inputs are data, n^(c + 1/2) in a hidden layer, n^(c + 1) in the output, whose gradient is of size 1.
- Adam moves every entry by about its learning rate, in step with the signs of x: n^c in the input layer, n^(c + 1) in the others.
- What changes in a hidden layer passes through W_0 of the next hidden one at its size. W_0 of the output is what the change was made
  from: their product adds up, n entries of n^-1/2 each, and gains n^1/2.

These are the exponents of the first step. Where one is above 0, later steps can go another way; where it is the output's alone and
the loss is a cross-entropy, hidden layers stay as they are ("controlled divergence").

In muP (arXiv 2203.03466, table 8) all of them are 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ...core.errors import display, nearest

Kind = Literal["input", "hidden", "output", "vector", "fixed"]
Family = Literal["sgd", "adam"]
#: What one may ask for by a word.
WORDS = ("stable", "standard")

#: By optimizer and kind of layer: the exponent of the update term with a learning rate that does not depend on the width.
_STANDARD: dict[Family, dict[Kind, float]] = {
    "sgd": {"input": -0.5, "vector": -0.5, "hidden": 0.5, "output": 1.0},
    "adam": {"input": 0.0, "vector": 0.0, "hidden": 1.0, "output": 1.0},
}


@dataclass(frozen=True)
class Expected:
    """The exponents of a module's two terms; None where nothing is expected, and nothing judged."""

    update: float | None = 0.0
    propagated: float | None = 0.0


@dataclass(frozen=True)
class Layer:
    """What is known of a module with parameters of its own before it is trained.

    Attributes:
        kind: which dimensions of its weight grow with the width: ``input`` (only the outputs do), ``output`` (only the inputs do),
            ``hidden`` (both), ``vector`` (all its parameters have one dimension), ``fixed`` (none grows).
        lr_exponent: the exponent of its learning rate over the width; None where no optimizer has it.
    """

    kind: Kind
    lr_exponent: float | None


def kind_of(module: nn.Module, narrow: Mapping[str, tuple[int, ...]], wide: Mapping[str, tuple[int, ...]]) -> Kind:
    """The kind of a layer, from the shapes of its own parameters at two widths."""
    grown = {name: tuple(a != b for a, b in zip(narrow[name], wide[name], strict=True)) for name in narrow}
    if not any(any(dimensions) for dimensions in grown.values()):
        return "fixed"
    matrices = [dimensions for dimensions in grown.values() if len(dimensions) > 1 and any(dimensions)]
    if not matrices:
        return "vector"
    if any(sum(dimensions) > 1 for dimensions in matrices):
        return "hidden"
    return "output" if matrices[0].index(True) == _place_of_inputs(module) else "input"


def _place_of_inputs(module: nn.Module) -> int:
    """Which dimension of the weight counts inputs: the second, but where torch or transformers has it transposed."""
    flipped = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.startswith(("ConvTranspose", "Conv1D"))
    return 0 if flipped else 1


def standard(layers: Mapping[str, Layer], family: Family) -> dict[str, Expected]:
    """What theory says of the standard parametrisation, for layers in the order in which they run.

    The propagated term is foretold only in plain chains of linear layers, where what changes in one layer is what the next one
    gets: normalisation, attention and residual branches bound or mix it, and there it is not judged.
    """
    chain = all(layer.kind in ("input", "hidden", "output") for layer in layers.values())
    reached: float | None = None
    found = {}
    for name, layer in layers.items():
        if layer.kind == "fixed" or layer.lr_exponent is None:
            found[name] = Expected(None, None)
            continue
        update = _STANDARD[family][layer.kind] + layer.lr_exponent
        propagated = reached if chain else None
        if propagated is not None and layer.kind == "output":
            propagated += 0.5
        found[name] = Expected(update, propagated)
        reached = max(update, reached if reached is not None else update)
    return found


def asked_for(asked: Mapping[str, Any], names: Mapping[str, Layer]) -> dict[str, Expected]:
    """What a user expects by patterns: the first pattern that matches a module's name decides; what none matches should be stable.

    Args:
        asked: by regex, for ``re.search``, one exponent for both terms, or a pair of them; None for what is not to be judged.
        names: the modules.

    Raises:
        ValueError: a pattern that does not compile or matches nothing.
        TypeError: a pattern that is no string, or a value that is neither a finite number, None, nor a pair of these.
    """
    values = {pattern: _pair(pattern, value) for pattern, value in asked.items()}
    try:
        patterns = {pattern: re.compile(pattern) for pattern in asked}
    except re.error as error:
        raise ValueError(f"expected={asked!r} has a pattern that is no regex: {error}") from error
    for pattern, compiled in patterns.items():
        if not any(compiled.search(name) for name in names):
            raise ValueError(f"expected={pattern!r} matches none of the modules that have parameters{nearest(pattern, names)}")
    return {name: next((values[p] for p, compiled in patterns.items() if compiled.search(name)), Expected()) for name in names}


def _pair(pattern: str, value: Any) -> Expected:
    if not isinstance(pattern, str):
        raise TypeError(
            f"expected={{{pattern!r}: ...}} must have patterns of module names, such as 'head', got {display(pattern)}"
        )
    terms = value if isinstance(value, tuple) else (value, value)
    if len(terms) != 2 or not all(
        term is None or (isinstance(term, (int, float)) and not isinstance(term, bool) and math.isfinite(term)) for term in terms
    ):
        raise TypeError(
            f"expected[{pattern!r}] must be an exponent, such as 0.5, a pair (update, propagated) of them, or None for what is not to be "
            f"judged, got {display(value)}"
        )
    return Expected(*terms)
