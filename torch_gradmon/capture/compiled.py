"""Hooks on modules under ``torch.compile``: statistics become part of the graph, which writes them to slots.

This runs in Python only while tracing. The graph gets operations that add to tensors of the monitor, and a flag on the device enables them
on monitored steps only. So there is one graph, whichever steps are monitored.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Container, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import keys as n
from ..core.moments import ALWAYS, Column
from ..core.records import Metric
from ..core.torch_modes import CHECKPOINTS_WRITE_ONCE
from ..statistics.request import accumulator_dtype, threshold
from ..step.buffer import StepBuffer
from .hooks import compiled_parts, tensors_of, unwrapped
from .module_values import ModuleValues, rest_of

_WHAT = {
    n.INPUT: "inputs",
    n.INPUT_GRADIENT: "gradients of inputs",
    n.ACTIVATION_GRADIENT: "gradients of outputs",
    n.ACTIVATION_DIFFERENCE: "differences to a reference",
}
SHARES_GRAPH = (
    "a compiled block shares its graph with one of the same class that has no hook; then select the module in all of them"
)
RECOMPUTED = "inside a checkpoint in torch.compile they need torch 2.9 or newer, and the backend inductor or aot_eager"
#: Backends that take writes out of a graph. Others run it as it was traced: a checkpoint recomputes with the graph's inputs, and torch
#: 2.13 raises in the backward pass if one of them was written to.
_FUNCTIONAL = ("inductor", "aot_", "cudagraphs")
_Places = Container[tuple[str, str]]  # each a kind of hook and the name of a module
_SUMS = (Column.COUNT, Column.SUM, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE)


class _Slot(NamedTuple):
    """Where graphs write the statistics of one tensor in a module's output."""

    tap: TracedStatistics
    path: str
    sums: Tensor
    extremes: Tensor


class TracedStatistics:
    """What one module's hook does in a graph, except in those of evaluation passes.

    Blocks of one class that are compiled one by one share a graph if nothing that its guards check differs between them. So what is
    traced reads no name, and tensors from attributes, which become inputs. The attributes of a tap whose module was not traced itself
    are made when the guards of a shared graph look for them (``__getattr__``), which also tells that the hook is part of that graph.
    """

    in_graph: bool

    def __init__(self, name: str, module: nn.Module, of: CompiledHooks, root: nn.Module) -> None:
        self.name, self._of = name, of
        self.module, self._root = weakref.ref(module), weakref.ref(unwrapped(root))
        self.eps, self.is_late = of.eps, len(of.traced) > 0  # is_late: registered after a graph was traced
        self.refused: dict[str, str] = {}  # reasons for tensors that have no slots, by what the path adds to the name
        self.request(frozenset())

    def request(self, columns: frozenset[Column]) -> None:
        self.columns = columns | ALWAYS if columns else columns
        self.sums = tuple(column in columns for column in _SUMS) if columns else ()
        self.extremes = Column.MIN in columns or Column.MAX in columns

    def __getattr__(self, name: str) -> Any:
        kind, _, place = name.partition("_at_")
        if name == "in_graph":
            self._note()
        elif kind in ("sums", "extremes", "flag"):
            self._make(place)
        else:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.__dict__[name]

    def trace(self, output: Any) -> None:
        """Traced: add the statistics of each tensor in ``output`` to its slots."""
        self._note()
        root = self._root()
        if not (self.in_graph and self.sums) or root is None or not root.training or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            for rest, tensor in tensors_of(output, ""):
                place = self._allot(rest, str(tensor.dtype), tensor.device)
                if place:
                    sums, flag = getattr(self, f"sums_at_{place}"), getattr(self, f"flag_at_{place}")
                    extremes = getattr(self, f"extremes_at_{place}") if self.extremes else None
                    _add(tensor.detach(), sums, extremes, flag, self.eps, self.sums)

    @property
    def is_traced(self) -> bool:
        return "in_graph" in self.__dict__

    def _note(self) -> int:
        """Called while tracing, but not traced."""
        if not self.is_traced:
            self.in_graph = True
            self._of.traced.append(self)
            self._of.reasons = None
        return 0

    def _allot(self, rest: str, dtype: str, device: torch.device) -> str:
        """Called while tracing, but not traced; the result is a constant of the graph. Make slots, or return nothing."""
        reason = ""
        if not (dtype.startswith(("torch.float", "torch.bfloat")) and "float8" not in dtype):
            reason = f"a tensor of {dtype}, which is not measured inside torch.compile"
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            reason = "inside a torch.func transform"
        else:
            reason = _why_not_written() or (SHARES_GRAPH if self._may_be_without_hook() else "")
        if reason:
            self.refused[rest] = reason
            self._of.reasons = None
            return ""
        place = f"{device}|{rest}".encode().hex()  # of which any path makes the name of an attribute
        if f"sums_at_{place}" not in self.__dict__:
            self._make(place)
        return place

    def _may_be_without_hook(self) -> bool:
        """Whether the frame that is being traced belongs to a part of the model of which another one of its class has no such hook.

        That one's graph would do for this part too, since guards do not look at empty dicts of hooks, and write nothing in some calls.
        """
        from torch._dynamo.symbolic_convert import InstructionTranslator

        root, module = self._root(), self.module()
        hooked = {id(tap.module()) for (kind, _), tap in self._of.taps.items() if kind == n.ACTIVATION}
        frame = InstructionTranslator.current_tx().output.root_tx.f_locals.values()
        for part in {id(value): value for value in frame if isinstance(value, nn.Module) and value is not root}.values():
            places = {name for name, inner in part.named_modules() if inner is module}
            others = [other for other in root.modules() if type(other) is type(part)] if places and root is not None else []
            seats = (seat for other in others for seat in other.named_modules(remove_duplicate=False))
            if any(name in places and id(inner) not in hooked for name, inner in seats):
                return True
        return False

    # as torch.compiler.assume_constant_result does, but without importing the compiler, which takes a second
    _note._dynamo_marked_constant = _allot._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _make(self, place: str) -> None:
        where, _, rest = bytes.fromhex(place).decode().partition("|")
        device = torch.device(where)
        with torch.utils._python_dispatch._disable_current_modes():
            wide = accumulator_dtype(device)
            sums = torch.zeros(len(_SUMS), dtype=wide, device=device)
            extremes = torch.full((2,), -torch.inf, dtype=wide, device=device)
        setattr(self, f"sums_at_{place}", sums)
        setattr(self, f"extremes_at_{place}", extremes)
        setattr(self, f"flag_at_{place}", self._of.flag(device))
        self._of.slots.setdefault(device, []).append(_Slot(self, self._of.path(self.name, rest), sums, extremes))


