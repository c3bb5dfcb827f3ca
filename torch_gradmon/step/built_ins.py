"""Built-in metrics of tensors and of attention. Others are in :mod:`torch_gradmon.capture.parameter_functions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core import keys as n
from ..core.metric import ForModule
from ..core.moments import VIEWS, Column
from ..statistics import attention, histogram, kurtosis, spectrum


@dataclass(frozen=True)
class BuiltIn:
    """A built-in metric of a source: a view of its statistics (``function`` is None) or a function."""

    columns: frozenset[Column]
    unit: str
    documentation: str
    function: Callable[..., Any] | ForModule | None = None
    aggregation: Callable[..., Any] | None = None


def _of_tensors(subject: str) -> dict[str, BuiltIn]:
    found = {name: BuiltIn(v.columns, v.unit, f"{v.documentation} of the {subject}") for name, v in VIEWS.items()}
    words = f"number of elements of the {subject} with that floor(log2 |x|), and of zeros; a class without any is absent"
    found[histogram.NAME] = BuiltIn(frozenset(), "count", words, histogram.log2_counts, histogram.as_metrics)
    words = f"Pearson's kurtosis of the {subject}, 3 for a normal distribution; absent if all elements are equal"
    found[kurtosis.NAME] = BuiltIn(frozenset(), "1", words, kurtosis.central_sums, kurtosis.kurtosis)
    return found


def _of_parameters(subject: str) -> dict[str, BuiltIn]:
    size = f"largest singular value of the {subject} as a matrix; of a stack of matrices the largest one"
    rank = (
        f"square of the norm of the {subject} over that of its largest singular value, 1 for rank 1; of a stack of matrices the smallest "
        "one; absent if all elements are zero"
    )
    return {
        **_of_tensors(subject),
        spectrum.SPECTRAL_NORM: BuiltIn(frozenset(), "1", size, spectrum.spectral_norm),
        spectrum.STABLE_RANK: BuiltIn(frozenset(), "1", rank, spectrum.stable_rank),
    }


def _of_features(subject: str) -> dict[str, BuiltIn]:
    mean, square = (
        f"mean{what} over the rows of the {subject}" for what in (" of log(sum(exp(x)))", " square of log(sum(exp(x)))")
    )
    return {
        **_of_tensors(subject),
        "logsumexp": BuiltIn(frozenset(), "nats", mean, attention.logsumexp),
        "logsumexp_square": BuiltIn(frozenset(), "nats^2", square, attention.logsumexp_square),
    }


RATIO = BuiltIn(
    frozenset({Column.SQUARE_SUM}),
    "1",
    "norm of the update over the norm of the parameter before it; absent for a zero parameter",
)
_ATTENTION = (
    ("nats", "entropy of the attention weights, mean over queries"),
    ("share", "the same over the logarithm of how many keys the query sees; queries that see one key do not count"),
    ("1", "largest logit of any query"),
    ("share", "weight on the first key that the query sees, mean over queries"),
)
#: Built-in metrics by source.
VIEW_BUILT_INS: dict[str, dict[str, BuiltIn]] = {
    n.GRADIENT: _of_parameters("gradient that the optimizer uses"),
    n.GRADIENT_BEFORE_CLIP: _of_parameters("gradient before clipping"),
    n.GRADIENT_LOCAL: _of_tensors("gradients of the micro-batches, merged"),
    n.PARAMETER: _of_parameters("parameter"),
    n.PARAMETER_DIFFERENCE: _of_tensors("difference to the reference parameter"),
    n.UPDATE: {**_of_parameters("change that the optimizer made"), "ratio": RATIO},
    n.ACTIVATION: _of_features("module's output"),
    n.ACTIVATION_GRADIENT: _of_tensors("gradient of the module's output"),
    n.ACTIVATION_DIFFERENCE: _of_tensors("difference to the output of the reference module"),
    n.INPUT: _of_features("module's input"),
    n.INPUT_GRADIENT: _of_tensors("gradient of the module's input"),
    **{
        source: {metric: BuiltIn(frozenset(), unit, words)}
        for (metric, source), (unit, words) in zip(n.ATTENTION_SOURCES.items(), _ATTENTION, strict=True)
    },
}
