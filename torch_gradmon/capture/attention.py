"""Attention, head by head."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
import traceback
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import keys as n
from ..core.fence import Fence
from ..core.moments import Column
from ..core.records import Metric
from ..core.torch_modes import outside_dispatch_modes
from ..statistics.attention import attention_rows
from ..statistics.request import NARROW, refusal
from ..step.buffer import StepBuffer
from ..step.model_index import ModelIndex
from .hooks import COMPILER, is_called_by, wrapped_by
from .module_values import ModuleValues

# --- A function that is replaced while somebody observes it ---

#: Returns what is called with the arguments, keyword arguments and result of a call, such as a weak method; None once it is gone.
_Observer = Callable[[], Callable[[tuple[Any, ...], Mapping[str, Any], Any], None] | None]


class FunctionPatch:
    """Replaces a function in every module that has it among its globals, such as by ``from ... import``, while anybody observes it.

    A global of a module belongs to the process, so there is one patch of a function for all monitors and threads; two that replaced each
    other's replacement would pile up. Each observer hears of the calls of its own thread only.

    A mode that overrides torch's functions would see calls by other ways too, but it makes torch take other code paths, as in an encoder
    in evaluation mode, and stops the compiler. A replacement left behind by an interrupt only passes calls on.
    """

    def __init__(self, home: types.ModuleType, name: str) -> None:
        self._home, self._name = home, name
        # each with its thread, by id; changed by single operations, since one may go when garbage is collected, at any point
        self._observers: dict[int, tuple[_Observer, int]] = {}
        self._lock, self._is_forked = threading.RLock(), False
        self._places: list[tuple[dict[str, Any], str]] = []
        self._searched = 0
        self._last: Callable[[], _Observed | None] = lambda: None
        self._scripted: list[_Observed] = []  # those that torch.jit knows by their ids, kept for good
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def add(self, observer: _Observer) -> _Observed:
        """Report calls of this thread to ``observer`` until :meth:`discard`. Returns the replacement, which it has to keep, so that code
        compiled with it stays valid in the next forward.
        """
        self._observers[id(observer)] = observer, threading.get_ident()
        with self._no_compilation(), self._lock:
            current, last = getattr(self._home, self._name), self._last()
            if isinstance(current, _Observed):
                function = current
            else:
                known = (each for each in (last, *self._scripted) if each is not None and each.original is current)
                function = next(known, None) or self._replacement(current)
            if function is not last or self._searched != len(sys.modules):
                self._searched, self._last = len(sys.modules), weakref.ref(function)
                self._places = _places_of(function.original)
            for scope, name in self._places:
                if scope.get(name) is function.original:
                    scope[name] = function
            return function

    def discard(self, observer: _Observer) -> None:
        """Report no more calls to ``observer``, and restore the function after the last one. Idempotent; in any thread."""
        if self._observers.pop(id(observer), None) is not None and not self._observers:
            with self._no_compilation(), self._lock:
                # unless it was replaced by others meanwhile, or somebody observes it again
                for scope, name in () if self._observers else self._places:
                    if isinstance(function := scope.get(name), _Observed):
                        scope[name] = function.original

    def called(self, function: _Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._observers and function is self._last():  # and not another one, which is called by what somebody has put over it
            thread = threading.get_ident()
            for observer, of_thread in list(self._observers.values()):
                if of_thread == thread and (saw := observer()) is not None:
                    saw(args, kwargs, result)

    def _replacement(self, original: Any) -> _Observed:
        function = _Observed(original, self)
        with contextlib.suppress(ImportError, AttributeError):  # a private API
            from torch.jit._builtins import _find_builtin, _register_builtin

            operation = _find_builtin(original)  # type: ignore[no-untyped-call]
            if operation is not None:  # another thread may compile a model by torch.jit.script now
                self._scripted.append(function)
                _register_builtin(function, operation)
        return function

    def _forked(self) -> None:
        # other threads, and so those who may hold a lock, do not exist in this process
        self._lock, self._is_forked, own = threading.RLock(), True, threading.get_ident()
        for observer, thread in list(self._observers.values()):
            if thread != own:
                self.discard(observer)

    def _no_compilation(self) -> AbstractContextManager[object]:
        """Wait for the compiler in another thread: it fails if a function that it has read is another one when it guards against that."""
        lock: AbstractContextManager[object] | None = getattr(
            sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None
        )
        return contextlib.nullcontext() if lock is None or self._is_forked else lock


class _Observed:
    """Passes calls on to ``original``, and reports them to ``patch``. Safe to keep after the patch is removed: a model may have found it in
    a forward. Pickles and copies of it are ``original``, which pickle would refuse for a function. As torch's own function, and other than
    a Python function, it is no method where a class has it as an attribute.
    """

    def __init__(self, original: Any, patch: FunctionPatch) -> None:
        self.original, self._patch = original, patch
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # which the compiler and users read from functions
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling():
            self._patch.called(self, args, kwargs, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return typing.cast, (None, self.original)  # which returns its second argument


def _places_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    # not in torch's C++ modules, which pass their functions to modes that override functions
    # a copy at once: a collection of garbage, or another thread, may import while a list is made
    modules = [m for name, m in sys.modules.copy().items() if isinstance(m, types.ModuleType) and not name.startswith("torch._C")]
    scopes = [vars(module) for module in modules]
    return [
        (scope, name) for scope in scopes for name, value in scope.copy().items() if value is function or type(value) is _Observed
    ]


#: Of the only function that is observed.
ATTENTION_PATCH = FunctionPatch(F, "scaled_dot_product_attention")


# --- What is measured of its calls ---

_COLUMNS = frozenset({Column.COUNT, Column.SUM, Column.NONFINITE, Column.MIN, Column.MAX})
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Number of frames above a call in which its module is searched.
_SOURCE_DEPTH = 24
_NOT_IN_GRAPHS = "calls of scaled_dot_product_attention are not seen in a model with a compiled part"
_NO_CALL = (
    "no call of scaled_dot_product_attention was seen in training; attention that is written out, flex_attention, and a call through an "
    "attribute that holds the function are not seen"
)


class AttentionRecorder:
    def __init__(self, values: ModuleValues, fence: Fence, in_forward: Callable[[], bool], in_graphs: Callable[[], bool]) -> None:
        self._values, self._fence, self._in_forward = values, fence, in_forward
        self._in_graphs = in_graphs  # whether a part of the model is compiled, so that observing would cause a recompilation
        self.buffer: StepBuffer | None = None
        self._metrics: Sequence[Metric] = ()
        self._names: dict[int, str] = {}  # of known modules, and the parts of those that are wrappers, by id
        self._inventory: weakref.ref[ModelIndex] | None = None
        self._observer = weakref.WeakMethod(self._saw)
        self._replacement: _Observed | None = None
        weakref.finalize(self, ATTENTION_PATCH.discard, self._observer)  # if a forward was interrupted
        self._reported: set[str] = set()
        self._observed: set[str] = set()
        self._reason = _NO_CALL
        self._unseen: dict[str, str] = {}  # why the last step with metrics of a source had no values of it

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        self.buffer, self._reason = buffer, _NO_CALL
        self._reported, self._observed = set(), set()
        self._metrics = [metric for metric in metrics if metric.source in n.ATTENTION_SOURCES.values()]
        if self._metrics and (self._inventory is None or self._inventory() is not inventory):
            self._inventory = weakref.ref(inventory)
            self._names = {
                id(part): name
                for name, reference in inventory.modules.items()
                if (module := reference()) is not None
                for part in wrapped_by(module)
            }

    def end(self) -> None:
        if self.buffer is not None:
            for source in {metric.source for metric in self._metrics}:
                self._unseen.pop(source, None)
                if not self._reported and not self._observed:
                    reason = _NOT_IN_GRAPHS if self._in_graphs() else self._reason
                    self._unseen[source] = self.buffer.absent.get((source, ""), reason)
            self.buffer.absent.update({(source, ""): reason for source, reason in self._unseen.items()})
        self.buffer = None
        self.leave()

    def enter(self) -> None:
        if self._metrics and not self._in_graphs():
            if is_called_by(COMPILER):
                self._reason = _NOT_IN_GRAPHS  # torch.compile(model), assigned to another variable
            else:
                self._replacement = ATTENTION_PATCH.add(self._observer)

    def leave(self) -> None:
        ATTENTION_PATCH.discard(self._observer)

    def _saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        if self.buffer is None or not self._in_forward():
            return
        start = time.perf_counter()
        name = self._innermost()
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
                self._fence.complaints.add(f"attention:{name}", f"the attention of {name} could not be measured", error)
        self._fence.seconds += time.perf_counter() - start

    def _innermost(self) -> str | None:
        """The innermost known module whose method is running, or that is the first argument of a running function."""
        for frame, _ in islice(traceback.walk_stack(sys._getframe(2)), _SOURCE_DEPTH):
            code = frame.f_code
            if code.co_argcount:
                values = frame.f_locals
                first = values.get(code.co_varnames[0])
                if code.co_flags & inspect.CO_OPTIMIZED and isinstance(values, dict):
                    values.clear()  # the snapshot would keep all values alive until the frame ends
                if isinstance(first, nn.Module):
                    return self._names.get(id(first))
        return None

    def report(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure a call that a module reports, per head, unless it was observed already."""
        if name not in self._observed and self._record(name, named, arguments, dict.fromkeys(n.ATTENTION_SOURCES.values(), True)):
            self._reported.add(name)

    def _record(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any], sources: Mapping[str, bool]) -> bool:
        """Measure one call. Returns whether it could be read. ``named``: tensors ``[..., heads, length, size]`` by the suffix of their
        names; ``sources``: whether single heads are shown: then the tensors of each are measured, otherwise those of all together.
        """
        if self.buffer is None:
            return False
        for tensor in named.values():
            if (reason := refusal(tensor)) is not None:
                self._reason = f"the attention of {name}: {reason}"
                return False
        arguments, kind = dict(arguments), arguments["query"].device.type
        if torch.is_autocast_enabled(kind):  # query, key and value have the dtype that autocast uses for attention
            narrow = {name: arguments[name] for name in ("query", "key", "value") if name in arguments}
            dtype = torch.get_autocast_dtype(kind)
            arguments.update((name, each.to(dtype)) for name, each in narrow.items() if each.dtype in NARROW)
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
            self.buffer.merge_rows(source, heads_of, rows[source], _COLUMNS)
            if not per_head:
                self.buffer.unshown.update((source, head) for head in heads_of)
        return True
