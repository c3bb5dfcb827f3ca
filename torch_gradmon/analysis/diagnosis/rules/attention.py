"""Attention that looks at one key only, and attention logits that grow until it does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....core import keys as n
from ....core.formatting import also_in
from ..findings import Finding, NotMeasured
from ..history import History
from ..series import Series

#: Entropy over the largest possible one, the log of the number of visible keys; mean over a layer's heads.
_COLLAPSED = 0.25
#: An entropy below this at the first step is no result of training.
_BROKEN = 0.15
#: The largest logit of a layer has grown by this factor, and beyond the size at which a softmax saturates.
_GREW, _LARGE, _FAR_TOO_LARGE = 5.0, 30.0, 100.0
#: The fewest steps that are judged.
_FEWEST = 4


def check_attention(history: History) -> list[Finding]:
    """Findings by module, if attention was measured."""
    entropies = history.heads(n.ATTENTION_ENTROPY_NORMALIZED, "mean")
    logits = history.heads(n.ATTENTION_MAX_LOGIT, "max")
    if not entropies and not logits and n.has_attention(history.kinds):
        reasons = (record.context.get(n.NO_ATTENTION) for record in reversed(history.records))
        why = next(filter(None, reasons), "preset='full', or add_attention_metric")
        raise NotMeasured(f"attention was not measured: {why}")
    low = {name: level for name, series in entropies.items() if len(series) >= _FEWEST and (level := series.median) < _COLLAPSED}
    return [*_collapse(history, entropies, low), *_growth(history, logits)]


def _collapse(history: History, entropies: Mapping[str, Series], low: Mapping[str, float]) -> list[Finding]:
    if not low:
        return []
    worst = sorted(low, key=lambda name: low[name])
    series = entropies[worst[0]]
    at = history.beginning(series.steps)
    first = math.nan if at is None else series.values[at]
    since = ", from the start on" if first < _COLLAPSED else ""
    return history.finding(
        "attention-entropy-collapse",
        worst[0],
        {"entropy / largest possible": low[worst[0]], **({} if at is None else {"at the beginning": first})},
        f"The heads of this layer look at one or two keys only{since}.{also_in(worst)}",
        "Check that logits are divided by sqrt(width of a head); normalise queries and keys, or lower the learning rate.",
        64.5,
        severity="warning" if first < _BROKEN else None,
        steps=(series.steps[0], series.steps[-1]),
    )


def _growth(history: History, logits: Mapping[str, Series]) -> list[Finding]:
    grown: dict[str, float] = {}
    for name, series in logits.items():
        if len(series) >= _FEWEST and (last := series.part(0.75, 1).median) > max(_GREW * abs(series.values[0]), _LARGE):
            grown[name] = last
    if not grown:
        return []
    worst = sorted(grown, key=lambda name: -grown[name])
    series = logits[worst[0]]
    return history.finding(
        "attention-logit-growth",
        worst[0],
        {"largest logit at the beginning": series.values[0], "at the end": grown[worst[0]]},
        f"The attention logits of this layer grow; a softmax of such logits passes no gradient on.{also_in(worst)}",
        "Normalise queries and keys (qk-norm), cap the logits, or lower the learning rate of the query and key projections.",
        65.0,
        severity="warning" if grown[worst[0]] > _FAR_TOO_LARGE or history.learning.is_stuck else "info",
        steps=(series.steps[0], series.steps[-1]),
    )