class CompiledHooks:
    def __init__(self, eps: float) -> None:
        self.eps = threshold(eps, torch.float64)
        self._is_open = True
        self._flags: dict[torch.device, Tensor] = {}
        self.clear()

    def flag(self, device: torch.device) -> Tensor:
        """The flag that lets compiled graphs write on ``device``, a 0-d bool."""
        if device not in self._flags:
            self._flags[device] = torch.full((), self._is_open, dtype=torch.bool, device=device)
        return self._flags[device]

    def open(self, is_open: bool) -> None:
        """Set all flags. That launches a fill for each device, and does not synchronise."""
        if is_open != self._is_open:
            self._is_open = is_open
            for flag in self._flags.values():
                flag.fill_(is_open)

    def clear(self) -> None:
        self.taps: dict[tuple[str, str], TracedStatistics] = {}  # by kind of hook and name
        self.traced: list[TracedStatistics] = []  # the hooks that are part of a graph
        self.slots: dict[torch.device, list[_Slot]] = {}  # what graphs write to, by device
        self._columns: frozenset[Column] = frozenset()
        self._inside: _Places = ()
        self._taken: Container[str] = ()
        # for values that are missing, by source and path; None until they are asked for
        self.reasons: dict[tuple[str, str], str] | None = None

    def add(self, kind: str, name: str, module: nn.Module, root: nn.Module) -> TracedStatistics:
        tap = self.taps[kind, name] = TracedStatistics(name, module, self, root)
        return tap

    def ignore(self, *_: object) -> None:
        """What a hook hears that is there for a graph only."""

    def remove(self, kind: str, name: str) -> None:
        tap = self.taps.pop((kind, name))
        self.traced = [each for each in self.traced if each is not tap]
        kept = {device: [slot for slot in slots if slot.tap is not tap] for device, slots in self.slots.items()}
        self.slots = {device: slots for device, slots in kept.items() if slots}

    def request(self, metrics: Sequence[Metric], measured: _Places, inside: _Places, taken: Container[str]) -> None:
        """Graphs compute what the views in ``metrics`` need, of outputs of ``measured`` modules. What a graph computes once it is traced
        stays, since a change would cause a recompilation. ``inside``: hooks in compiled parts of the model; ``taken``: names that no path
        may have.
        """
        self._inside, self._taken, self.reasons = inside, taken, None
        if not (self.traced and self._columns):
            views = (metric.columns for metric in metrics if metric.source == n.ACTIVATION and metric.function is None)
            self._columns = frozenset[Column]().union(*views)
        for place, tap in self.taps.items():
            if not self.traced or (tap.is_late and not tap.is_traced):
                tap.request(self._columns if place in measured else frozenset())

    def path(self, name: str, rest: str) -> str:
        return name + rest_of(name + rest, name, self._taken)

    def collect(self, buffer: StepBuffer, values: ModuleValues, metrics: Sequence[Metric]) -> None:
        """Move what the graphs wrote into ``buffer``, as outputs in ``values``, with reasons for the rest. Does not synchronise."""
        for slots in self.slots.values():
            sums, extremes = [slot.sums for slot in slots], [slot.extremes for slot in slots]
            stacked = torch.stack(extremes)
            rows = torch.cat([torch.stack(sums), -stacked[:, :1], stacked[:, 1:]], dim=1).unbind()
            adopted = [values.adopt(slot.tap.name, slot.path, slot.tap.columns) for slot in slots]
            if any(adopted):
                paths, kept = [slot.path for slot in compress(slots, adopted)], [*compress(rows, adopted)]
                buffer.merge_rows(n.ACTIVATION, paths, kept, self._columns | ALWAYS)
        self.discard()
        if self.reasons is None:
            self.reasons = self._explained(metrics)
        buffer.absent.update(self.reasons)

    def discard(self) -> None:
        for slots in self.slots.values():
            extremes = [slot.extremes for slot in slots]
            torch._foreach_zero_([slot.sums for slot in slots])
            torch._foreach_copy_(extremes, list(torch.full_like(torch.stack(extremes), -torch.inf).unbind()))

    def _explained(self, metrics: Sequence[Metric]) -> dict[tuple[str, str], str]:
        """Why hooks in graphs have no values: by source and path, or source, name and metric."""
        found: dict[tuple[str, str], str] = {}
        refused: dict[str, dict[str, str]] = {}  # of blocks that share a graph only one was traced
        for tap in self.traced:
            refused.setdefault(_like(tap.name), {}).update(tap.refused)
        for tap in self.traced:
            found.update({(n.ACTIVATION, self.path(tap.name, rest)): why for rest, why in refused[_like(tap.name)].items()})
        late = [tap for place, tap in self.taps.items() if tap.is_late and not tap.is_traced and place in self._inside]
        for tap in (*self.traced, *late):
            columns = tap.columns if tap.is_traced else frozenset()
            for metric in metrics:
                if metric.source in n.MODULE_SOURCES and metric.matches(tap.name):
                    reason = _why_not_computed(metric, columns)
                    if reason:
                        found[metric.source, f"{tap.name}/{metric.name}"] = reason
        return found


