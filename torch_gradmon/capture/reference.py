"""A reference model beside the one that trains."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten

from ..core.errors import GradmonWarning, TrainingStopped
from ..core.fence import Fence
from ..core.keys import canonical_names
from ..core.torch_modes import SharedContext, autocast_cache_kept, copied_module, outside_dispatch_modes, untouched_generators
from ..statistics.request import PLAIN, refusal
from .hooks import Handles, ModuleHook, PassTracker, is_compiled, takes_hooks, tensors_of
from .measurer import untouched_rng

# --- A call without side effects ---

#: Called with a tensor and its copy.
Note = Callable[[Tensor, Tensor], object]
_SEALED = (type, types.FunctionType, types.ModuleType, nn.Module)  # not searched for tensors


def private(inputs: Any, carry: Callable[[Tensor], Tensor], note: Note | None = None) -> Any:
    """A deep copy of ``inputs`` in which each tensor is replaced by ``carry(tensor)``; types and identities are kept."""
    carried = [(tensor, carry(tensor)) for tensor in tensors_inside(inputs, {})]
    if note is not None:
        for pair in carried:
            note(*pair)
    try:
        return copy.deepcopy(inputs, {id(tensor): twin for tensor, twin in carried})
    except Exception as error:
        raise TypeError(f"an input cannot be copied, and might be changed otherwise ({type(error).__name__}: {error})") from error


def tensors_inside(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Each tensor in containers and attributes. Visited objects stay alive in ``seen``, so that no id is reused."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from tensors_inside(item, seen)
        if hasattr(value, "__dict__") and not isinstance(value, _SEALED):
            yield from tensors_inside(vars(value), seen)


def carrier(root: nn.Module, reference: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that makes the reference's inputs: a copy, on the reference's device if the tensor is on the model's.

    Other tensors stay where they are: lengths of sequences belong on the CPU. DDP with ``device_ids`` also moves CPU tensors.
    """
    here, there = (next((t.device for t in chain(m.parameters(), m.buffers())), None) for m in (root, reference))
    carried = {here}
    outer = dict(root._modules.items()).get("_orig_mod", root)
    if isinstance(outer, DistributedDataParallel) and outer.device_ids:
        carried.add(torch.device("cpu"))
    return lambda t: t.detach().to(there) if there and t.device in carried - {there} else _twin(t)


