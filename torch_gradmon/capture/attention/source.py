"""Record calls of scaled dot product attention while the model runs, under the name of the calling module."""

from __future__ import annotations

import inspect
import sys
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
from .function_patch import ATTENTION_PATCH, COMPILER, CallObserver, is_called_by

_COLUMNS = frozenset({Column.COUNT, Column.SUM, Column.NONFINITE, Column.MIN, Column.MAX})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Number of frames above a call in which its module is searched.
_DEPTH = 24
_NOT_IN_GRAPHS = "calls of scaled_dot_product_attention are not seen in a model with a compiled part"
_NO_CALL = (
    "no call of scaled_dot_product_attention was seen in training; attention that is written out, flex_attention, and a call through an "
    "attribute that holds the function are not seen"
)


class _Callers:
    """Finds the module that calls a function. Does not keep the model alive."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inventory: weakref.ref[ModelIndex] | None = None

    def know(self, inventory: ModelIndex) -> None:
        """Know the modules of ``inventory``, and the parts of those that are wrappers."""
        if self._inventory is None or self._inventory() is not inventory:
            self._inventory = weakref.ref(inventory)
            self._names = {
                id(part): name
                for name, reference in inventory.modules.items()
                if (module := reference()) is not None
                for part in wrapped_by(module)
            }

    def innermost(self) -> str | None:
        """The innermost known module whose method is running, or that is the first argument of a running function."""
        frame: types.FrameType | None = sys._getframe(2)
        for _ in range(_DEPTH):
            if frame is None:
                return None
            code = frame.f_code
            if code.co_argcount:
                values = frame.f_locals
                first = values.get(code.co_varnames[0])
                if code.co_flags & inspect.CO_OPTIMIZED and isinstance(values, dict):
                    values.clear()  # the snapshot would keep all values alive until the frame ends
                if isinstance(first, nn.Module):
                    return self._names.get(id(first))
            frame = frame.f_back
        return None


class AttentionRecorder:
    """Measures attention calls, reported by the model or observed.

    Args:
        complaints: gets failures.
        values: measures query, key and value as activations.
        fence: counts the time.
        in_forward: whether the model's training forward is running.

    Attributes:
        compiled: a part of the model is compiled, so observing would cause a recompilation.
    """

    def __init__(self, complaints: WarningLog, values: ModuleValues, fence: Fence, in_forward: Callable[[], bool]) -> None:
        self._complaints, self._values, self._fence, self._in_forward = complaints, values, fence, in_forward
        self._buffer: StepBuffer | None = None
        self._metrics: Sequence[Metric] = ()
        self._callers = _Callers()
        self._observer = CallObserver(ATTENTION_PATCH, self._saw)
        weakref.finalize(self, self._observer.leave)  # if a forward was interrupted
        self._reported: set[str] = set()
        self._observed: set[str] = set()
        self._reason = _NO_CALL
        self._unseen: dict[str, str] = {}  # why the last step with metrics of a source had no values of it
        self.compiled = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Start a step with the metrics due in it."""
        self._buffer, self._reason = buffer, _NO_CALL
        self._reported, self._observed = set(), set()
        sources = frozenset(n.ATTENTION_SOURCES.values())
        self._metrics = [metric for metric in metrics if metric.source in sources]
        if self._metrics:
            self._callers.know(inventory)

    def set_compiled(self, compiled: bool) -> None:
        """Whether a part of the model is compiled."""
        self.compiled = compiled

    def end(self, has_graphs: bool = False) -> None:
        """End the step; ``has_graphs``: a compiled graph contains a hook."""
        self.compiled |= has_graphs
        if self._buffer is not None:
            for source in {metric.source for metric in self._metrics}:
                self._unseen.pop(source, None)
                if not self._reported and not self._observed:
                    self._unseen[source] = _NOT_IN_GRAPHS if self.compiled else self._reason
            self._buffer.absent.update({(source, ""): reason for source, reason in self._unseen.items()})
        self._buffer = None
        self.leave()

    def enter(self) -> None:
        """Record every call of this thread until :meth:`leave`."""
        if self._metrics and not self.compiled:
            if is_called_by(COMPILER):
                self._reason = _NOT_IN_GRAPHS  # torch.compile(model), assigned to another variable
            else:
                self._observer.enter()

    def leave(self) -> None:
        """Stop recording. Idempotent."""
        self._observer.leave()

    def _saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        if self._buffer is None or not self._in_forward():
            return
        start = time.perf_counter()
        name = self._callers.innermost()
        wanted = [metric for metric in self._metrics if name is not None and metric.matches(name)]
        if name is not None and wanted and name not in self._reported:
            call = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
            try:
                with outside_dispatch_modes(), torch.no_grad():
                    named = {"query": call["query"], "key": call["key"], "value": call["value"], "activation": result}
                    if self._record(name, named, call, {metric.source: metric.per_head for metric in wanted}):
                        self._observed.add(name)
            except Exception as error:
                self._reason = f"the attention of {name} could not be measured: {error}"
                self._complaints.add(f"attention:{name}", f"the attention of {name} could not be measured", error)
        self._fence.add_time(time.perf_counter() - start)

    def report(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure a call that a module reports, per head, unless it was observed already."""
        if name not in self._observed and self._record(name, named, arguments, dict.fromkeys(n.ATTENTION_SOURCES.values(), True)):
            self._reported.add(name)

    def _record(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any], sources: Mapping[str, bool]) -> bool:
        """Measure one call. Returns whether it could be read.

        Args:
            name: of the module.
            named: query, key, value and result, ``[..., heads, length, size]``, by the suffix of their names.
            arguments: of the call.
            sources: which statistics, and whether those of single heads are shown. If any are, the tensors of each head are measured too,
                otherwise those of all heads together.
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
    """Query, key and value in the dtype that autocast uses for attention."""
    kind = call["query"].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for name in ("query", "key", "value"):
            if name in call and call[name].dtype in NARROW:
                call[name] = call[name].to(dtype)
    return call
