"""Every call of scaled dot product attention while the model runs, recorded under the name of the module that makes it."""

from __future__ import annotations

import inspect
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core import keys as n
from ...core.errors import WarningLog
from ...core.fence import Fence
from ...core.metric import Metric
from ...core.moments import Column
from ...core.torch_modes import outside_dispatch_modes
from ...statistics.attention import attention_rows
from ...statistics.tensor_access import NARROW, refusal
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..modules.compiled import wrapped_by
from ..modules.values import ModuleValues
from .function_patch import COMPILER, FunctionPatch, is_called_by

_COLUMNS = frozenset({Column.COUNT, Column.SUM, Column.NONFINITE, Column.MIN, Column.MAX})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Frames above a call in which its module is looked for.
_DEPTH = 24
_NOT_IN_GRAPHS = "calls of scaled_dot_product_attention are not seen in a model of which any part is compiled"
_NO_CALL = "no call of scaled_dot_product_attention was seen in training; what holds the function in an attribute calls it unseen"


class AttentionRecorder:
    """Takes the statistics of attention calls, told by hand or seen by itself.

    Args:
        complaints: where failures are reported.
        values: measures query, key and value as activations.
        guard: told of the time that it takes.
        in_forward: whether the model's training forward is running.

    Attributes:
        compiled: a part of the model is compiled, where nothing can be seen without compiling it again.
    """

    def __init__(self, complaints: WarningLog, values: ModuleValues, guard: Fence, in_forward: Callable[[], bool]) -> None:
        self._complaints, self._values, self._guard, self._in_forward = complaints, values, guard, in_forward
        self._buffer: StepBuffer | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._names: dict[int, str] = {}
        self._inventory: weakref.ref[ModelIndex] | None = None
        self._spy = FunctionPatch(F, "scaled_dot_product_attention", self._saw)
        weakref.finalize(self, self._spy.leave)  # after an interrupt in the middle of a forward
        self._thread = 0
        self._told: set[str] = set()
        self._heard: set[str] = set()
        self._reason = _NO_CALL
        self.compiled = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Start a step with the metrics that are due in it."""
        self._buffer, self._reason = buffer, _NO_CALL
        self._told, self._heard = set(), set()
        sources = frozenset(n.ATTENTION_SOURCES.values())
        self._metrics = tuple(metric for metric in metrics if metric.source in sources)
        if self._metrics and (self._inventory is None or self._inventory() is not inventory):
            self._inventory = weakref.ref(inventory)
            self._names = {
                id(part): name
                for name, reference in inventory.modules.items()
                if (module := reference()) is not None
                for part in wrapped_by(module)
            }

    def end(self) -> None:
        """End the step."""
        if self._buffer is not None and not self._told and not self._heard:
            reason = _NOT_IN_GRAPHS if self.compiled else self._reason
            for source in {metric.source for metric in self._metrics}:
                self._buffer.absent[source, ""] = reason
        self._buffer = None
        self.leave()

    def enter(self) -> None:
        """From here on every call of this thread is recorded, until :meth:`leave`."""
        if self._metrics and not self.compiled:
            if is_called_by(COMPILER):
                self._reason = _NOT_IN_GRAPHS  # torch.compile(model), kept beside the model
            else:
                self._thread = threading.get_ident()
                self._spy.enter()

    def leave(self) -> None:
        """Stop recording; calling it again does nothing."""
        self._spy.leave()

    def _saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        if self._buffer is None or threading.get_ident() != self._thread or not self._in_forward():
            return
        start = time.perf_counter()
        name = self._caller()
        wanted = [metric for metric in self._metrics if name is not None and metric.matches(name)]
        if name is not None and wanted and name not in self._told:
            call = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
            try:
                with outside_dispatch_modes(), torch.no_grad():
                    named = {"query": call["query"], "key": call["key"], "value": call["value"], "activation": result}
                    if self._record(name, named, call, {metric.source: metric.per_head for metric in wanted}):
                        self._heard.add(name)
            except Exception as error:
                self._reason = f"the attention of {name} could not be measured: {error}"
                self._complaints.add(f"attention:{name}", f"the attention of {name} could not be measured", error)
        self._guard.account(time.perf_counter() - start)

    def _caller(self) -> str | None:
        """The innermost module whose method is running, or that was handed to a function as its first argument, if it is known."""
        frame: types.FrameType | None = sys._getframe(2)
        for _ in range(_DEPTH):
            if frame is None:
                return None
            code = frame.f_code
            if code.co_argcount:
                values = frame.f_locals
                first = values.get(code.co_varnames[0])
                if code.co_flags & inspect.CO_OPTIMIZED and isinstance(values, dict):
                    values.clear()  # a snapshot that would keep all of them alive until the frame is left
                if isinstance(first, nn.Module):
                    return self._names.get(id(first))
            frame = frame.f_back
        return None

    def tell(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure a call that a module tells of, head by head, unless it was seen already."""
        if name not in self._heard and self._record(name, named, arguments, dict.fromkeys(n.ATTENTION_SOURCES.values(), True)):
            self._told.add(name)

    def _record(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any], sources: Mapping[str, bool]) -> bool:
        """Measure one call; whether it could be read.

        Args:
            name: of the module.
            named: query, key, value and result, ``[..., heads, length, size]``, by what their names end with.
            arguments: of the call.
            sources: which statistics, and whether those of single heads are shown. Where those of any are, the tensors of each
                head are measured too, otherwise those of all heads together.
        """
        if self._buffer is None:
            return False
        for tensor in named.values():
            if (reason := refusal(tensor)) is not None:
                self._reason = f"the attention of {name}: {reason}"
                return False
        arguments = _as_attended(dict(arguments))
        named = {**named, **{label: arguments[label] for label in named.keys() & arguments.keys()}}
        if any(sources.values()):
            heads = {label: tensor.unbind(dim=-3) for label, tensor in named.items()}
            parts = {f"{name}.head_{h}.{label}": part for label, split in heads.items() for h, part in enumerate(split)}
        else:
            parts = {f"{name}.{label}": tensor for label, tensor in named.items()}
        self._values.named(parts)
        rows = attention_rows(**{key: value for key, value in arguments.items() if key not in ("value", "dropout_p")})
        for source, per_head in sources.items():
            heads_of = [f"{name}.head_{head}" for head in range(len(rows[source]))]
            self._buffer.merge_rows(source, heads_of, rows[source], _COLUMNS)
            if not per_head:
                self._buffer.unshown.update((source, head) for head in heads_of)
        return True


def _as_attended(call: dict[str, Any]) -> dict[str, Any]:
    """Query, key and value in the dtype in which autocast lets them attend."""
    kind = call["query"].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for name in ("query", "key", "value"):
            if name in call and call[name].dtype in NARROW:
                call[name] = call[name].to(dtype)
    return call
