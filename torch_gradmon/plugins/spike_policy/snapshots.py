"""Snapshots of a training run, and the way back to one of them, in place: every tensor stays the object that it was."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...core.files import replacing
from ...step.ranks import is_dtensor
from .buffers import is_fixed
from .policy import Rollback

Load = Callable[[], Mapping[str, Any]]


class _Kept(NamedTuple):
    """A snapshot: after which step and how many batches it was taken, its content, and its file."""

    step: int
    batches: int
    load: Load
    file: Path | None


class Snapshots:
    """The last snapshots of a model and its optimizers, of this rank's part of each tensor.

    Args:
        policy: how many, where, and what else belongs to them.
        rank: names the files.
    """

    def __init__(self, policy: Rollback, rank: int) -> None:
        self._keep, self._every, self._age, self._rank = policy.keep, policy.every, policy.age, rank
        self._extra_state = [_weakly(each) for each in policy.extra_state]
        self._parent, self._directory, self._place = policy.directory, "", (0, 0)
        self._kept: list[_Kept] = []  # oldest first
        self._loaded: Mapping[str, Any] = {}
        self._since: int | None = None  # the step after which the last one was taken, or at which it was gone back to one
        self._used: int | None = None  # the one gone back to last, if none was taken since

    @property
    def steps(self) -> list[int]:
        """The steps of the kept snapshots, ascending."""
        return [kept.step for kept in self._kept]

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after ``step``."""
        return self._since is None or step - self._since >= self._every

    def take(self, step: int, batches: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Copy everything to the host after ``step`` and this number of batches. Waits for the device."""
        self._since, self._used = step, None  # even if it fails, so that it is not tried again in every step
        taken = {
            "tensors": [_on_host(tensor) for tensor in _tensors(model, optimizers)],
            "optimizers": [[_copied(optimizer.state.get(p)) for p in _parameters(optimizer)] for optimizer in optimizers],
            "options": [[{k: _copied(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers],
            "also": [_copied(each.state_dict()) for each in self._others()],
        }
        self._kept.append(_Kept(step, batches, *self._stored(step, taken)))
        while len(self._kept) > self._keep:
            self._drop(0)

    def _stored(self, step: int, taken: Mapping[str, Any]) -> tuple[Load, Path | None]:
        if self._parent is None:
            return lambda: taken, None
        if not self._directory:  # one of its own: another run may be given the same path
            Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._directory = tempfile.mkdtemp(prefix=f"rank{self._rank}-", dir=self._parent)
            self._place = _identity(self._directory)
            self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._check_directory()
        file = Path(self._directory) / f"step{step}.pt"
        leaves, shape = tree_flatten(taken)
        with replacing(file) as target:  # a killed run leaves no half of one
            leaves = [_written(leaf, target) for leaf in leaves]
        return lambda: tree_unflatten(_read_back(leaves, file), shape), file

    def _check_directory(self) -> None:
        """Raises OSError where others have put something in the place of the directory."""
        if _identity(self._directory) != self._place:
            raise OSError(f"{self._directory!r} is no longer the directory that was made for snapshots")

    def _drop(self, place: int) -> None:
        dropped = self._kept.pop(place)
        if dropped.file is not None:
            with contextlib.suppress(OSError):
                self._check_directory()
                dropped.file.unlink()

    def choose(self, step: int, known: Collection[int]) -> int | None:
        """The step of the snapshot among ``known`` to restore after a spike in ``step``; None without any.

        It is the newest one that is old enough, else the oldest. If one was restored since the last snapshot was taken, only older
        ones qualify, or the oldest if there are none.
        """
        steps = sorted(known)
        if self._used is not None:
            steps = [taken for taken in steps if taken < self._used] or steps[:1]
        old = [taken for taken in steps if step - taken >= self._age]
        return max(old) if old else min(steps, default=None)

    def batches_of(self, step: int) -> int:
        """The number of batches before the snapshot of ``step``."""
        return next(kept.batches for kept in self._kept if kept.step == step)

    def load(self, to: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the snapshot of step ``to`` for :meth:`go_back`. Drops later snapshots.

        Raises:
            ValueError: the model or its optimizers have other tensors now; nothing is changed.
            OSError: the file no longer exists, or was changed.
        """
        while self._kept[-1].step > to:
            self._drop(-1)
        saved = self._kept[-1].load()
        there = _tensors(model, optimizers)
        shapes, known = [_local(t).shape for t in there], [t.shape for t in saved["tensors"]]
        counts, before = [len(_parameters(o)) for o in optimizers], [len(states) for states in saved["optimizers"]]
        if shapes != known or counts != before:
            raise ValueError("parameters or buffers have come, gone or changed their shape since")
        self._loaded = saved

    def go_back(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Restore the loaded snapshot after a spike in ``step``.

        Raises:
            Exception: any error of a ``load_state_dict`` in ``extra_state``, after everything else is restored.
        """
        saved, self._loaded = self._loaded, {}
        self._since = step  # the usual number of steps remains until the next snapshot
        self._used = self._kept[-1].step
        restore = _Restore()
        with torch.no_grad():
            for tensor, value in zip(_tensors(model, optimizers), saved["tensors"], strict=True):
                _local(tensor).copy_(value)
            for optimizer, states in zip(optimizers, saved["optimizers"], strict=True):
                for parameter, state in zip(_parameters(optimizer), states, strict=True):
                    if state is None:
                        optimizer.state.pop(parameter, None)
                    else:
                        optimizer.state[parameter] = restore(optimizer.state.get(parameter), state, parameter)
        if self._extra_state:
            for optimizer, groups in zip(optimizers, saved["options"], strict=True):
                for group, options in zip(optimizer.param_groups, groups, strict=True):
                    for name, value in options.items():
                        group[name] = restore(group.get(name), value, None)
            for each, state in zip(self._others(), saved["also"], strict=True):
                each.load_state_dict(_copied(state))

    def _others(self) -> list[Any]:
        found = [reference() for reference in self._extra_state]
        if any(each is None for each in found):
            raise ValueError("an object of extra_state= is gone; keep it in a variable of the loop")
        return found

    def forget(self) -> None:
        """Drop all snapshots and their files."""
        while self._kept:
            self._drop(0)
        if self._directory:
            self._directory = ""
            self._remove()
        self._used = self._since = None


def _identity(directory: str) -> tuple[int, int]:
    found = os.lstat(directory)
    return found.st_dev, found.st_ino


class _OnDisk(NamedTuple):
    """What a file has the bytes of. The file has nothing else: unpickling could run what somebody else has put there."""

    dtype: torch.dtype
    shape: torch.Size
    size: int
    checksum: int


def _written(leaf: Any, file: IO[bytes]) -> Any:
    """Write a tensor; anything else stays as it is."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_quantized or not leaf.numel():
        return leaf
    data: Any = memoryview(leaf.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    file.write(data)
    return _OnDisk(leaf.dtype, leaf.shape, data.nbytes, zlib.crc32(data))


def _read_back(leaves: Sequence[Any], file: Path) -> list[Any]:
    with file.open("rb") as source:
        return [_tensor_in(source, leaf) if isinstance(leaf, _OnDisk) else leaf for leaf in leaves]


def _tensor_in(file: IO[bytes], leaf: _OnDisk) -> Tensor:
    data = bytearray(file.read(leaf.size))
    if len(data) != leaf.size or zlib.crc32(data) != leaf.checksum:
        raise OSError(f"{file.name!r} was changed since it was written")
    return torch.frombuffer(data, dtype=leaf.dtype).reshape(leaf.shape)


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The tensors that training changes, except the optimizers' state; each once.

    The parameters are those of the optimizers: during a forward of FSDP2 the model has others.
    """
    owned = [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
    buffers = (buffer for buffer in model.buffers() if not is_fixed(buffer))
    return list({id(tensor): tensor for tensor in (*owned, *buffers)}.values())


def _weakly(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # some take no references
        return lambda: thing


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    """The part that is on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]


def _on_host(tensor: Tensor) -> Tensor:
    local = _local(tensor)
    return local.clone() if local.device.type == "cpu" else local.to("cpu")


def _copied(value: Any) -> Any:
    """A copy on the host that shares nothing."""
    if isinstance(value, Tensor):
        return _on_host(value)
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return copy.deepcopy(value)


class _Restore:
    """Puts saved values in the place of others: into the same tensors where there are such."""

    def __init__(self) -> None:
        self._written: set[int] = (
            set()
        )  # what stood for two values that were one when the snapshot was taken, or two, is not written twice

    def __call__(self, now: Any, saved: Any, parameter: Tensor | None) -> Any:
        if isinstance(saved, Tensor):
            return self._tensor(now, saved, parameter)
        if isinstance(saved, dict):
            there = now if isinstance(now, dict) else {}
            found = {name: self(there.get(name), each, parameter) for name, each in saved.items()}
            if not isinstance(now, dict):
                return found
            now.clear()
            now.update(found)
            return now
        if type(saved) in (list, tuple):
            old = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
            return type(saved)(self(before, each, parameter) for before, each in zip(old, saved, strict=True))
        return copy.deepcopy(saved)

    def _tensor(self, now: Any, saved: Tensor, parameter: Tensor | None) -> Tensor:
        if isinstance(now, Tensor) and id(now) not in self._written:
            local = _local(now)
            if local.shape == saved.shape and local.dtype == saved.dtype:
                local.copy_(saved)
                self._written.add(id(now))
                return now
        # of a state that has changed its shape since, such as the history of L-BFGS
        return saved.clone() if parameter is None or saved.dim() == 0 else saved.to(parameter.device, copy=True)