def _like(name: str) -> str:
    """The same for modules at the same place of other blocks."""
    return re.sub(r"\d+", "0", name)


def _why_not_computed(metric: Metric, columns: frozenset[Column]) -> str:
    """Why graphs that compute these ``columns`` of outputs have no values of the metric; empty if they have."""
    if metric.source != n.ACTIVATION:
        return f"{_WHAT[metric.source]} are not measured inside torch.compile, where only outputs are"
    if metric.function is not None:
        if metric.built_in or not callable(metric.function):
            return f"{metric.name} needs the whole output, and inside torch.compile only the one-pass statistics of outputs are measured"
        return "functions are not called inside torch.compile, where only built-ins are measured"
    if metric.split_calls:
        return "calls of a module are not told apart inside torch.compile"
    if metric.columns <= columns:
        return ""
    return "inside torch.compile, which had traced the model before the metric was added; add metrics before the first call"


def _why_not_written() -> str:
    """Why the graph inside another one that is being traced may not write; empty if it may, as those of checkpoints may from 2.9 on."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    may = CHECKPOINTS_WRITE_ONCE and getattr(output.compiler_fn, "_compiler_name", "").startswith(_FUNCTIONAL)
    tracer = output.current_tracer
    while tracer.parent is not None:
        if "checkpoint" not in str(tracer.source_target):
            return "inside a part of a graph that may not write to anything, such as a branch of torch.cond"
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


def in_graphs(module: nn.Module) -> set[int]:
    """The identities of all modules that run inside a part of ``module`` that is compiled by ``torch.compile``."""
    return {id(inner) for part in compiled_parts(module) for inner in part.modules()}


def alike(module: nn.Module) -> list[list[nn.Module]]:
    """Modules at the same place of parts of one class that are compiled one by one, and so share a graph if they have the same hooks."""
    seats: dict[tuple[type[nn.Module], str], list[nn.Module]] = {}
    for part in compiled_parts(module):
        whole = unwrapped(part)
        for name, inner in whole.named_modules():
            seats.setdefault((type(whole), name), []).append(inner)
    return [members for members in seats.values() if len(members) > 1]
