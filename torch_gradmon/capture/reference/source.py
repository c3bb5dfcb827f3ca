"""A reference module that runs next to the watched model, to compare activations, for example with those of its initial state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...core.errors import GradmonWarning, SpikeError, WarningLog
from ...core.keys import canonical_names
from ...core.torch_modes import copied_module, outside_dispatch_modes
from ...statistics.request import refusal
from ..hooks import Handles, ModuleHook, takes_hooks
from ..modules.structure import tensors_of
from .isolated_call import Note, call_isolated, carrier, private, tensors_inside

# --- replay ---


#: Types compared by value; other non-tensor inputs are never equal.
_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class ReplayedOutputs:
    """One call of a part.

    Attributes:
        given: its arguments with the model's tensors instead of their copies; None if some came from elsewhere.
        first: copies of the tensors in its first argument, by path.
        outputs: copies of the returned tensors, by path; None until it has returned.
    """

    given: tuple[Any, ...] | None
    first: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] | None = None


class ReplayedForward:
    """Notes the calls of the parts while the reference, or a part of it, runs on copies of the model's tensors.

    Args:
        keeps_all: keep what every call took and returned; otherwise only what can stand for a call of the model.
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

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part is called."""
        number = self._calls[name]
        self._calls[name] += 1
        outcome = ReplayedOutputs(self._traced((args, dict(kwargs))))
        if self._keeps_all:
            outcome.first = {path: tensor.detach().clone() for path, tensor in first_of(args, kwargs) if refusal(tensor) is None}
        self._open.append((name, number, outcome))

    def returned(self, name: str, output: Any) -> None:
        """A part has returned; inner calls that did not return have raised."""
        while self._open:
            called, number, outcome = self._open.pop()
            if called == name:
                if self._keeps_all or outcome.given is not None:
                    tensors = tensors_of(output, "")
                    outcome.outputs = {path: tensor.detach().clone() for path, tensor in tensors if refusal(tensor) is None}
                    self._outcomes[name, number] = outcome
                return

    def outcome(self, name: str, number: int) -> ReplayedOutputs | None:
        """The call of that number, counted from 0, or None."""
        return self._outcomes.get((name, number))

    def outputs_for(self, name: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The outputs of the call of that number if its inputs equal those of the model's module, else None."""
        outcome = self._outcomes.get((name, number))
        if outcome is None or outcome.given is None or not self._same(outcome.given, (args, dict(kwargs))):
            return None
        return outcome.outputs

    def _traced(self, value: Any) -> Any:
        """``value`` with the model's tensors in it; None if it holds anything else that cannot be compared."""
        found: Any
        if isinstance(value, Tensor):
            origin = self._origins.get(id(value))
            return origin[0] if origin is not None and value._version == origin[3] else None
        if isinstance(value, dict):
            found = {key: (self._traced(item), item is None) for key, item in value.items()}
            parts = found.values()
        elif type(value) in (tuple, list):
            found = parts = [(self._traced(item), item is None) for item in value]
        else:
            return value if isinstance(value, _SIMPLE) else None
        if any(part is None and not is_none for part, is_none in parts):
            return None
        if isinstance(value, dict):
            return {key: part for key, (part, _) in found.items()}
        return type(value)(part for part, _ in found)

    def _same(self, given: Any, now: Any) -> bool:
        if type(given) is not type(now):
            return False
        if isinstance(given, Tensor):
            return given is now and any(now is tensor and now._version == was for tensor, was, *_ in self._origins.values())
        if isinstance(given, dict):
            return given.keys() == now.keys() and all(self._same(item, now[key]) for key, item in given.items())
        if isinstance(given, (tuple, list)):
            return len(given) == len(now) and all(map(self._same, given, now))
        equal: bool = given == now
        return equal


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in a module's first argument, by path; the first keyword argument if there is no positional one."""
    return list(tensors_of(args[0] if args else next(iter(kwargs.values()), None), ""))


# --- source ---


