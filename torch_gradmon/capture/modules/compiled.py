"""Hooks on modules under ``torch.compile``: statistics become part of the graph, which writes them to slots.

This runs in Python only while tracing. The graph gets operations that add to tensors of the monitor, and a flag on the device enables them
on monitored steps only. So there is one graph, whichever steps are monitored.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.compat import CHECKPOINTS_WRITE_ONCE
from ...core.moments import ALWAYS, Column
from ...statistics.tensor_access import accumulator_dtype, threshold
from ...step.buffer import StepBuffer
from ...step.model_index import wrapped_in
from .structure import rest_of, tensors_of
from .values import ModuleValues

_INSIDE_COMPILE = "inside torch.compile only the statistics of outputs are measured, and no functions, gradients or inputs"
_CLOSED = "inside a part of a graph that may not write to anything, such as a branch of torch.cond"
RECOMPUTED = "inside a checkpoint in torch.compile they need torch 2.9 or newer, and the backend inductor or aot_eager"
#: Backends that take writes out of a graph. Others run it as it was traced: a checkpoint recomputes with the graph's inputs, and torch
#: 2.13 raises in the backward pass if one of them was written to.
_FUNCTIONAL = ("inductor", "aot_", "cudagraphs")
_SUMS = (Column.COUNT, Column.SUM, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE)


class RecordingFlag:
    """The flags that let compiled graphs write, one per device. Changing them launches a fill and does not synchronise.

    Attributes:
        is_traced: any hook with these flags is, or was, part of a graph.
    """

    def __init__(self) -> None:
        self.is_traced = False
        self._open = True
        self._flags: dict[torch.device, Tensor] = {}

    def flag(self, device: torch.device) -> Tensor:
        """The flag on ``device``, a 0-d bool."""
        if device not in self._flags:
            self._flags[device] = torch.full((), self._open, dtype=torch.bool, device=device)
        return self._flags[device]

    def note_trace(self) -> None:
        """A hook is part of a graph."""
        self.is_traced = True

    def set(self, is_open: bool) -> None:
        """Set all flags."""
        if is_open != self._open:
            self._open = is_open
            for flag in self._flags.values():
                flag.fill_(is_open)


class TracedStatistics:
    """What one module's hook does in a graph.

    Each place where the module's output is compiled gets its own slots, so a module that is called twice in a graph, or compiled again for
    another shape, adds up.

    Args:
        name: of the module.
        gate: enables writing.
        root: the watched model; graphs of evaluation passes get nothing.
        eps: an element counts as near zero when ``|x| <= eps``.
        columns: the requested ones.
        taken: names of modules, which no path may have.

    Attributes:
        paths: of the slots, in order.
        refused: reasons for paths without slots.
        is_traced: the hook is part of a graph.
    """

    def __init__(
        self, name: str, gate: RecordingFlag, root: nn.Module, eps: float, columns: frozenset[Column], taken: Container[str]
    ) -> None:
        self.name, self._taken = name, taken
        self.columns = columns | ALWAYS if columns else columns
        self._sums = tuple(column in self.columns for column in _SUMS)
        self._extremes = Column.MIN in columns or Column.MAX in columns
        self.eps = threshold(eps, torch.float64)
        self._gate = gate
        self._root = weakref.ref(unwrapped(root))
        self.paths: list[str] = []
        self.refused: dict[str, str] = {}
        self.is_traced = False

    def trace(self, output: Any) -> None:
        """Traced: add the statistics of each tensor in ``output`` to its slots."""
        self._note()
        root = self._root()
        if not self.columns or root is None or not root.training or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            for path, tensor in tensors_of(output, self.name):
                place = self._allot(path, str(tensor.dtype), tensor.device)
                if place >= 0:
                    sums, extremes = getattr(self, f"sums_{place}"), getattr(self, f"extremes_{place}")
                    flag = getattr(self, f"flag_{place}")
                    _add(tensor.detach(), sums, extremes if self._extremes else None, flag, self.eps, self._sums)

    def _note(self) -> int:
        """Called while tracing, but not traced."""
        self.is_traced = True
        self._gate.note_trace()
        return 0

    def _allot(self, path: str, dtype: str, device: torch.device) -> int:
        """Called while tracing, but not traced; the result is a constant of the graph. Make slots, or return -1."""
        reason = ""
        if not (dtype.startswith(("torch.float", "torch.bfloat")) and "float8" not in dtype):
            reason = f"a tensor of {dtype}, which is not measured inside torch.compile"
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            reason = "inside a torch.func transform"
        else:
            reason = _why_not_written()
        if reason:
            self.refused[path] = reason
            return -1
        path = self.name + rest_of(path, self.name, self._taken)
        place = len(self.paths)
        with torch.utils._python_dispatch._disable_current_modes():
            wide = accumulator_dtype(device)
            setattr(self, f"sums_{place}", torch.zeros(len(_SUMS), dtype=wide, device=device))
            setattr(self, f"extremes_{place}", torch.full((2,), -torch.inf, dtype=wide, device=device))
            setattr(self, f"flag_{place}", self._gate.flag(device))
        self.paths.append(path)
        return place

    # as torch.compiler.assume_constant_result does, but without importing the compiler, which takes a second
    _note._dynamo_marked_constant = _allot._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def collect(self, buffer: StepBuffer, source: str) -> set[str]:
        """Move what the graphs wrote into ``buffer`` and reset the slots. Returns the paths. Does not synchronise."""
        for place, path in enumerate(self.paths):
            sums, extremes = getattr(self, f"sums_{place}"), getattr(self, f"extremes_{place}")
            row = torch.cat([sums, -extremes[:1], extremes[1:]])
            buffer.merge_rows(source, [path], row.unsqueeze(0), self.columns)
            sums.zero_()
            extremes.fill_(-torch.inf)
        for path, reason in self.refused.items():
            buffer.absent[source, path] = reason
        return set(self.paths)


class CompiledHooks:
    """What the hooks on modules do in compiled graphs.

    Args:
        eps: an element counts as near zero when ``|x| <= eps``.

    Attributes:
        gate: enables writing in graphs with our hooks.
    """

    def __init__(self, eps: float) -> None:
        self._eps = eps
        self.gate = RecordingFlag()
        self._taps: dict[tuple[str, str], TracedStatistics] = {}  # by kind of hook and name

    def add(
        self, kind: str, name: str, root: nn.Module, columns: frozenset[Column] = frozenset(), taken: Container[str] = ()
    ) -> TracedStatistics:
        """What a new hook does there; see :class:`TracedStatistics`."""
        tap = self._taps[kind, name] = TracedStatistics(name, self.gate, root, self._eps, columns, taken)
        return tap

    def clear(self) -> None:
        """All hooks were removed."""
        self._taps = {}

    def is_traced(self, kind: str, name: str) -> bool:
        """Whether this hook is part of a graph."""
        return self._taps[kind, name].is_traced

    @property
    def has_graphs(self) -> bool:
        """Whether any compiled graph contains a hook of ours."""
        return self.gate.is_traced and any(tap.is_traced for tap in self._taps.values())

    def collect(self, buffer: StepBuffer, values: ModuleValues) -> bool:
        """Move what the graphs wrote into ``buffer``, as outputs in ``values``. Returns whether they contain any module but the root."""
        seen = False
        for (_, name), tap in self._taps.items() if self.gate.is_traced else ():
            for path in tap.collect(buffer, n.ACTIVATION):
                values.adopt(n.ACTIVATION, name, path, tap.columns, _INSIDE_COMPILE)
                seen |= name != n.ROOT
            if tap.refused:
                seen = True
        return seen


def _why_not_written() -> str:
    """Why the graph inside another one that is being traced may not write; empty if it may, as those of checkpoints may from 2.9 on."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    may = CHECKPOINTS_WRITE_ONCE and getattr(output.compiler_fn, "_compiler_name", "").startswith(_FUNCTIONAL)
    tracer = output.current_tracer
    while tracer.parent is not None:
        if "checkpoint" not in str(tracer.source_target):
            return _CLOSED
        if not may:
            return RECOMPUTED
        tracer = tracer.parent
    return ""


