"""The refined coordinate check: how weights and inputs change each module's output, measured while the model runs.

With the watched model's weights W_t and inputs x_t, and the reference's W_0 and x_0 on the same batch, a module's output moves by

    f(x_t; W_t) - f(x_0; W_0) = [f(x_t; W_t) - f(x_t; W_0)] + [f(x_t; W_0) - f(x_0; W_0)],

the update term (W_t - W_0) x_t and the propagated term W_0 (x_t - x_0) (Haas et al. 2025, arXiv 2505.22491). x_0 and f(x_0; W_0) come from
the reference's run before the model's, f(x_t; W_0) from a run of the module's counterpart at the module's call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...core import keys as n
from ...core.fence import Fence
from ...core.records import Metric
from ...core.torch_modes import outside_dispatch_modes
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..attention.source import COMPILER, is_called_by
from ..hooks import Handles, ModuleHook, takes_hooks
from ..measurer import Measurer
from ..metric_functions import untouched_rng
from ..modules.compiled import is_compiled
from ..modules.pass_tracker import PassTracker
from ..reference.isolated_call import Note
from ..reference.source import ReferencePass, ReplayedForward
from .forward import ForwardCheck
from .terms import CheckTerms

_COMPILED = "inside torch.compile modules cannot be run once more at the reference's weights"
_NO_REFERENCE = 'no reference module is set; call monitor.set_reference_module("init") before training'


class CoordinateCheck:
    """Measures the terms of one training forward after the other.

    Each matched module runs at most once more per call, at the moment of the call: with the random numbers, autocast and inputs of the
    call. A run of a container also runs its parts, on other inputs. Outputs that such a run, or that of the whole reference, computed from
    the very tensors that a module gets are reused. So the first parts of containers cost nothing, and the total is at most one forward per
    level of nesting.

    Hooks are installed on the modules and on those of the reference only while such a forward runs.

    Memory: the first inputs and the outputs of the reference's modules, until the forward has ended.

    Args:
        measurer: runs metric functions and gets failures.
        fence: counts the time.
        passes: paused while the reference runs.
        reference: the module to compare with.

    Attributes:
        due: a check is due in this step.
        seen: a forward was checked in this step.
    """

    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker, reference: ReferencePass) -> None:
        self._complaints, self._fence, self._passes, self._reference = measurer.complaints, fence, passes, reference
        self._terms = CheckTerms(measurer)
        self._handles = Handles()
        self._buffer: StepBuffer | None = None
        self._inventory: ModelIndex | None = None
        self._forward: ForwardCheck | None = None
        self._reason = ""
        self.due = self.seen = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Start a step with the metrics due in it."""
        due = tuple(metric for metric in metrics if metric.source in n.RCC_SOURCES)
        self._terms.begin(buffer, due, inventory.modules)
        self._buffer, self._inventory, self.due, self.seen = buffer, inventory, bool(due), False
        self._reason = "" if self._reference else _NO_REFERENCE

    def end(self, compiled: bool) -> None:
        """End the step; ``compiled``: a part of the model is compiled."""
        self.leave()
        reason = self._reason or (_COMPILED if compiled else "")
        if self._buffer is not None and self.due and not self.seen and reason:
            self._buffer.absent.update(((source, ""), reason) for source in n.RCC_SOURCES)
        self._terms.end()
        self._buffer, self.due = None, False

    @property
    def awaits_forward(self) -> bool:
        """Whether a check is due that could not be done yet, for lack of a forward."""
        return self.due and not self.seen and not self._reason

    # --- the root --------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self, root: nn.Module) -> Iterator[Note | None]:
        """The context for the reference's run; yields a function to call with tensors and their copies. From its end on modules are
        checked.
        """
        if (forward := self._begun(root)) is None:
            yield None
            return
        run = ReplayedForward(keeps_all=True)
        with forward.noting(run):
            yield run.note
        if self._reference.is_off:
            self._reason = self._reference.reason or ""
            self._handles.remove()
            return
        self._check(root, forward, run)

    def behind(self, root: nn.Module, run: ReplayedForward) -> None:
        """Check modules against ``run``, a run of the reference by the training loop itself."""
        if (forward := self._begun(root)) is not None:
            self._check(root, forward, run)

    def _begun(self, root: nn.Module) -> ForwardCheck | None:
        """The check of this forward, with hooks on the reference installed; None if modules cannot be checked."""
        self.leave()
        if not self.due or not self._reference:
            return None
        if is_compiled(root) or is_called_by(COMPILER):  # the latter: torch.compile(model), assigned to another variable
            self._reason = _COMPILED
            return None
        forward = self._forward = ForwardCheck(root, self._reference, self._terms, self._passes)
        for name in self._wanted(root, forward).keys() & forward.parts.keys():
            self._register(forward.parts[name], name, self._part_called, self._part_returned)
        return forward

    def _check(self, root: nn.Module, forward: ForwardCheck, run: ReplayedForward) -> None:
        self.seen = True
        forward.start(n.ROOT, run)
        for name, module in self._wanted(root, forward).items():
            self._register(module, name, self._module_called, self._module_returned)

    def _register(self, module: nn.Module, name: str, called: Callable[..., None], returned: Callable[..., None]) -> None:
        self._handles.of_module(module.register_forward_pre_hook(ModuleHook(called, name), prepend=True, with_kwargs=True))
        self._handles.of_module(module.register_forward_hook(ModuleHook(returned, name)))

    def wants(self, name: str) -> bool:
        """Whether the module ``name`` is checked in this step."""
        return self.due and self._terms.wants(name)

    def leave(self) -> None:
        """End the forward: the root has returned or raised."""
        self._handles.remove()
        self._forward = None

    def _wanted(self, root: nn.Module, forward: ForwardCheck) -> dict[str, nn.Module]:
        """The matched modules, without the root and those that accept no Python hooks."""
        assert self._inventory is not None
        found = {name: reference() for name, reference in self._inventory.modules.items() if self._terms.wants(name)}
        return {
            name: module
            for name, module in found.items()
            if module is not None and module is not root and takes_hooks(module) and takes_hooks(forward.parts.get(name, module))
        }

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def _part_called(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._forward is not None:
            self._forward.part_called(name, args, kwargs or {})

    def _part_returned(self, name: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._forward is not None:
            self._forward.part_returned(name, output)

    def _module_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self._fenced(name, lambda forward: forward.called(name, module, args, kwargs or {}))

    def _module_returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._fenced(name, lambda forward: forward.returned(name, module, output))

    def _fenced(self, name: str, work: Callable[[ForwardCheck], None]) -> None:
        forward = self._forward
        if self._buffer is None or forward is None or not forward.is_checking:
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputation, in a backward pass inside the forward
            return
        start = time.perf_counter()
        try:
            with outside_dispatch_modes(), torch.no_grad(), untouched_rng():
                work(forward)
        except Exception as error:
            self._terms.set_absent(name, f"it could not be checked: {type(error).__name__}: {error}")
            self._complaints.add(f"check:{name}", f"the coordinate check of {name} failed; training continues", error)
        self._fence.add_time(time.perf_counter() - start)