class ReferencePass:
    """Runs the reference on the model's inputs, and keeps the outputs of its modules until they are taken.

    Neither training nor the reference is changed: the reference gets copies of the inputs, draws the random numbers that the model will
    draw, and builds no graph; attributes and buffers of its parts are restored. Other side effects, such as appending to a list, remain.
    Its own hooks run. Compiled parts run eagerly, so that every module is visible. A copy of the model gives the model's outputs to the
    last bit, unless torch uses other kernels without a graph.

    Memory: a copy of each wanted output, since later parts may work in place, and not every kernel moves the version counter; while the
    reference runs, also copies of inputs and buffers.

    Args:
        complaints: gets a failure, after which the reference is off.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self._kept: dict[str, deque[Tensor]] = {}
        self.remove()

    def __bool__(self) -> bool:
        return self._module is not None

    @property
    def module(self) -> nn.Module | None:
        """The reference without wrappers, or None."""
        return self._module

    @property
    def is_off(self) -> bool:
        """Whether it failed and will not run any more; :attr:`reason` has the cause."""
        return self._off

    def remove(self) -> None:
        """Remove the reference and all kept outputs. Idempotent."""
        self.forget()
        self._module: nn.Module | None = None
        self._rename: Callable[[str], str] = str
        self._follows = self._off = False
        #: The reference's parameters by canonical and renamed name; their values are live.
        self.parameters: Mapping[str, nn.Parameter] = {}
        #: Why the last run kept nothing.
        self.reason: str | None = None

    def set(self, module: nn.Module, rename: Callable[[str], str], follows: bool = False) -> None:
        """Run ``module`` from now on, without its wrappers of DDP and torch.compile.

        Args:
            module: the reference.
            rename: maps canonical names to the start of paths.
            follows: before each pass, give parts the mode of their counterparts in the watched model, as for a copy taken at
                initialisation, and parameters their requires_grad, which also selects kernels.
        """
        self.remove()
        self._module, self._rename, self._follows = _unwrapped(module), rename, follows
        self.parameters = {rename(name): parameter for name, parameter in _named(self._module.named_parameters()).items()}

    def parts(self) -> dict[str, nn.Module]:
        """The reference's modules by canonical and renamed name."""
        found = {} if self._module is None else _named(self._module.named_modules())
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

        With ``note``, called with each input tensor and its copy, it runs even if none is wanted. Earlier outputs are dropped. Inputs on
        the device of ``root`` are moved to that of the reference, which synchronises the devices; outputs stay there. After a failure,
        reported as one warning, the reference is off.

        Raises:
            SpikeError, GradmonWarning: from within the reference; or anything, if complaints raise.
        """
        self.forget()
        if self._module is None or self._off:
            return
        hooked = {name: part for name, part in self.parts().items() if wanted(name) and takes_hooks(part)}
        if not hooked and note is None:
            self.reason = "the reference module has none of the modules that are measured"
            return
        try:
            with call_isolated(self._module):
                self._call(self._module, root, hooked, private((args, kwargs), carrier(root, self._module), note))
            self.reason = None if self._kept else "none of the modules that are measured ran in the reference module"
        except Exception as error:
            self.forget()
            if isinstance(error, (SpikeError, GradmonWarning)):
                raise
            self._off, self.reason = True, f"the reference module is off, because it raised {type(error).__name__}: {error}"
            self._complaints.add("reference", "the reference module failed and is off; training continues", error)

    def run_part(
        self, part: nn.Module, watched: nn.Module, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note
    ) -> dict[str, Tensor]:
        """The outputs of ``part`` of the reference on the inputs of its counterpart ``watched``, by path. As :meth:`run`, but failures are
        raised.
        """
        assert self._module is not None
        with outside_dispatch_modes(), torch.no_grad():
            args, kwargs = private((args, kwargs), carrier(root, self._module), note)
        with call_isolated(part, tensors_inside((args, kwargs), {})):  # a dropout has no tensors: its inputs give the device
            if self._follows:
                _follow(part, watched)
            return dict(tensors_of(part(*args, **kwargs), ""))

    def _call(self, module: nn.Module, root: nn.Module, hooked: dict[str, nn.Module], inputs: Any) -> None:
        if self._follows:
            _follow(module, root)
        args, kwargs = inputs
        handles = Handles()
        try:
            for name, part in hooked.items():
                handles.of_module(part.register_forward_hook(ModuleHook(self._returned, name)))
            module(*args, **kwargs)
        finally:
            handles.remove()

    def _returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for path, tensor in tensors_of(output, name):
            if refusal(tensor) is None:
                self._kept.setdefault(path, deque()).append(tensor.detach().clone())

    def adopt(self, outputs: dict[str, deque[Tensor]]) -> None:
        """Keep ``outputs`` of a run by the loop itself, by path."""
        self._kept, self.reason = outputs, None

    def take(self, path: str) -> Tensor | None:
        """Remove and return the next output of ``path``, in the order of calls; None if there is none."""
        kept = self._kept.get(path)
        return kept.popleft() if kept else None

    def forget(self) -> None:
        """Drop all outputs that were not taken."""
        self._kept = {}


def frozen_copy(
    module: nn.Module, remedy: str = "use as reference a module that you made in another way, from a checkpoint for instance"
) -> nn.Module:
    """A copy of ``module`` as it is now, without gradients and without wrappers of DDP and torch.compile.

    Raises:
        ValueError: it cannot be copied (sharded, without values, with tensors of a graph, and so on); the message ends with ``remedy``.
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
    """Give the parts of ``module`` the mode of their counterparts."""
    for attribute, of in (("training", nn.Module.named_modules), ("requires_grad", nn.Module.named_parameters)):
        theirs = _named(of(_unwrapped(watched)))
        for name, thing in _named(of(module)).items():
            if hasattr(thing, attribute):  # a module from torch.jit.freeze has no mode
                setattr(thing, attribute, getattr(theirs.get(name, thing), attribute))
