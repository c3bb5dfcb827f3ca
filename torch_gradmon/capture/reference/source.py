"""A reference module that runs next to the watched model, to compare activations, for example with those of its initial state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...core.accelerator import copied_module
from ...core.errors import GradmonWarning, SpikeError, WarningLog
from ...core.keys import canonical_names
from ...core.torch_modes import outside_dispatch_modes
from ...statistics.tensor_access import refusal
from ..hooks import Handles, ModuleHook, takes_hooks
from ..modules.structure import tensors_of
from .isolated_call import Note, call_isolated, carrier, private, tensors_inside


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
