"""Saved while it is watched: what is written is what the bare object would write, and its copies have nothing of ours."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import torch_gradmon as gradmon
from benchmarks.faults.ranks import one_rank
from torch_gradmon import ModuleMonitor, MonitorMixin


class Layer(nn.Linear, MonitorMixin):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_monitoring and (monitor := self.get_module_monitor()) is not None:
            monitor.log_tensor("own", y.norm(dim=-1))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Layer(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class OwnState(Net):
    """A module that says itself what is saved of it, as DDP does."""

    def __getstate__(self) -> dict[str, Any]:
        return copy.copy(self.__dict__)


class WholeState(torch.optim.SGD):
    """An optimizer that saves all that it has, hooks too."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Loop:
    """A training with all that may be saved of one."""

    def __init__(self, kind: type[Net] = Net) -> None:
        self.model = kind()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = GradScaler("cpu", init_scale=4.0)

    def watch(self, preset: str = "full") -> ModuleMonitor:
        monitor = gradmon.watch(self.model, self.optimizer, scaler=self.scaler, preset=preset)
        monitor.add_activation_metric("rms")
        monitor.add_gradient_metric("norm", stages=["local"])
        return monitor

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(2, 3)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}


def saved(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def pickled(thing: Any) -> bytes:
    """The pickle inside of what torch saves; tensors lie beside it."""
    archive = zipfile.ZipFile(io.BytesIO(saved(thing)))
    return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def globals_in(data: bytes) -> set[str]:
    strings: list[str] = []
    found: set[str] = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(argument)
        elif opcode.name == "STACK_GLOBAL":
            found.add(" ".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return found


@contextmanager
def without_gradmon() -> Iterator[None]:
    """Whatever is loaded within is loaded where torch_gradmon is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch_gradmon"]:
            patch.setitem(sys.modules, name, None)
        yield


@pytest.mark.parametrize("preset", ["minimal", "full"])
@pytest.mark.parametrize("kind", [Net, OwnState])
@pytest.mark.parametrize("in_step", [False, True], ids=["between steps", "in a step"])
def test_what_is_saved_is_that_of_the_bare_training_byte_for_byte(kind: type[Net], preset: str, in_step: bool) -> None:
    bare, watched = Loop(kind), Loop(kind)
    monitor = watched.watch(preset)
    for loop in (bare, watched):
        loop.step()
        loop.step()
        if in_step:
            loop.scaler.scale(loop.model(torch.ones(2, 3)).sum()).backward()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0
    for name, thing in watched.parts().items():
        other = bare.parts()[name]
        assert saved(thing) == saved(other), name
        assert globals_in(pickle.dumps(thing)) == globals_in(pickle.dumps(other)), name
        assert pickled(copy.deepcopy(thing)) == pickled(copy.deepcopy(other)), name
        assert globals_in(bytes(ForkingPickler.dumps(thing))) == globals_in(bytes(ForkingPickler.dumps(other))), name
    monitor.detach()


def test_a_model_saved_whole_loads_safely_where_torch_gradmon_is_not_installed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, preset="full")
    monitor.add_gradient_metric("norm", stages=["local"])
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with without_gradmon():
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
            loaded = torch.load(io.BytesIO(saved(model)), weights_only=True)
        assert torch.equal(loaded(torch.ones(2, 3)), model(torch.ones(2, 3)))
        again = pickle.loads(pickle.dumps(model))
    assert [dict(vars(part)["_forward_hooks"]) for part in again.modules()] == [{}] * 4
    monitor.detach()


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_the_scaler_has_nothing_of_ours_and_feeds_no_monitor(take: Any) -> None:
    loop = Loop()
    monitor = loop.watch()
    loop.step()
    taken = take(loop.scaler)
    assert vars(taken).keys() == vars(Loop().scaler).keys()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.5)
    taken.scale(parameter.sum()).backward()
    taken.step(optimizer)
    taken.update()
    assert torch.equal(parameter, torch.full((2,), 0.5))
    assert monitor.last_record.step == 0
    loop.step()
    assert monitor.last_record.step == 1


def test_a_kept_method_of_the_scaler_is_copied_and_saved_as_a_bound_method_is() -> None:
    loop = Loop()
    loop.watch()
    loop.step()
    kept = {"scaler": loop.scaler, "update": loop.scaler.update}
    for taken in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert taken["update"].__self__ is taken["scaler"]
    assert copy.deepcopy(loop.scaler.update).__self__ is not loop.scaler


@pytest.mark.parametrize("take", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_optimizer_that_saves_its_hooks_feeds_no_monitor(take: Any) -> None:
    model = Net()
    optimizer = WholeState(model.parameters(), 0.1)
    optimizer.register_step_post_hook(print_nothing)
    monitor = gradmon.watch(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    taken = take(optimizer)
    assert list(taken._optimizer_step_pre_hooks) == []
    assert list(taken._optimizer_step_post_hooks.values()) == [print_nothing]
    for parameter in taken.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    taken.step()
    assert monitor.last_record.step == 0


def print_nothing(*_: Any) -> None:
    """A hook of the user's, which can be pickled."""


def test_hooks_of_others_are_saved_and_copied_as_before_and_their_handles_are_good() -> None:
    model = Net()
    before = model.first.register_forward_hook(print_nothing)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dicts = [vars(part)["_forward_hooks"] for part in model.modules()]
    monitor = gradmon.watch(model, optimizer, preset="full")
    monitor.add_activation_metric("norm")
    after = model.first.register_forward_hook(print_nothing, with_kwargs=True, always_call=True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert all(mine is vars(part)["_forward_hooks"] for mine, part in zip(dicts, model.modules(), strict=True))
    for taken in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(taken.first._forward_hooks.items()) == [(before.id, print_nothing), (after.id, print_nothing)]
        assert list(taken.first._forward_hooks_with_kwargs) == list(taken.first._forward_hooks_always_called) == [after.id]
        assert {type(hooks) for name, hooks in vars(taken.first).items() if "hooks" in name} == {OrderedDict}
    before.remove()
    after.remove()
    assert not any(hook is print_nothing for hook in dict(model.first._forward_hooks).values())
    monitor.detach()
    assert [(dict(hooks), vars(hooks)) for hooks in dicts] == [({}, {})] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("preset", ["minimal", "full"])
def test_a_watched_model_can_be_scripted(preset: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, preset=preset)
    for step in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(torch.ones(2, 3)), model(torch.ones(2, 3)))
        assert monitor.last_record.step == step


@pytest.mark.parametrize("wrap", ["compile", "ddp"])
def test_a_wrapped_model_is_saved_as_the_bare_one(wrap: str) -> None:
    def build(watched: bool) -> Any:
        model = Net()
        if wrap == "compile":
            wrapped: Any = torch.compile(model, backend="eager")
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if watched:
            gradmon.watch(wrapped, optimizer, preset="full")
        for _ in range(2):
            wrapped(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return wrapped

    with one_rank() if wrap == "ddp" else nullcontext():
        assert globals_in(pickled(build(watched=True))) == globals_in(pickled(build(watched=False)))


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_a_monitor_watches_nothing(take: Any) -> None:
    loop = Loop()
    monitor = loop.watch()
    loop.step()
    taken = take(monitor)
    assert isinstance(taken, ModuleMonitor)
    assert (taken.current_step, taken.get_step_metrics(), taken.last_record, taken.is_monitoring()) == (None, {}, None, False)
    taken.log_scalar("loss", 1.0)
    taken.detach()
    loop.step()
    assert monitor.last_record.step == 1


def test_a_model_that_keeps_its_monitor_can_be_copied_and_the_copy_be_watched() -> None:
    loop = Loop()
    loop.model.monitor = loop.watch()  # type: ignore[assignment]
    loop.step()
    taken = copy.deepcopy(loop.model)
    optimizer = torch.optim.SGD(taken.parameters(), 0.1)
    taken.monitor.set_module(taken)  # type: ignore[operator]
    taken.monitor.add_gradient_metric("norm")  # type: ignore[operator]
    taken.monitor.attach(optimizer)  # type: ignore[operator]
    taken(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert "gradient/last.weight/norm" in taken.monitor.get_step_metrics()  # type: ignore[operator]
    assert loop.model.monitor.last_record.step == 0
