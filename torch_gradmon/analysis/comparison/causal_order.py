"""The order in which the values of a step are computed, so that the first divergent value comes before its consequences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...core import keys as n
from ...core.keys import Key
from ...core.loss_keys import is_loss
from ...core.moments import VIEWS
from ...runs.reader import COUNT

#: The source of a step's facts: ``context/lr``, ``context/amp_scale`` and ``context/applied``.
CONTEXT = "context"
#: Several parameter groups have a learning rate each.
FACTS = (Key(CONTEXT, "lr", ""), Key(CONTEXT, "lr", "0"), Key(CONTEXT, "amp_scale", ""), Key(CONTEXT, "applied", ""))

#: The stages of a step, in their order, and the sources of each.
STAGES: dict[str, tuple[str, ...]] = {
    "parameters": (n.PARAMETER, n.PARAMETER_DIFFERENCE),
    "activations": (n.INPUT, n.ACTIVATION, n.ACTIVATION_DIFFERENCE, *n.RCC_SOURCES, *n.ATTENTION_SOURCES.values()),
    "loss": (),
    "gradients of activations": (n.ACTIVATION_GRADIENT, n.INPUT_GRADIENT),
    "gradients before clipping": (n.GRADIENT_LOCAL, n.GRADIENT_BEFORE_CLIP),
    "gradients for the optimizer": (n.GRADIENT,),
    "settings": (CONTEXT,),
    "optimizer state": (n.OPTIMIZER,),
    "updates": (n.UPDATE,),
    "other values": (),
}
_STAGE_OF = {source: stage for stage, sources in STAGES.items() for source in sources}
#: Stages of whole-model values by the start of their names; others are known at the end of a step.
_OF_WHOLE = {
    "param_": "parameters",
    "update_": "updates",
    "grad_norm_clipped": "gradients for the optimizer",
    "grad_": "gradients before clipping",
    "clip": "gradients for the optimizer",
}
_NUMBER = {stage: number for number, stage in enumerate(STAGES)}
_BACKWARD = ("gradients of activations", "gradients before clipping", "gradients for the optimizer")
#: The most informative metric of a tensor comes first.
_METRICS = {metric: rank for rank, metric in enumerate(dict.fromkeys((COUNT, "nonfinite", *VIEWS)))}
_INSIDE = re.compile(r"(?<=.)[\[@].*$")
#: After all tensors of a stage: values of the whole model.
_LAST = 1 << 40


def stage_of(key: Key) -> str:
    """The stage of a value."""
    if key.source == n.SUMMARY:
        return next((stage for start, stage in _OF_WHOLE.items() if key.metric.startswith(start)), "other values")
    return "loss" if is_loss(key) else _STAGE_OF.get(key.source, "other values")


class Order:
    """Ranks keys: by stage, then by place (forward for activations, backward for gradients), then by metric.

    Args:
        tensors: names by source. Outputs are in the order of the calls. Parameters are taken to be used in the order of their modules'
            calls if those are known, otherwise in model order.
    """

    def __init__(self, tensors: Mapping[str, Iterable[str]]) -> None:
        calls = [_INSIDE.sub("", name) for name in tensors.get(n.ACTIVATION, ())]
        self._ends: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        for place, name in enumerate(calls):
            self._ends.setdefault(name, place)
            for outer in _enclosing(name):
                self._begins.setdefault(outer, place)
        for name in dict.fromkeys(name for source in STAGES["activations"] for name in tensors.get(source, ())):
            self._begins.setdefault(_INSIDE.sub("", name), len(self._begins))
        self._parameters: dict[str, tuple[int, int]] = {}
        reached = -1
        names = dict.fromkeys(name for source in n.PARAMETER_SOURCES for name in tensors.get(source, ()))
        for number, name in enumerate(names):
            reached = self._ends.get(name.rpartition(".")[0], reached)
            self._parameters[name] = (reached, number)

    def rank(self, key: Key) -> tuple[int, int, int, int]:
        """A sort key that follows the order of computation."""
        stage = stage_of(key)
        place, within = self._place(key)
        if stage in _BACKWARD and place != _LAST:
            place, within = -place, -within
        return _NUMBER[stage], place, within, _METRICS.get(key.metric, len(_METRICS))

    def _place(self, key: Key) -> tuple[int, int]:
        if key.name in self._parameters and key.source in n.PARAMETER_SOURCES:
            return self._parameters[key.name]
        if key.source in n.MODULE_SOURCES or stage_of(key) == "activations":
            name = _INSIDE.sub("", key.name)
            module = n.owner_of(name, self._begins)
            takes = key.source in (n.INPUT, n.INPUT_GRADIENT)
            if takes or module not in self._ends:
                return self._begins.get(module, len(self._begins)), 0 if takes else 1
            return self._ends[module], 1
        return _LAST, 0


def _enclosing(name: str) -> Iterable[str]:
    """The module, those that contain it, and the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield n.ROOT