def _add(tensor: Tensor, sums: Tensor, extremes: Tensor | None, flag: Tensor, eps: float, wanted: tuple[bool, ...]) -> None:
    """Traced. Uses ``where`` instead of multiplication, since 0 times NaN is NaN."""
    wide = tensor.to(sums.dtype)
    finite, magnitude, nothing = wide.isfinite(), wide.abs(), sums.new_zeros(())
    found = [
        torch.full((), wide.numel(), dtype=sums.dtype, device=wide.device),
        wide.sum() if wanted[1] else nothing,
        magnitude.sum() if wanted[2] else nothing,
        (wide * wide).sum() if wanted[3] else nothing,
        (magnitude <= eps).sum(dtype=sums.dtype) if wanted[4] else nothing,
        finite.logical_not().sum(dtype=sums.dtype),
    ]
    sums.add_(torch.where(flag, torch.stack(found), 0.0))
    if extremes is not None and wide.numel() > 0:
        largest = [torch.where(finite, -wide, -torch.inf).amax(), torch.where(finite, wide, -torch.inf).amax()]
        extremes.copy_(torch.maximum(extremes, torch.where(flag, torch.stack(largest), -torch.inf)))


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside wrappers such as DDP and ``torch.compile``."""
    *_, inner = wrapped_by(module)
    return inner


def wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules that it wraps, outermost first."""
    yield module
    while (inner := wrapped_in(module)) is not None:
        yield (module := inner)


def is_compiled(module: nn.Module) -> bool:
    """Whether any part of ``module`` is compiled by ``torch.compile``."""
    return any(True for _ in _compiled_parts(module))


def in_graphs(module: nn.Module) -> set[int]:
    """The identities of all modules that run inside a part of ``module`` that is compiled by ``torch.compile``."""
    return {id(inner) for part in _compiled_parts(module) for inner in part.modules()}


def _compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if "_orig_mod" in part._modules or part._compiled_call_impl is not None:
            yield part
