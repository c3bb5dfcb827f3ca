"""The refined coordinate check: what weights and inputs do to the change of each module's output, while the model runs.

With the watched model's weights W_t and inputs x_t, and the reference's W_0 and x_0 on the same batch, a module's output moves by

    f(x_t; W_t) - f(x_0; W_0) = [f(x_t; W_t) - f(x_t; W_0)] + [f(x_t; W_0) - f(x_0; W_0)],

the update term (W_t - W_0) x_t and the propagated term W_0 (x_t - x_0) (Haas et al. 2025, arXiv 2505.22491). x_0 and f(x_0; W_0)
come of the reference's run before the model's, f(x_t; W_0) of a run of the module's counterpart when the module is called.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.fence import Fence
from ...core.metric import Metric
from ...core.torch_modes import outside_dispatch_modes
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..attention.function_patch import COMPILER, is_called_by
from ..hooks import Handles, ModuleHook, takes_hooks
from ..measurer import Measurer, untouched_rng
from ..modules.compiled import is_compiled
from ..modules.pass_tracker import PassTracker
from ..modules.structure import tensors_of
from ..reference.isolated_call import Note
from ..reference.replay import ReplayedForward, first_of
from ..reference.source import ReferencePass
from .terms import CheckTerms

_COMPILED = "inside torch.compile modules cannot be run once more at the reference's weights"
_NO_REFERENCE = 'no reference module is set; call monitor.set_reference_module("init") before training'


class _Frame:
    """A call that is running, of the root or of a module.

    Attributes:
        run: of the reference, or of the module's counterpart, on what the call was given; None where it was not needed.
        calls: how often each module was called in it so far.
        moved: what the counterpart returned, by path.
    """

    def __init__(self, name: str, run: ReplayedForward | None, start: Mapping[str, Tensor]) -> None:
        self.name, self.run, self.start = name, run, start
        self.calls: Counter[str] = Counter()
        self.moved: Mapping[str, Tensor] = {}


class CoordinateCheck:
    """Measures the terms of one training forward after the other.

    Each module that is asked for is run at most once more for each of its calls, at the moment of the call: so with the random
    numbers, the autocast and the inputs of the call. A run of a container runs its parts, on inputs of its own; what such a run,
    or that of the whole reference, computed on the very tensors that a module inside is given is not computed again. So the
    first parts of containers cost nothing, and all together as many forwards as containers lie in each other, at most.

    Hooks hang on the modules and on those of the reference while such a forward runs, and at no other time.

    Memory: the first inputs and the outputs of the modules of the reference, until the forward has ended.

    Args:
        measurer: runs metric functions, and is told of what fails.
        guard: told of the time that it takes.
        passes: is paused while the reference runs.
        reference: what to compare with.

    Attributes:
        compiled: a part of the model is compiled.
        seen: whether any forward was checked in this step.
    """

    def __init__(self, measurer: Measurer, guard: Fence, passes: PassTracker, reference: ReferencePass) -> None:
        self._complaints, self._guard, self._passes, self._reference = measurer.complaints, guard, passes, reference
        self._terms = CheckTerms(measurer)
        self._handles = Handles()
        self._buffer: StepBuffer | None = None
        self._inventory: ModelIndex | None = None
        self._root: nn.Module | None = None
        self._parts: dict[str, nn.Module] = {}
        self._frames: list[_Frame] = []
        self._run: ReplayedForward | None = None  # the one that is running
        self._thread = 0
        self._reason = ""
        self.due = self.compiled = self.seen = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Start a step with the metrics that are due in it."""
        due = tuple(metric for metric in metrics if metric.source in n.RCC_SOURCES)
        self._terms.begin(buffer, due, inventory.modules)
        self._buffer, self._inventory, self.due, self.seen = buffer, inventory, bool(due), False
        self._reason = "" if self._reference else _NO_REFERENCE

    def end(self) -> None:
        """End the step."""
        self.leave()
        reason = self._reason or (_COMPILED if self.compiled else "")
        if self._buffer is not None and self.due and not self.seen and reason:
            self._buffer.absent.update(((source, ""), reason) for source in n.RCC_SOURCES)
        self._terms.end()
        self._buffer, self.due = None, False

    @property
    def awaits_forward(self) -> bool:
        """Whether a check is due, and no forward was seen that it could be done in."""
        return self.due and not self.seen and not self._reason

    # --- the root --------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self, root: nn.Module) -> Iterator[Note | None]:
        """The reference runs inside; it is to be told of copies by what this gives. From its end on modules are checked."""
        if not self._begins(root):
            yield None
            return
        run = ReplayedForward(keeps_all=True)
        with self._noting(run):
            yield run.note
        if self._reference.is_off:
            self._reason = self._reference.reason or ""
            self._handles.remove()
            return
        self._check(root, run)

    def behind(self, root: nn.Module, run: ReplayedForward) -> None:
        """The loop itself has run the reference, and ``run`` has what became of it: from now on modules are checked."""
        if self._begins(root):
            self._check(root, run)

    def _begins(self, root: nn.Module) -> bool:
        """Whether modules can be checked in this run of the model; hooks of the reference hang then."""
        self.leave()
        if not self.due or not self._reference:
            return False
        if is_compiled(root) or is_called_by(COMPILER):  # the latter: torch.compile(model), kept beside the model
            self._reason = _COMPILED
            return False
        self._root, self._parts, self._thread = root, self._reference.parts(), threading.get_ident()
        for name in self._wanted(root).keys() & self._parts.keys():
            self._hang(self._parts[name], name, self._part_called, self._part_returned)
        return True

    def _check(self, root: nn.Module, run: ReplayedForward) -> None:
        self.seen = True
        self._frames = [_Frame(n.ROOT, run, {})]
        for name, module in self._wanted(root).items():
            self._hang(module, name, self._module_called, self._module_returned)

    def _hang(self, module: nn.Module, name: str, called: Callable[..., None], returned: Callable[..., None]) -> None:
        self._handles.of_module(module.register_forward_pre_hook(ModuleHook(called, name), prepend=True, with_kwargs=True))
        self._handles.of_module(module.register_forward_hook(ModuleHook(returned, name)))

    def wants(self, name: str) -> bool:
        """Whether the module of that name is checked in this step."""
        return self.due and self._terms.wants(name)

    def leave(self) -> None:
        """The root has returned or raised."""
        self._handles.remove()
        self._root, self._parts, self._frames, self._run = None, {}, [], None

    def _wanted(self, root: nn.Module) -> dict[str, nn.Module]:
        """The modules that are asked for: not the root, and none that refuses hooks of Python."""
        assert self._inventory is not None
        found = {name: reference() for name, reference in self._inventory.modules.items() if self._terms.wants(name)}
        return {
            name: module
            for name, module in found.items()
            if module is not None and module is not root and takes_hooks(module) and takes_hooks(self._parts.get(name, module))
        }

    @contextlib.contextmanager
    def _noting(self, run: ReplayedForward) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def _part_called(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._run is not None and threading.get_ident() == self._thread:
            self._run.called(name, args, kwargs or {})

    def _part_returned(self, name: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._run is not None and threading.get_ident() == self._thread:
            self._run.returned(name, output)

    def _module_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self._fenced(name, lambda: self._called(name, module, args, kwargs or {}))

    def _module_returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._fenced(name, lambda: self._returned(name, module, output))

    def _fenced(self, name: str, work: Callable[[], None]) -> None:
        # in a run of ours are modules that model and reference share; on another thread, replicas of DataParallel
        if self._run is not None or self._buffer is None or not self._frames or threading.get_ident() != self._thread:
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputation, in a backward pass within the forward
            return
        start = time.perf_counter()
        try:
            with outside_dispatch_modes(), torch.no_grad(), untouched_rng():
                work()
        except Exception as error:
            self._terms.say(name, f"it could not be checked: {type(error).__name__}: {error}")
            self._complaints.add(f"check:{name}", f"the coordinate check of {name} failed; training goes on", error)
        self._guard.account(time.perf_counter() - start)

    def _called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the module works in place, and before it draws random numbers."""
        numbers = [frame.calls[name] for frame in self._frames]
        root = self._frames[0].run
        assert root is not None
        outcome, part = root.outcome(name, numbers[0]), self._parts.get(name)
        frame = _Frame(name, None, {} if outcome is None else outcome.outputs or {})
        around = list(zip(self._frames, numbers, strict=True))
        for each in self._frames:
            each.calls[name] += 1
        self._frames.append(frame)
        if self._passes.paused:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._terms.say(name, "inside a torch.func transform")
        elif part is None or outcome is None:
            self._terms.say(name, "the reference module has no such module, or called it less often")
        else:
            try:  # first, for metric functions may draw random numbers
                frame.moved = self._moved(frame, around, part, module, args, kwargs)
            finally:
                self._terms.of_inputs(name, module, dict(first_of(args, kwargs)), outcome.first)

    def _moved(
        self,
        frame: _Frame,
        around: list[tuple[_Frame, int]],
        part: nn.Module,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Mapping[str, Tensor]:
        """f(x_t; W_0): of a run around this call that was given the same, the innermost first, or of a run of its own."""
        for outer, number in reversed(around):
            known = None if outer.run is None else outer.run.outputs_for(frame.name, number, args, kwargs)
            if known is not None:
                return known
        assert self._root is not None
        frame.run = ReplayedForward()
        self._passes.paused = True  # modules that model and reference share
        try:
            with self._noting(frame.run):
                return self._reference.run_part(part, module, self._root, args, kwargs, frame.run.note)
        finally:
            self._passes.paused = False

    def _returned(self, name: str, module: nn.Module, output: Any) -> None:
        while len(self._frames) > 1:  # those inside that did not return have raised
            frame = self._frames.pop()
            if frame.name == name:
                if frame.moved and not self._passes.paused:
                    now = dict(tensors_of(output, ""))
                    self._terms.of_outputs(name, module, self._parts[name], now, frame.moved, frame.start)
                return
