"""Why a parameter has no value in a step, as text on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ..core import keys as n
from ..core.keys import Key
from ..core.metric import Metric
from ..core.moments import Column
from ..core.records import StatsTable, StepRecord
from .layer_values import LayerSelection
from .model_index import ModelIndex
from .plan import SourcePlan


def not_applied(context: Mapping[str, Any]) -> str:
    """Why what the optimizer would have changed has no value; ``context`` is that of the record."""
    why = context.get("interrupted")
    return f"the step was not applied: {why}" if why else "the step was not applied"


FROZEN = "it is frozen: its requires_grad is False"
#: What makes gradients before clipping known where no hook sees them: those of a backward pass, and those that the optimizer got otherwise.
CLIP_SEEN = "clip with monitor.clip_grad_norm_, or call monitor.monitor_gradients(before_clip=True) before you clip"
SET_BY_HAND = (
    "if the loop sets gradients itself, call monitor.monitor_gradients(before_clip=True) once they are set, before any clip"
)
OTHERS = (
    "the optimizer used other gradients than those of the last backward pass, and no multiple of them: the loop has set them itself; call "
    "monitor.monitor_gradients(before_clip=True) once they are set, before any clip"
)
_OF_GRADIENTS = frozenset({n.GRADIENT, n.GRADIENT_BEFORE_CLIP, n.GRADIENT_LOCAL})
_OF_OPTIMIZERS = frozenset({n.UPDATE, n.OPTIMIZER})
_NEEDS_HOOKS = {
    n.GRADIENT_LOCAL: "gradients of micro-batches are measured by hooks, which attach() installs",
    n.UPDATE: "updates are measured by hooks on the optimizer, which attach() installs",
    n.OPTIMIZER: "the optimizer's state is measured by hooks on it, which attach() installs",
}
_UNUSED = "it had no gradient: the loss does not depend on it, or its gradient was removed"


@dataclass(frozen=True)
class ReasonContext:
    """What is known of a step.

    Attributes:
        inventory: the model as it was.
        plans: the requested measurements of parameters, by source.
        due: the metrics of modules that were due.
        shown: the names of the requested whole-model values; a live change may have requested others since.
        attached: hooks on optimizers took part.
        refused: a reason by source if some of its tensors could not be measured.
    """

    inventory: ModelIndex
    plans: Mapping[str, SourcePlan]
    due: tuple[Metric, ...]
    shown: tuple[str, ...]
    attached: bool
    refused: Mapping[str, str]

    def planned(self, metric: Metric) -> bool:
        """Whether ``metric`` existed when the step began."""
        plan = self.plans.get(metric.source)
        if plan is None:
            return metric in self.due
        return any(metric is known for known, _ in plan.views) or any(metric in some for some in plan.functions.values())

    def is_frozen(self, source: str, name: str) -> bool:
        """Whether no gradient of ``name`` could come, since it was frozen when the step began."""
        return source in _OF_GRADIENTS and self.inventory.trainable.is_frozen(name) and name in self.inventory.parameters

    def reason(self, source: str, name: str, record: StepRecord, owned: Set[str] | None) -> str:
        """Why nothing was measured of ``name``; empty if unknown. ``owned``: the parameters of attached optimizers."""
        if name in self.inventory.excluded:
            return "excluded_modules_regex= leaves it out"
        if not self.attached and source in _NEEDS_HOOKS:
            return _NEEDS_HOOKS[source]
        if source == n.GRADIENT_LOCAL and name in self.inventory.spread:
            return "ranks have parts of it or of the model, whose gradients are measured only once they are reduced"
        if source in _OF_OPTIMIZERS and owned is not None:
            return "its optimizer did not step" if name in owned else self._unowned(name)
        if self.attached and source == n.GRADIENT_BEFORE_CLIP and _has(record.tables.get(n.GRADIENT), name):
            return f"no gradient before clipping was seen: no backward pass ran through the parameter's hook; {SET_BY_HAND}"
        if source == n.GRADIENT_BEFORE_CLIP and _has_others(record.tables.get(source)):
            return _UNUSED
        if source == n.GRADIENT and _has_others(record.tables.get(source)):
            return self._gone(name) if _has(record.tables.get(n.GRADIENT_BEFORE_CLIP), name) else _UNUSED
        if not self.attached and source == n.GRADIENT:
            return "no gradient of it was measured: call monitor.monitor_gradients() between backward and the optimizer's step"
        if not self.attached and source == n.GRADIENT_BEFORE_CLIP:
            return f"no gradient of it was measured before clipping: {CLIP_SEEN}"
        return ""

    def _unowned(self, name: str) -> str:
        frozen = self.inventory.trainable.is_frozen(name)
        return "it is frozen, and no attached optimizer has it" if frozen else "no attached optimizer has it"

    def _gone(self, name: str) -> str:
        if self.attached:
            return "its gradient was gone when the optimizer stepped, or its optimizer did not step"
        return "its gradient was gone when monitor.monitor_gradients() was called"


def _has(table: StatsTable | None, name: str) -> bool:
    return table is not None and name in table.row_of


def _has_others(table: StatsTable | None) -> bool:
    return table is not None and bool(table.names)


_ANY = re.compile("")


def of_layers(
    layers: LayerSelection, situation: ReasonContext, record: StepRecord, why: Callable[[Metric, str], str]
) -> dict[Key, str]:
    """The reason for each missing value of ``layers``; ``why`` returns the reason of one parameter."""
    found: dict[Key, str] = {}
    for source, name in ((n.GRADIENT_BEFORE_CLIP, "norm"), (n.UPDATE, "ratio")):
        plan = situation.plans.get(source)
        if plan is None or Column.SQUARE_SUM not in plan.columns:  # updates are shown in the steps that measure them
            continue
        metric, there = Metric(name, source, _ANY, shown=False), record.tables.get(source)
        for label, members in layers.members(situation.inventory.names).items():
            reasons = [why(metric, member) for member in members if not _has(there, member)]
            distinct = dict.fromkeys(filter(None, (situation.refused.get(source), *reasons)))
            found[Key(source, label, name)] = (
                "; ".join(distinct) or "the norm of its parameters was zero or NaN before the update"
            )
    return found
