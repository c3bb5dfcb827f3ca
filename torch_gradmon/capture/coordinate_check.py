"""The coordinate check of a training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import keys as n
from ..core.fence import Fence
from ..core.records import Metric
from ..core.torch_modes import outside_dispatch_modes
from ..statistics.request import refusal
from ..step.buffer import StepBuffer
from ..step.model_index import ModelIndex
from .hooks import COMPILER, Handles, PassTracker, is_called_by, is_compiled, takes_hooks, tensors_of
from .measurer import Measurer, untouched_rng
from .module_values import rest_of
from .reference import Note, ReferencePass, ReplayedForward, first_of

# --- The terms of the check for one call of one module ---


def _difference(*tensors: Tensor | None) -> Tensor | str:
    """The first tensor, minus the second if given, in float32 or wider; or the reason why that is not possible."""
    found: list[Tensor] = []
    for tensor in tensors:
        if tensor is None:
            return "the reference module has no such tensor"
        if (reason := refusal(tensor)) is not None:
            return reason
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return f"a tensor of dtype {tensor.dtype}, which has no difference"
        if tensor.layout != torch.strided:
            return f"a tensor of layout {tensor.layout}"
        if not tensor.numel():
            return "it has no elements"
        found.append(tensor.to(torch.promote_types(tensor.dtype, torch.float32)))
    if len(found) == 1:
        return found[0]
    if found[0].shape != found[1].shape:
        return f"it has another shape in the reference module, {tuple(found[1].shape)}"
    return found[0] - found[1].to(found[0].device)


def _normalised(x: Tensor | None, module: nn.LayerNorm) -> Tensor | None:
    if x is None or refusal(x) is not None or x.shape[-len(module.normalized_shape) :] != module.normalized_shape:
        return None
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.layer_norm(wide, module.normalized_shape, None, None, module.eps)


def _without(output: Tensor | None, module: nn.Module) -> Tensor | None:
    bias: Any = getattr(module, "bias", None)
    if output is None or not isinstance(bias, Tensor):
        return output
    if refusal(bias) is not None:
        return None
    wide = torch.promote_types(output.dtype, torch.float32)  # no rounding before the next subtraction
    return output.to(wide) - bias.detach().to(output.device)


_COMPILED = "inside torch.compile modules cannot be run once more at the reference's weights"


class _Frame:
    def __init__(self, name: str, run: ReplayedForward | None, start: Mapping[str, Tensor]) -> None:
        # run: of the reference or of the module's counterpart on the inputs of this call; None if none was needed
        self.name, self.run, self.start = name, run, start
        self.calls: Counter[str] = Counter()  # number of calls of each module in it so far
        self.moved: Mapping[str, Tensor] = {}  # f(x_t; W_0), the counterpart's outputs, by path


class CoordinateCheck:
    """Measures the terms of one training forward after the other.

    Each matched module runs at most once more per call, at the moment of the call: with the random numbers, autocast and inputs of the
    call. A run of a container also runs its parts, on other inputs. Outputs that such a run, or that of the whole reference, computed from
    the very tensors that a module gets are reused. So the first parts of containers cost nothing, and the total is at most one forward per
    level of nesting.

    Hooks are installed on the modules and on those of the reference only while such a forward runs.

    Memory: the first inputs and the outputs of the reference's modules, until the forward has ended.
    """

    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker, reference: ReferencePass) -> None:
        self._measurer, self._fence, self._passes, self._reference = measurer, fence, passes, reference
        self._buffer: StepBuffer | None = None  # of a step in which a check is due
        self._metrics: Sequence[Metric] = ()
        self._modules: Mapping[str, Callable[[], nn.Module | None]] = {}
        self._handles = Handles()
        self._root: nn.Module | None = None
        self._parts: Mapping[str, nn.Module] = {}  # modules of the reference by name
        self._frames: list[_Frame] = []  # the running calls, first that of the root
        self._run: ReplayedForward | None = None  # the running one of the reference, or of a part of it
        self._thread = 0
        self._reason = ""
        self.seen = False  # a forward was checked in this step

    @property
    def due(self) -> bool:
        return self._buffer is not None

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        self._metrics = tuple(metric for metric in metrics if metric.source in n.RCC_SOURCES)
        self._buffer, self._modules, self.seen = buffer if self._metrics else None, inventory.modules, False
        needed = 'no reference module is set; call monitor.set_reference_module("init") before training'
        self._reason = "" if self._reference else needed

    def end(self, compiled: bool) -> None:
        """End the step; ``compiled``: a part of the model is compiled."""
        self.leave()
        reason = self._reason or (_COMPILED if compiled else "")
        if not self.seen and reason:
            self._set_absent("", reason)
        self._buffer, self._metrics = None, ()

    @property
    def awaits_forward(self) -> bool:
        """Whether a check is due that could not be done yet, for lack of a forward."""
        return self.due and not self.seen and not self._reason

    # --- the root --------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self, root: nn.Module) -> Iterator[Note | None]:
        """The context for the reference's run; yields what is called with tensors and their copies. From its end on modules are checked."""
        if not self._begin_forward(root):
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
        """Check modules against ``run``, a run of the reference by the training loop itself."""
        if self._begin_forward(root):
            self._check(root, run)

    def _begin_forward(self, root: nn.Module) -> bool:
        """Install hooks on the reference. Returns whether modules can be checked."""
        self.leave()
        if not self.due or not self._reference:
            return False
        if is_compiled(root) or is_called_by(COMPILER):  # the latter: torch.compile(model), assigned to another variable
            self._reason = _COMPILED
            return False
        self._root, self._parts, self._thread = root, self._reference.parts(), threading.get_ident()
        for name in self._wanted(root).keys() & self._parts.keys():
            self._handles.on_calls(self._parts[name], self._of_part, name, first=True)
        return True

    def _check(self, root: nn.Module, run: ReplayedForward) -> None:
        """Check modules from now on; ``run`` is that of the whole reference."""
        self.seen, self._frames = True, [_Frame(n.ROOT, run, {})]
        for name, module in self._wanted(root).items():
            self._handles.on_calls(module, self._of_module, name, first=True)

    def wants(self, name: str) -> bool:
        return any(metric.matches(name) for metric in self._metrics)

    def leave(self) -> None:
        self._handles.remove()
        self._root, self._parts, self._frames, self._run = None, {}, [], None

    def _wanted(self, root: nn.Module) -> dict[str, nn.Module]:
        found = {name: reference() for name, reference in self._modules.items() if self.wants(name)}
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

    def _of_part(self, begins: bool, name: str, part: nn.Module, args: tuple[Any, ...], value: Any = None) -> None:
        if self._run is not None and threading.get_ident() == self._thread:
            self._run.note_call(begins, name, args, value)

    def _of_module(self, begins: bool, name: str, module: nn.Module, args: tuple[Any, ...], value: Any = None) -> None:
        # not in runs of the reference or replicas of DataParallel
        if not self._frames or self._run is not None or threading.get_ident() != self._thread:
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputation, in a backward pass inside the forward
            return
        start = time.perf_counter()
        try:
            with outside_dispatch_modes(), torch.no_grad(), untouched_rng():
                if begins:
                    self._called(name, module, args, value or {})
                else:
                    self._returned(name, module, value)
        except Exception as error:
            self._set_absent(name, f"it could not be checked: {type(error).__name__}: {error}")
            self._measurer.complaints.add(f"check:{name}", f"the coordinate check of {name} failed; training continues", error)
        self._fence.seconds += time.perf_counter() - start

    def _called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the module works in place or draws random numbers."""
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
            self._set_absent(name, "inside a torch.func transform")
        elif part is None or outcome is None:
            self._set_absent(name, "the reference module has no such module, or called it less often")
        else:
            try:  # before metric functions, which may draw random numbers
                # from an enclosing run with the same inputs, innermost first, or from a run of its own
                known = (outer.run.outputs_for(name, number, args, kwargs) for outer, number in reversed(around) if outer.run)
                moved = next((outputs for outputs in known if outputs is not None), None)
                if moved is None:
                    frame.run = ReplayedForward()
                    assert self._root is not None
                    with self._passes.pause(), self._noting(frame.run):  # model and reference may share modules
                        moved = self._reference.run_part(part, module, self._root, args, kwargs, frame.run.note)
                frame.moved = moved
            finally:
                self._measure_inputs(name, module, dict(first_of(args, kwargs)), outcome.first)

    def _returned(self, name: str, module: nn.Module, output: Any) -> None:
        while len(self._frames) > 1:  # inner calls that did not return have raised
            frame = self._frames.pop()
            if frame.name == name:
                if frame.moved and not self._passes.paused:
                    self._measure_outputs(frame, module, dict(tensors_of(output, "")))
                return

    # --- the terms of a call ---------------------------------------------------------------------------------------------------

    def _set_absent(self, name: str, reason: str, sources: tuple[str, ...] = n.RCC_SOURCES) -> None:
        if self._buffer is not None:
            self._buffer.absent.update(((source, name), reason) for source in sources)

    def _measure_inputs(self, name: str, module: nn.Module, now: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        """Measure the inputs of a call and of the reference, by path: |x_t| and |x_t - x_0|."""
        if isinstance(module, nn.Embedding):
            sources = (n.RCC_PROPAGATED, n.RCC_INPUT, n.RCC_INPUT_DIFFERENCE)
            self._set_absent(name, "an embedding takes indices, which have no difference", sources)
            return
        for path, x in now.items():
            self._put(n.RCC_INPUT, name, path, x)
            self._put(n.RCC_INPUT_DIFFERENCE, name, path, x, start.get(path))
        if isinstance(module, nn.LayerNorm):
            # the weight of a layer norm multiplies the normalised input
            normalised = [_normalised(each.get(""), module) for each in (now, start)]
            self._put(n.RCC_UPDATE, name, ".weight/x_t", normalised[0])
            self._put(n.RCC_PROPAGATED, name, ".weight/x_t-x_0", *normalised)

    def _measure_outputs(self, frame: _Frame, module: nn.Module, now: Mapping[str, Tensor]) -> None:
        """Measure the outputs of a call, by path: ``now`` f(x_t; W_t), beside the frame's f(x_t; W_0) and f(x_0; W_0)."""
        name, moved, start = frame.name, frame.moved, frame.start
        for path, output in now.items():
            self._put(n.RCC_UPDATE, name, path, output, moved.get(path))
            if not isinstance(module, nn.Embedding):
                self._put(n.RCC_PROPAGATED, name, path, moved.get(path), start.get(path))
        if not isinstance(module, (nn.Linear, nn.LayerNorm)) or now.keys() != {""}:
            return
        part = self._parts[name]
        weight = [_without(now.get(""), module), _without(moved.get(""), part), _without(start.get(""), part)]
        self._put(n.RCC_UPDATE, name, ".weight", weight[0], weight[1])
        self._put(n.RCC_PROPAGATED, name, ".weight", weight[1], weight[2])
        self._put(n.RCC_UPDATE, name, ".weight/W_t x_t", weight[0])
        self._put(n.RCC_PROPAGATED, name, ".weight/W_0 x_0", weight[2])

    def _put(self, source: str, name: str, path: str, tensor: Tensor | None, *minus: Tensor | None) -> None:
        metrics = [metric for metric in self._metrics if metric.source == source and metric.matches(name)]
        if not metrics:
            return
        assert self._buffer is not None
        key = name + (path if path.startswith(".weight") else rest_of(name + path, name, self._modules))
        value = _difference(tensor, *minus)
        if isinstance(value, str):
            self._buffer.absent[source, key] = value
        else:
            self._measurer.apply(self._buffer, source, key, metrics, [value], merging=True)
