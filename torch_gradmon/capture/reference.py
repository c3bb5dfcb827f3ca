"""A reference module that runs beside the watched model, so that activations can be compared with those of, say, its beginning."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import Complaints, GradmonWarning, SpikeError
from ..modes import unseen
from ..names import canonical_names
from ..statistics.reading import PLAIN, refusal
from .compiled import is_compiled
from .hooks import Handles, ModuleHook
from .measuring import untouched_rng
from .outputs import tensors_of

_SEALED = (type, types.FunctionType, types.ModuleType, nn.Module)  # not searched for tensors


class ReferencePass:
    """Runs the reference on what the model gets, and keeps what its modules return until it is taken.

    Neither the training nor the reference is changed by it: the reference gets copies of the inputs, draws the random numbers
    that the model will draw, and builds no graph; afterwards its parts have the attributes and buffers that they had. What it
    changes elsewhere, such as a list that it appends to, stays changed. Its own hooks run. Compiled parts run eagerly, so that
    every module shows. A copy gives what the model gives to the last bit, but where torch has other kernels without a graph.

    Memory: the wanted outputs, each a copy, since what follows in the reference may work in place, and not every kernel that
    does moves the version counter by which it could be told; while the reference runs, also copies of inputs and buffers.

    Args:
        complaints: where a failure is reported; after one the reference is off.
    """

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self._kept: dict[str, deque[Tensor]] = {}
        self.remove()

    def __bool__(self) -> bool:
        return self._module is not None

    def remove(self) -> None:
        """Forget the reference and all that was kept of it; calling it again does nothing."""
        self.forget()
        self._module: nn.Module | None = None
        self._rename: Callable[[str], str] = str
        self._follows = self._off = False
        #: The reference's parameters by canonical and renamed name; their values are live.
        self.parameters: Mapping[str, nn.Parameter] = {}
        #: Why the last run kept nothing.
        self.reason: str | None = None

    def set(self, module: nn.Module, rename: Callable[[str], str], follows: bool = False) -> None:
        """Run ``module`` from now on; the wrappers of DDP and torch.compile around it are taken off.

        ``rename`` makes what paths begin with out of canonical names. With ``follows``, for each pass parts take on the mode of
        their counterparts in the watched model, as for a copy taken at initialisation, and parameters requires_grad, by which
        torch chooses kernels too.
        """
        self.remove()
        self._module, self._rename, self._follows = _unwrapped(module), rename, follows
        self.parameters = {rename(name): parameter for name, parameter in _named(self._module.named_parameters()).items()}

    def run(self, root: nn.Module, wanted: Callable[[str], bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the reference on the inputs of ``root``; keep the outputs of those of its modules whose names are ``wanted``.

        What was kept before is dropped. Inputs that lie where ``root`` does go to where the reference lies, which synchronises
        the devices; outputs stay there. A failure becomes one complaint, and the reference is off.

        Raises:
            SpikeError, GradmonWarning: from within the reference; or anything, where complaints raise.
        """
        self.forget()
        if self._module is None or self._off:
            return
        parts = _named(self._module.named_modules())
        hooked = {renamed: part for name, part in parts.items() if wanted(renamed := self._rename(name))}
        if not hooked:
            self.reason = "the reference module has none of the modules that are measured"
            return
        try:
            with torch.no_grad(), unseen(), untouched_rng(), _apart(self._module), _unchanged(self._module), _without_advice():
                self._call(self._module, root, hooked, (args, kwargs))
            self.reason = None if self._kept else "none of the modules that are measured ran in the reference module"
        except Exception as error:
            self.forget()
            if isinstance(error, (SpikeError, GradmonWarning)):
                raise
            self._off, self.reason = True, f"the reference module is off, for it raised {type(error).__name__}: {error}"
            self._complaints.add("reference", "the reference module failed and is off; training goes on", error)

    def _call(self, module: nn.Module, root: nn.Module, hooked: dict[str, nn.Module], inputs: Any) -> None:
        if self._follows:
            for attribute, of in (("training", nn.Module.named_modules), ("requires_grad", nn.Module.named_parameters)):
                theirs = _named(of(_unwrapped(root)))
                for name, thing in _named(of(module)).items():
                    setattr(thing, attribute, getattr(theirs.get(name, thing), attribute))
        args, kwargs = _private(inputs, _carrier(root, module))
        handles = Handles()
        try:
            for name, part in hooked.items():
                handles.add(part.register_forward_hook(ModuleHook(self._returned, name)))
            module(*args, **kwargs)
        finally:
            handles.remove()

    def _returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for path, tensor in tensors_of(output, name):
            if refusal(tensor) is None:
                self._kept.setdefault(path, deque()).append(tensor.detach().clone())

    def take(self, path: str) -> Tensor | None:
        """The next output kept under ``path``, in the order of calls, which is forgotten; None if there is none."""
        kept = self._kept.get(path)
        return kept.popleft() if kept else None

    def forget(self) -> None:
        """Drop all outputs that were not taken."""
        self._kept = {}


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` as it is now, without gradients; the wrappers of DDP and torch.compile around it are taken off.

    Raises:
        ValueError: it cannot be copied: sharded, without values, holding tensors that came out of a graph, and the like.
    """
    module = _unwrapped(module)
    try:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            reason = "not initialised before the first forward" if is_lazy(tensor) else refusal(tensor)
            reason = "sharded by FSDP" if "_fsdp_wrapped_module" in name else reason
            if reason is not None:
                raise ValueError(f"{name} is {reason}")
        frozen = copy.deepcopy(module).requires_grad_(False)  # gradients are not copied along
        for part, twin in zip(module.modules(), frozen.modules(), strict=False):
            forward = vars(part).get("forward")
            if forward is not None and vars(twin).get("forward") is forward:
                raise ValueError(f"forward() of a {type(part).__name__} was replaced by a function, which may call the original")
    except Exception as error:
        remedy = "use as reference a module that you made in another way, from a checkpoint for instance"
        raise ValueError(f"{type(module).__name__} cannot be copied: {error}; {remedy}") from error
    return frozen


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module._modules.get("module" if isinstance(module, DistributedDataParallel) else "_orig_mod")
    return module if inner is None else _unwrapped(inner)


def _named(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    things = dict(found)
    names = canonical_names(things)
    return {names[raw]: thing for raw, thing in things.items()}


def _private(inputs: Any, carry: Callable[[Tensor], Tensor]) -> Any:
    """A deep copy of ``inputs``, in which each tensor is what ``carry`` makes of it; types and identities are kept."""
    tensors = list(_tensors_inside(inputs, {}))
    try:
        return copy.deepcopy(inputs, {id(tensor): carry(tensor) for tensor in tensors})
    except Exception as error:
        raise TypeError(f"an input cannot be copied, and might be changed otherwise ({type(error).__name__}: {error})") from error


def _tensors_inside(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Each tensor in containers and attributes; what was met is kept alive in ``seen``, so that no id is used again."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from _tensors_inside(item, seen)
        if hasattr(value, "__dict__") and not isinstance(value, _SEALED):
            yield from _tensors_inside(vars(value), seen)


def _carrier(root: nn.Module, reference: nn.Module) -> Callable[[Tensor], Tensor]:
    """What makes inputs of the reference: a copy, on the device of the reference if the tensor is on that of the model.

    The rest stays: lengths of sequences, for one, belong on the CPU. DDP with ``device_ids`` moves what comes from there.
    """
    here, there = (next((t.device for t in chain(m.parameters(), m.buffers())), None) for m in (root, reference))
    carried = {here}
    if isinstance(outer := root._modules.get("_orig_mod", root), DistributedDataParallel) and outer.device_ids:
        carried.add(torch.device("cpu"))
    return lambda t: t.detach().to(there) if there and t.device in carried - {there} else _twin(t)


def _twin(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment: kernels are chosen by both, and would round in other ways."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if 0 < extent <= 4 * tensor.numel():  # not where most would be gaps
            shift = tensor.data_ptr() % 64 // tensor.element_size()  # torch's own memory begins at multiples of 64 bytes
            memory = tensor.new_empty(shift + extent)
            memory[shift:].copy_(tensor.as_strided((extent,), (1,)))
            return memory.as_strided(tensor.shape, tensor.stride(), shift)
    return tensor.clone()


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Let ``module`` write to copies of its buffers; afterwards its parts have the attributes that they had before.

    Attributes go with buffers since they speak of them, like the length up to which a cache was computed. An embedding with
    ``max_norm`` writes to its parameter, as nothing else in torch does.
    """
    parts, flags = list(module.modules()), [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    tables: list[Any] = [table for p in parts for table in (vars(p), p._parameters, p._buffers, p._modules)]
    contents = [dict(table) for table in tables]
    written = {id(buffer) for p in parts for buffer in p._buffers.values() if buffer is not None}
    written |= {id(p.weight) for p in parts if isinstance(p, (nn.Embedding, nn.EmbeddingBag)) and p.max_norm is not None}
    twin = functools.cache(_twin)
    try:
        for table, content in zip(tables, contents, strict=True):
            table.update((name, twin(item)) for name, item in content.items() if id(item) in written)
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        for parameter, flag in flags:
            parameter.requires_grad = flag


@contextlib.contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Leave alone what autocast keeps of casts (until it ends, stale or not), compiled graphs, and the generators of all GPUs."""
    devices = sorted({t.device.index for t in chain(module.parameters(), module.buffers()) if t.is_cuda})
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.random.fork_rng(devices, enabled=bool(devices), device_type="cuda"))
        if is_compiled(module):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Re-entrant checkpoints warn where no input has gradients, which here none is meant to have.

    Not by a filter of warnings: to set one lets those that were shown once be shown again.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    check = getattr(module, "check_backward_validity", None)
    if module is None or check is None:
        yield
        return
    module.check_backward_validity = _accept  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.check_backward_validity = check  # type: ignore[attr-defined]


def _accept(_: Iterable[Any]) -> None:
    return None