def _twin(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment, since both select kernels, which round differently."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if 0 < extent <= 4 * tensor.numel():  # not if most of it is gaps
            shift = tensor.data_ptr() % 64 // tensor.element_size()  # torch allocates at multiples of 64 bytes
            memory = tensor.new_empty(shift + extent)
            memory[shift:].copy_(tensor.as_strided((extent,), (1,)))
            return memory.as_strided(tensor.shape, tensor.stride(), shift)
    return tensor.clone()


@contextlib.contextmanager
def call_isolated(module: nn.Module, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
    """Run ``module`` without autograd and without side effects: autocast's cache of cast weights, compiled graphs, and the generators of
    its devices stay as they are, too.
    """
    with (
        outside_dispatch_modes(),
        torch.no_grad(),
        untouched_rng(),
        autocast_cache_kept(),
        untouched_generators({t.device for t in chain(module.parameters(), module.buffers(), inputs)}),
        _EAGER if is_compiled(module) else contextlib.nullcontext(),
        _unchanged(module),
        _WITHOUT_ADVICE,
    ):
        yield


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Let ``module`` write to copies of its buffers, and restore the attributes of its parts afterwards.

    Attributes describe buffers, such as the length up to which a cache was computed. An embedding with ``max_norm`` writes to its
    parameter, as nothing else in torch does.
    """
    parts, flags = list(module.modules()), [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    of_script = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]  # which have no other attributes
    plain = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
    tables: list[Any] = [table for p in plain for table in (vars(p), p._parameters, p._buffers, p._modules)]
    contents = [dict(table) for table in tables]
    buffers = [(part._buffers, name, buffer) for part in of_script for name, buffer in part._buffers.items()]
    written = {id(buffer) for p in parts for buffer in p._buffers.values() if buffer is not None}
    written |= {id(p.weight) for p in parts if isinstance(p, (nn.Embedding, nn.EmbeddingBag)) and p.max_norm is not None}
    twin = functools.cache(_twin)
    try:
        for table, content in zip(tables, contents, strict=True):
            table.update((name, twin(item)) for name, item in content.items() if id(item) in written)
        for table, name, buffer in buffers:
            table[name] = twin(buffer)
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        for table, name, buffer in buffers:
            table[name] = buffer
        for parameter, flag in flags:
            parameter.requires_grad = flag


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress the warning of re-entrant checkpoints that no input has gradients, as intended here.

    A filter of warnings is no option: setting one makes warnings that were shown once appear again.
    """
    check, checkpoint.check_backward_validity = checkpoint.check_backward_validity, lambda inputs: None
    try:
        yield
    finally:
        checkpoint.check_backward_validity = check


#: Both change the whole process.
_EAGER, _WITHOUT_ADVICE = SharedContext(lambda: torch.compiler.set_stance("force_eager")), SharedContext(_without_advice)


#: Types compared by value; other non-tensor inputs are never equal, which this stands for.
_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
_UNKNOWN = object()


@dataclass
class ReplayedOutputs:
    # what its arguments hold, with the model's tensors instead of their copies, and how; None if some came from elsewhere
    given: tuple[list[Any], TreeSpec] | None
    first: dict[str, Tensor] = field(default_factory=dict)  # copies of the tensors in its first argument, by path
    outputs: dict[str, Tensor] | None = None  # copies of the returned tensors, by path; None until it has returned


class ReplayedForward:
    """Notes the calls of the parts while the reference, or a part of it, runs on copies of the model's tensors. ``keeps_all``: what every
    call took and returned; otherwise only what can stand for a call of the model.
    """

    def __init__(self, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        # the model's tensor, its version, the copy and its version; keeping the copy prevents reuse of its id
        self._origins: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int, ReplayedOutputs]] = []
        self._outcomes: dict[tuple[str, int], ReplayedOutputs] = {}

    def note(self, tensor: Tensor, copy: Tensor) -> None:
        """``copy`` was made from the model's ``tensor`` for this run."""
        if not tensor.is_inference():  # inference tensors have no version counter
            self._origins[id(copy)] = tensor, tensor._version, copy, copy._version

    def note_call(self, begins: bool, name: str, args: tuple[Any, ...], value: Any) -> None:
        """A call of a part begins, with ``value`` as keyword arguments, or ends, with it as output."""
        if begins:
            number, kwargs = self._calls[name], value or {}
            self._calls[name] += 1
            leaves, structure = tree_flatten((args, dict(kwargs)))
            given = [self._of_model(leaf) for leaf in leaves]
            outcome = ReplayedOutputs(None if any(leaf is _UNKNOWN for leaf in given) else (given, structure))
            if self._keeps_all:
                first = first_of(args, kwargs)
                outcome.first = {path: tensor.detach().clone() for path, tensor in first if refusal(tensor) is None}
            self._open.append((name, number, outcome))
            return
        while self._open:  # inner calls that did not return have raised
            called, number, outcome = self._open.pop()
            if called == name:
                if self._keeps_all or outcome.given is not None:
                    tensors = tensors_of(value, "")
                    outcome.outputs = {path: tensor.detach().clone() for path, tensor in tensors if refusal(tensor) is None}
                    self._outcomes[name, number] = outcome
                return

    def outcome(self, name: str, number: int) -> ReplayedOutputs | None:
        return self._outcomes.get((name, number))

    def outputs_for(self, name: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The outputs of the call of that number if its inputs equal those of the model's module, else None."""
        outcome = self._outcomes.get((name, number))
        if outcome is None or outcome.given is None:
            return None
        given, structure = outcome.given
        leaves, of_call = tree_flatten((args, dict(kwargs)))
        return outcome.outputs if of_call == structure and all(map(self._is_same, given, leaves)) else None

    def _of_model(self, value: Any) -> Any:
        """The model's tensor of which this is the copy, or a simple value."""
        if isinstance(value, Tensor):
            origin = self._origins.get(id(value))
            return origin[0] if origin is not None and value._version == origin[3] else _UNKNOWN
        return value if isinstance(value, _SIMPLE) else _UNKNOWN

    def _is_same(self, given: Any, now: Any) -> bool:
        if isinstance(given, Tensor):
            return given is now and any(now is tensor and now._version == was for tensor, was, *_ in self._origins.values())
        return type(given) is type(now) and given == now

    @property
    def all_outputs(self) -> dict[str, deque[Tensor]]:
        found: dict[str, deque[Tensor]] = {}
        for (name, _), outcome in self._outcomes.items():
            for rest, tensor in (outcome.outputs or {}).items():
                found.setdefault(name + rest, deque()).append(tensor)
        return found


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in a module's first argument, by path; the first keyword argument if there is no positional one."""
    return list(tensors_of(args[0] if args else next(iter(kwargs.values()), None), ""))


class ReferencePass:
    """Runs the reference on the model's inputs, and keeps the outputs of its modules until they are taken.

    Neither training nor the reference is changed: the reference gets copies of the inputs, draws the random numbers that the model will
    draw, and builds no graph; attributes and buffers of its parts are restored. Other side effects, such as appending to a list, remain.
    Its own hooks run. Compiled parts run eagerly, so that every module is visible. A copy of the model gives the model's outputs to the
    last bit, unless torch uses other kernels without a graph.

    Memory: a copy of each wanted output, since later parts may work in place, and not every kernel moves the version counter; while the
    reference runs, also copies of inputs and buffers.
    """

    def __init__(self, passes: PassTracker, fence: Fence) -> None:
        self._passes, self._fence, self._handles = passes, fence, Handles()
        self.remove()

    def __bool__(self) -> bool:
        return self.module is not None

    def remove(self) -> None:
        self.end()
        #: Without its wrappers.
        self.module: nn.Module | None = None
        self._rename: Callable[[str], str] = str
        #: It failed and does not run any more; :attr:`reason` has the cause.
        self.is_off = False
        self._follows = False
        #: The reference's parameters by canonical and renamed name; their values are live.
        self.parameters: Mapping[str, nn.Parameter] = {}
        #: Why the last run kept nothing.
        self.reason: str | None = None

    def set(self, module: nn.Module, rename: Callable[[str], str], follows: bool = False) -> None:
        """Run ``module`` from now on, without its wrappers. ``follows``: before each pass, give parts the mode of their counterparts in
        the watched model, as for a copy taken at initialisation, and parameters their requires_grad, which also selects kernels.
        """
        self.remove()
        self.module, self._rename, self._follows = _unwrapped(module), rename, follows
        self.parameters = {rename(name): parameter for name, parameter in _named(self.module.named_parameters()).items()}

    def parts(self) -> dict[str, nn.Module]:
        found = {} if self.module is None else _named(self.module.named_modules())
        return {self._rename(name): part for name, part in found.items()}

    def run(
        self,
        root: nn.Module,
        wanted: Callable[[str], bool],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        note: Note | None = None,
    ) -> None:
        """Run the reference on the inputs of ``root``, and keep the outputs of its modules whose names are ``wanted``.

        With ``note``, called with each input tensor and its copy, it runs even if none is wanted. Inputs on the device of ``root`` are
        moved to that of the reference, which synchronises the devices; outputs stay there. After a failure, reported as one warning, the
        reference is off.
        """
        self.forget()
        if self.module is None or self.is_off:
            return
        hooked = {name: part for name, part in self.parts().items() if wanted(name) and takes_hooks(part)}
        if not hooked and note is None:
            self.reason = "the reference module has none of the modules that are measured"
            return
        try:
            with call_isolated(self.module):
                args, kwargs = private((args, kwargs), carrier(root, self.module), note)
                if self._follows:
                    _follow(self.module, root)
                handles = Handles()
                try:
                    for name, part in hooked.items():
                        handles.of_module(part.register_forward_hook(ModuleHook(self._returned, name)))
                    self.module(*args, **kwargs)
                finally:
                    handles.remove()
            self.reason = None if self._kept else "none of the modules that are measured ran in the reference module"
        except Exception as error:
            self.forget()
            if isinstance(error, (TrainingStopped, GradmonWarning)):
                raise
            self.is_off, self.reason = True, f"the reference module is off, because it raised {type(error).__name__}: {error}"
            self._fence.complaints.add("reference", "the reference module failed and is off; training continues", error)

    def run_part(
        self, part: nn.Module, watched: nn.Module, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note
    ) -> dict[str, Tensor]:
        """The outputs of ``part`` on the inputs of its counterpart ``watched``, by path. As :meth:`run`, but failures are raised."""
        assert self.module is not None
        with outside_dispatch_modes(), torch.no_grad():
            args, kwargs = private((args, kwargs), carrier(root, self.module), note)
        with call_isolated(part, tensors_inside((args, kwargs), {})):  # a dropout has no tensors: its inputs give the device
            if self._follows:
                _follow(part, watched)
            return dict(tensors_of(part(*args, **kwargs), ""))

    def _returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for path, tensor in tensors_of(output, name):
            if refusal(tensor) is None:
                self._kept.setdefault(path, deque()).append(tensor.detach().clone())

    def take(self, path: str) -> Tensor | None:
        """Remove and return the next output of ``path``, in the order of calls; None if there is none."""
        kept = self._kept.get(path)
        return kept.popleft() if kept else None

    def forget(self) -> None:
        self._kept: dict[str, deque[Tensor]] = {}

    def end(self) -> None:
        """End the step."""
        self.forget()
        self._handles.remove()
        # of runs by the loop: the running one, the last one, and whether they come before those of the model
        self._running: ReplayedForward | None = None
        self._ran: ReplayedForward | None = None
        self._leads: bool | None = None

    # --- runs by the loop ------------------------------------------------------------------------------------------------------

    def follow_loop(self, wanted: Callable[[str], bool]) -> None:
        """Until :meth:`end` keep the last run of the reference by the loop, which the model's next run is compared with, so no extra run is
        needed. ``wanted``: names of the parts whose first inputs and outputs are copied.

        torch-module-monitor compares this way: the reference runs first, on inputs of the loop's choice. It applies to steps in which the
        reference ran before the model. A loop that runs it after the model, such as a teacher, has another purpose.
        """
        self.end()
        if self.module is None or is_compiled(self.module):  # hooks would cause a recompilation, and not be called
            return
        for name, part in self.parts().items():
            if wanted(name) and takes_hooks(part):
                self._handles.on_calls(part, self._noted, name)
        if self._handles and takes_hooks(self.module):  # around the other hooks
            self._handles.of_module(self.module.register_forward_pre_hook(ModuleHook(self._began), prepend=True))
            self._handles.of_module(self.module.register_forward_hook(ModuleHook(self._ended), always_call=True))

    def take_run(self) -> ReplayedForward | None:
        """The run to compare the model's run with, which begins now, and whose outputs are kept; None if the loop made none."""
        ran, self._ran = self._ran, None
        if self._leads is None:
            self._leads = ran is not None
        if ran is None or not self._leads:
            return None
        self._kept, self.reason = ran.all_outputs, None
        return ran

    def _began(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # runs by the monitor are paused, and one in a backward pass is a recomputation
        ours = self._passes.paused or torch._C._current_graph_task_id() != -1
        self._running = (
            None if ours or torch._C._functorch.peek_interpreter_stack() is not None else ReplayedForward(keeps_all=True)
        )

    def _noted(self, begins: bool, name: str, part: nn.Module, args: tuple[Any, ...], value: Any = None) -> None:
        if self._running is None:
            return
        start = time.perf_counter()
        try:
            with torch.no_grad(), outside_dispatch_modes():
                self._running.note_call(begins, name, args, value)
        except Exception as error:
            self._running = None  # the monitor runs the reference itself then
            self._fence.complaints.add("reference:loop", "a run of the reference by the loop could not be followed", error)
        self._fence.seconds += time.perf_counter() - start

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._running is not None:
            self._ran = self._running if self._running.all_outputs else None
            self._running = None


def frozen_copy(
    module: nn.Module, remedy: str = "use as reference a module that you made in another way, from a checkpoint for instance"
) -> nn.Module:
    """A copy of ``module`` as it is now, without gradients and wrappers. ValueError, which ends with ``remedy``, if it cannot be copied:
    it is sharded, without values, with tensors of a graph, and so on.
    """
    module = _unwrapped(module)
    try:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            reason = "not initialised before the first forward" if is_lazy(tensor) else refusal(tensor)
            reason = "sharded by FSDP" if "_fsdp_wrapped_module" in name else reason
            if reason is not None:
                raise ValueError(f"{name} is {reason}")
        with torch.no_grad():  # else tensors of TorchScript are results of an operation; gradients are not copied
            frozen = copied_module(module)
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        for part, twin in zip(module.modules(), frozen.modules(), strict=False):
            forward = vars(part).get("forward")
            if forward is not None and vars(twin).get("forward") is forward:
                raise ValueError(f"forward() of a {type(part).__name__} was replaced by a function, which may call the original")
    except Exception as error:
        raise ValueError(f"{type(module).__name__} cannot be copied: {error}; {remedy}") from error
    return frozen


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = dict(module._modules.items()).get("module" if isinstance(module, DistributedDataParallel) else "_orig_mod")
    return module if inner is None else _unwrapped(inner)


def _named(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    things = dict(found)
    names = canonical_names(things)
    return {names[raw]: thing for raw, thing in things.items()}


def _follow(module: nn.Module, watched: nn.Module) -> None:
    for attribute, of in (("training", nn.Module.named_modules), ("requires_grad", nn.Module.named_parameters)):
        theirs = _named(of(_unwrapped(watched)))
        for name, thing in _named(of(module)).items():
            if hasattr(thing, attribute):  # a module from torch.jit.freeze has no mode
                setattr(thing, attribute, getattr(theirs.get(name, thing), attribute))
