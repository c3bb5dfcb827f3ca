"""Every call of scaled dot product attention while the model runs, recorded under the name of the module that made it."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import names as n
from ..errors import Complaints
from ..inventory import Inventory
from ..metric import Metric
from ..modes import unseen
from ..statistics.attention import attention_rows
from ..statistics.moments import Column
from ..statistics.reading import refusal
from ..step import StepBuffer
from .module_values import ModuleValues

_SDPA = F.scaled_dot_product_attention
_COLUMNS = frozenset({Column.COUNT, Column.SUM, Column.NONFINITE, Column.MIN, Column.MAX})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Frames above a call in which its module is looked for.
_DEPTH = 24
_NOT_IN_GRAPHS = "calls of scaled_dot_product_attention are not seen in a model of which any part is compiled"


class AttentionRecorder:
    """Takes the statistics of attention calls, told by hand or seen by itself.

    Args:
        complaints: where failures are reported.
        values: measures query, key and value as activations.

    Attributes:
        compiled: a part of the model is compiled, where nothing can be seen without compiling it again.
    """

    def __init__(self, complaints: Complaints, values: ModuleValues) -> None:
        self._complaints, self._values = complaints, values
        self._buffer: StepBuffer | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._names: dict[int, str] = {}
        self._inventory: weakref.ref[Inventory] | None = None
        self._mode: _Calls | None = None
        self._seen = False
        self.compiled = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: Inventory) -> None:
        """Start a step with the metrics that are due in it."""
        self._buffer, self._seen = buffer, False
        sources = frozenset(n.ATTENTION_SOURCES.values())
        self._metrics = tuple(metric for metric in metrics if metric.source in sources)
        if self._metrics and (self._inventory is None or self._inventory() is not inventory):
            self._inventory = weakref.ref(inventory)
            self._names = {id(m): name for name, reference in inventory.modules.items() if (m := reference()) is not None}

    def end(self) -> None:
        """End the step."""
        if self._buffer is not None and self._metrics and not self._seen:
            reason = _NOT_IN_GRAPHS if self.compiled else "the model made no call of scaled_dot_product_attention in training"
            for source in {metric.source for metric in self._metrics}:
                self._buffer.absent[source, ""] = reason
        self._buffer = None
        self.leave()

    def sees(self, name: str) -> bool:
        """Whether the calls of this module are being recorded by themselves."""
        return self._mode is not None and any(metric.matches(name) for metric in self._metrics)

    def enter(self) -> None:
        """From here on every call of this thread is recorded, until :meth:`leave`."""
        if self._metrics and self._mode is None and not self.compiled:
            self._mode = _Calls(self._saw)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop recording; calling it again does nothing."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _saw(self, given: Mapping[str, Any], result: Tensor) -> None:
        if self._buffer is None or torch._C._current_graph_task_id() != -1:
            return
        name = self._caller()
        wanted = [metric for metric in self._metrics if name is not None and metric.matches(name)]
        if name is None or not wanted:
            return
        arguments = {key: value for key, value in given.items() if key != "dropout_p"}
        try:
            with torch.no_grad(), unseen():
                per_head = any(metric.per_head for metric in wanted)
                named = {"query": given["query"], "key": given["key"], "value": given["value"], "activation": result}
                self.record(name, named, arguments, [metric.source for metric in wanted], per_head)
        except Exception as error:
            self._complaints.add(f"attention:{name}", f"the attention of {name} could not be measured", error)

    def _caller(self) -> str | None:
        """The innermost module of the model whose method is running, or that was handed to a function as its first argument."""
        frame: types.FrameType | None = sys._getframe(2)
        for _ in range(_DEPTH):
            if frame is None:
                return None
            code = frame.f_code
            if code.co_argcount:
                first = frame.f_locals.get(code.co_varnames[0])
                if isinstance(first, nn.Module) and id(first) in self._names:
                    return self._names[id(first)]
            frame = frame.f_back
        return None

    def record(
        self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any], sources: list[str], per_head: bool
    ) -> None:
        """Measure one call.

        Args:
            name: of the module.
            named: query, key, value and result, ``[..., heads, length, size]``, by what their names end with.
            arguments: of the call, without dropout.
            sources: which statistics.
            per_head: the values of heads are shown, and the tensors of each are measured; otherwise those of all heads together.
        """
        if self._buffer is None:
            return
        for tensor in named.values():
            if (reason := refusal(tensor)) is not None:
                for source in sources:
                    self._buffer.absent[source, name] = reason
                return
        self._seen = True
        if per_head:
            heads = {label: tensor.unbind(dim=-3) for label, tensor in named.items()}
            parts = {f"{name}.head_{h}.{label}": part for label, split in heads.items() for h, part in enumerate(split)}
        else:
            parts = {f"{name}.{label}": tensor for label, tensor in named.items()}
        self._values.named(parts)
        if sources:
            rows = attention_rows(**{key: value for key, value in arguments.items() if key != "value"})
            for source in sources:
                heads_of = [f"{name}.head_{head}" for head in range(len(rows[source]))]
                self._buffer.merge_rows(source, heads_of, rows[source], _COLUMNS)
                if not per_head:
                    self._buffer.unshown.update((source, head) for head in heads_of)


class _Calls(TorchFunctionMode):
    """Sees the calls of torch's functions while it is entered, and changes none of them."""

    def __init__(self, saw: Callable[[Mapping[str, Any], Tensor], None]) -> None:
        super().__init__()
        self._saw = saw

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return _seeing(func, self._attend)(*args, **kwargs)
        return self._attend(*args, **kwargs) if func is _SDPA else func(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        result = _SDPA(*args, **kwargs)
        self._saw({**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}, result)
        return result


def _seeing(function: Any, attend: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose own call of attention goes to ``attend``: inside of a mode's handler the mode is off."""
    scope = {**function.__globals__, "scaled_dot_product_attention": attend}
    twin = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
