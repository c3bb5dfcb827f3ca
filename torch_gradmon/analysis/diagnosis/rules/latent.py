"""A variational autoencoder whose latent does not depend on its input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ....core import keys as n
from ..findings import Finding
from ..history import History
from ..series import Matrix

#: The root mean square of mean and log variance, which the prior has at 0, and how much larger both were at the beginning.
_NOTHING, _FALLEN = 0.05, 2.0
#: Steps before a latent counts as collapsed.
_FEWEST = 50
#: Names of layers that give mean or log variance.
_NAMES = re.compile(r"mu\b|mean|loc\b|var|sigma|std|scale", re.IGNORECASE)


def check_latent(history: History) -> list[Finding]:
    """By the outputs of two layers alike; silent where activations were not measured, which another rule reports."""
    outputs = history.matrix(n.ACTIVATION, "rms")
    if outputs is None or len(outputs.steps) < _FEWEST:
        return []
    first, last = outputs.part(0, 0.1).largest(), outputs.part(0.8, 1).medians()
    for one, other in _pairs(history, outputs):
        if all(last.get(name, 1.0) < min(_NOTHING, first.get(name, 0.0) / _FALLEN) for name in (one, other)):
            return history.finding(
                "posterior-collapse",
                one,
                {f"root mean square of {name}": last[name] for name in (one, other)},
                "Mean and log variance of the latent are those of the prior, 0, for all inputs: the decoder learns nothing about them.",
                "Give the reconstruction its full weight, summed over pixels where the divergence is summed over latents; let the weight "
                "of the divergence rise from 0.",
                79.5,
                severity="warning",
                steps=(outputs.steps[0], outputs.steps[-1]),
            )
    return []


def _pairs(history: History, outputs: Matrix) -> Iterator[tuple[str, str]]:
    """Neighbouring layers of one kind and shape, with others behind them, that are named or returned like the parameters of a latent; or
    a layer twice whose output has two halves, since the next layer takes half as many numbers.
    """
    layers = [name for name in outputs.names if f"{name}.weight" in history.matrices]
    sizes, fans = history.sizes(n.PARAMETER), history.matrices
    usual = outputs.medians()
    returned = {usual[name] for name in outputs.names if name.startswith(f"{n.ROOT}[")}
    for one, other in pairwise(layers):
        weights = f"{one}.weight", f"{other}.weight"
        is_alike = sizes.get(weights[0]) == sizes.get(weights[1]) and fans[weights[0]] == fans[weights[1]]
        is_sibling = one.rpartition(".")[0] == other.rpartition(".")[0] and history.kinds.get(one) == history.kinds.get(other)
        is_named = any(_NAMES.search(name.rpartition(".")[2]) for name in (one, other))
        if other != layers[-1] and is_alike and is_sibling and (is_named or {usual[one], usual[other]} <= returned):
            yield one, other
        if fans[weights[0]] and sizes.get(weights[0], 0.0) / fans[weights[0]] == 2 * fans[weights[1]]:
            yield one, one
