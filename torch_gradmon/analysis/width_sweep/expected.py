"""The exponents that a layer should have: 0, those of theory for the standard parametrisation, or those that the user expects.

The theory is that of infinite width, with He or LeCun initialisation (entries of W of size fan_in^-1/2) and a learning rate
proportional to width^c. Sources: Yang & Hu 2021 (arXiv 2011.14522), who count the powers of the width; Yang et al. 2022 (arXiv
2203.03466), appendix J, for Adam; Haas et al. 2025 (arXiv 2505.22491) for c above -1. In detail, with n for the width:

- The gradient of a hidden activation has entries of size n^-1/2, the size of the output weights that it passes through.
- SGD moves a weight matrix by learning rate * gradient * x^T, and (g x^T) x_t = g * (x . x_t), where x . x_t is about the fan-in:
  n^(c - 1/2) in a layer whose inputs are data, n^(c + 1/2) in a hidden layer, n^(c + 1) in the output, whose gradient is of size
  1.
- Adam moves every entry by about its learning rate, aligned with the signs of x: n^c in the input layer, n^(c + 1) in the others.
- A change in a hidden layer passes through W_0 of the next hidden layer at its size. The change was made from W_0 of the output:
their
  product adds up, n entries of n^-1/2 each, and gains n^1/2.

These are the exponents of the first step. If one is above 0, later steps may differ. If only that of the output is, and the loss is a
cross-entropy, hidden layers stay as they are ("controlled divergence"). In muP (arXiv 2203.03466, table 8) all exponents are 0.
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
#: The expectations that have a name.
KEYWORDS = ("stable", "standard")

#: By optimizer and kind of layer: the exponent of the update term with a learning rate independent of the width.
_STANDARD: dict[Family, dict[Kind, float]] = {
    "sgd": {"input": -0.5, "vector": -0.5, "hidden": 0.5, "output": 1.0},
    "adam": {"input": 0.0, "vector": 0.0, "hidden": 1.0, "output": 1.0},
}


@dataclass(frozen=True)
class Expected:
    """The exponents of a module's two terms; None for a term that is not judged."""

    update: float | None = 0.0
    propagated: float | None = 0.0


@dataclass(frozen=True)
class Layer:
    """A module with its own parameters, before training.

    Attributes:
        kind: which dimensions of its weight grow with the width: ``input`` (only the outputs), ``output`` (only the inputs),
            ``hidden``
            (both), ``vector`` (all its parameters have one dimension), ``fixed`` (none grows).
        lr_exponent: exponent of its learning rate over the width; None if no optimizer has it.
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
    """The dimension of the weight that counts inputs: the second, unless torch or transformers transposes it."""
    flipped = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.startswith(("ConvTranspose", "Conv1D"))
    return 0 if flipped else 1


def standard(layers: Mapping[str, Layer], family: Family) -> dict[str, Expected]:
    """The theoretical exponents of the standard parametrisation, for layers in execution order.

    The propagated term is predicted only for plain chains of linear layers, where each layer's output is the next one's input.
    Normalisation, attention and residual branches bound or mix it; there it is not judged.
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


def user_expectations(asked: Mapping[str, Any], names: Mapping[str, Layer]) -> dict[str, Expected]:
    """The user's expectations: the first pattern that matches a module's name decides; modules without a match should be stable.

    Args:
        asked: by regex, for ``re.search``, one exponent for both terms, or a pair of them; None for a term that is not judged.
        names: the modules.

    Raises:
        ValueError: a pattern does not compile or matches nothing.
        TypeError: a pattern is not a string, or a value is neither a finite number, None, nor a pair of these.
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
            f"expected[{pattern!r}] must be an exponent, such as 0.5, a pair (update, propagated) of them, or None for a term that is not "
            f"judged, got {display(value)}"
        )
    return Expected(*terms)
