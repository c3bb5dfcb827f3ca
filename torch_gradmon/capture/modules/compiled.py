"""What hooks on modules do where ``torch.compile`` traces them: statistics become part of the graph, which writes them to slots.

Nothing of this runs in Python but at the time of tracing: the graph gets operations that add to tensors of ours, and a flag on
the device lets them through on monitored steps only. So there is one graph, whatever steps are monitored.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.moments import ALWAYS, Column
from ...statistics.tensor_access import accumulator_dtype, threshold
from ...step.buffer import StepBuffer
from ...step.model_index import wrapped_in
from .structure import rest_of, tensors_of

_SUMS = (Column.COUNT, Column.SUM, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE)


class RecordingFlag:
    """The flags that let compiled graphs write, one on each device; changing them launches a fill and synchronises nothing."""

    def __init__(self) -> None:
        self._open = True
        self._flags: dict[torch.device, Tensor] = {}

    def flag(self, device: torch.device) -> Tensor:
        """The flag on ``device``, a 0-d boolean."""
        if device not in self._flags:
            self._flags[device] = torch.full((), self._open, dtype=torch.bool, device=device)
        return self._flags[device]

    def set(self, is_open: bool) -> None:
        """Open or shut all of them."""
        if is_open != self._open:
            self._open = is_open
            for flag in self._flags.values():
                flag.fill_(is_open)


class TracedStatistics:
    """What one module's hook does in a graph.

    Each place where a graph is made for the module's output gets slots of its own, so a module that is called twice in a graph,
    or compiled again for another shape, adds up.

    Args:
        name: of the module.
        gate: lets values through.
        root: the watched model; a graph of an evaluation pass gets nothing.
        eps: an element counts as near zero when ``|x| <= eps``.
        columns: what is asked for that a graph can have.
        taken: names of modules, which no path may have.

    Attributes:
        paths: of the slots, in order.
        refused: why a path has none.
        is_traced: whether the hook is part of any graph.
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
        """Not traced but called while tracing."""
        self.is_traced = True
        return 0

    def _allot(self, path: str, dtype: str, device: torch.device) -> int:
        """Not traced but called while tracing, and its result a constant of the graph: make slots, or refuse with -1."""
        reason = ""
        if not (dtype.startswith(("torch.float", "torch.bfloat")) and "float8" not in dtype):
            reason = f"a tensor of {dtype}, which is not measured inside torch.compile"
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            reason = "inside a torch.func transform"
        elif _in_closed_part():
            reason = "inside of a part of a graph that may not write to anything, such as a branch of torch.cond"
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

    # what torch.compiler.assume_constant_result does, after importing the compiler, which takes a second
    _note._dynamo_marked_constant = _allot._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def collect(self, buffer: StepBuffer, source: str) -> set[str]:
        """Bring what the graphs wrote into ``buffer``, and empty the slots: the paths. Does not synchronise."""
        for place, path in enumerate(self.paths):
            sums, extremes = getattr(self, f"sums_{place}"), getattr(self, f"extremes_{place}")
            row = torch.cat([sums, -extremes[:1], extremes[1:]])
            buffer.merge_rows(source, [path], row.unsqueeze(0), self.columns)
            sums.zero_()
            extremes.fill_(-torch.inf)
        for path, reason in self.refused.items():
            buffer.absent[source, path] = reason
        return set(self.paths)


def _in_closed_part() -> bool:
    """Whether what is being traced is a graph inside of another one; those of checkpoints may write, others may not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        if "checkpoint" not in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return False


def _add(tensor: Tensor, sums: Tensor, extremes: Tensor | None, flag: Tensor, eps: float, wanted: tuple[bool, ...]) -> None:
    """Traced. By ``where`` and not by multiplication, since 0 times NaN is NaN."""
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
    """The model inside of what DDP, ``torch.compile`` and the like put around it."""
    *_, inner = wrapped_by(module)
    return inner


def wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """The module, and what it is the wrapper of."""
    yield module
    while (inner := wrapped_in(module)) is not None:
        yield (module := inner)


def is_compiled(module: nn.Module) -> bool:
    """Whether any part of ``module`` was given to ``torch.compile``."""
    return any("_orig_mod" in child._modules or child._compiled_call_impl is not None for child in module.modules())
