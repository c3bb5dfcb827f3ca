"""``watch()`` takes all that ``ModuleMonitor`` takes, and takes the place of what watched the model before."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector, watch
from torch_gradmon.core.records import StepRecord
from torch_gradmon.integrations.common import AdapterMonitor
from torch_gradmon.monitor.options import WatchOptions
from torch_gradmon.runs import format as f
from torch_gradmon.runs.liveness import run_status
from torch_gradmon.runs.log import LogReader
from torch_gradmon.runs.writer import RunWriter, Successors, Superseded

AGAIN = "was watched already: the earlier monitor is detached"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step of training, and the norm of its gradient."""
    model(torch.randn(3, 4)).square().mean().backward()
    norm = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    of_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    of_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return [of_parameters, of_modules, len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]


# --- the same arguments ----------------------------------------------------------------------------------------------------------

#: Of both, with defaults of their own.
OWN_DEFAULTS = {"on_spike": (None, "warn"), "preset": (None, "standard"), "every": (None, 1)}


def test_watch_takes_the_arguments_of_the_monitor_that_most_need() -> None:
    monitor, found = inspect.signature(ModuleMonitor).parameters, inspect.signature(watch).parameters
    assert len(found) == 16  # the model, the optimizers, and 14 options
    assert found.keys() - monitor.keys() == {"model", "optimizers", "start_step", "exclude"}
    for name in found.keys() & monitor.keys():
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (monitor[name].default, found[name].default) == OWN_DEFAULTS.get(name, (found[name].default,) * 2)
    attach = inspect.signature(ModuleMonitor.attach).parameters
    assert all(found[name] == attach[name] for name in ("scaler", "start_step"))


def test_adapters_take_what_watch_takes_with_its_types() -> None:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    of_watch = get_type_hints(watch, localns={"PipelineSchedule": _PipelineSchedule})
    of_adapters = get_type_hints(WatchOptions)
    assert of_watch.keys() - of_adapters.keys() == {"model", "optimizers", "scaler", "start_step", "return"}
    assert {name: of_watch[name] for name in of_adapters} == of_adapters


def print_row(values: dict[str, float], step: int) -> None:
    """A sink."""


#: For each argument a value that is good, and one that is not; None where there is none.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "preset": ("full", "fully"),
    "every": (2, 0),
    "log_to": (print_row, 3),
    "scaler": (torch.amp.GradScaler("cpu", enabled=False), "scaler"),
    "prefix": ("a/", 1),
    "layers": ("all", "["),
    "on_spike": ("raise", "rise"),
    "run_dir": ("run", 5),
    "max_overhead": (0.5, 2),
    "checks": (gradmon.Checks(data=False), 1),
    "distributed": (gradmon.Distributed(sync_every=2), "all"),
    "plugins": ([], "plugin"),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_each_argument_is_passed_on_and_is_checked_as_the_monitor_checks_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = ARGUMENTS[name]
    model = _model()
    optimizer = _sgd(model)
    given: list[dict[str, Any]] = []

    def noted(self: ModuleMonitor, *args: Any, **arguments: Any) -> None:
        given.append(arguments)
        made(self, *args, **arguments)

    made = ModuleMonitor.__init__
    monkeypatch.setattr(ModuleMonitor, "__init__", noted)
    with watch(model, optimizer, **{name: good}) as monitor:
        _step(model, optimizer)
        assert name == "scaler" or given[0][name] is good
        assert monitor.current_step == 0
    monkeypatch.setattr(ModuleMonitor, "__init__", made)
    if bad is None:
        return
    with pytest.raises((TypeError, ValueError)) as alone:
        ModuleMonitor(model, **{name: bad})
    with pytest.raises(alone.type, match=re.escape(str(alone.value))):
        watch(model, optimizer, **{name: bad})


def test_an_unknown_argument_of_an_adapter_is_refused_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match=r"there is no argument 'run_directory'; did you mean run_dir"):
        AdapterMonitor(None, {"run_directory": "x"})


def test_steps_begin_where_it_is_said() -> None:
    model = _model()
    optimizer = _sgd(model)
    with watch(model, optimizer, start_step=40, every=2) as monitor:
        for _ in range(3):
            _step(model, optimizer)
        assert list(monitor.get_all_metrics()) == [40, 42]


# --- a second call ---------------------------------------------------------------------------------------------------------------


def test_a_second_call_takes_the_place_of_the_first_and_says_so() -> None:
    model = _model()
    optimizer = _sgd(model)
    first = watch(model, optimizer)
    bare, sink = _hooks(model, optimizer), gradmon.testing.RecordingSink()
    first.add_sink(sink)
    norms = [_step(model, optimizer) for _ in range(3)]
    with pytest.warns(GradmonWarning, match=f"this Sequential {AGAIN} after step 2, .* start_step=3 continues") as caught:
        second = watch(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__], "the line of the script is named"
    assert _hooks(model, optimizer) == bare, "those of one monitor"
    assert sink.steps == [0, 1, 2]
    assert sink.closed == 1
    norm = _step(model, optimizer)
    assert (first.current_step, second.current_step) == (2, 0)
    assert first.get_all_metrics()[2]["gradmon/grad_norm"] == pytest.approx(norms[2], rel=1e-6), "what it knows stays"
    assert second.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    second.detach()
    assert _hooks(model, optimizer) == [0, 0, 0, 0]
    watch(model, optimizer).detach()  # nothing watches any more, so nothing is said


@pytest.mark.parametrize("when", ["before a step", "between backward and step", "in the middle of a forward"])
def test_a_step_in_flight_ends_with_the_first_monitor(when: str) -> None:
    model = _model()
    optimizer = _sgd(model)
    first = watch(model, optimizer)
    said = "before its first step"
    if when == "between backward and step":
        model(torch.randn(3, 4)).square().mean().backward()
        said = "in step 0, .* start_step=0 continues"
    elif when == "in the middle of a forward":
        model(torch.randn(3, 4))
        said = "in step 0, .* start_step=0 continues"
    with pytest.warns(GradmonWarning, match=said):
        second = watch(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    norm = _step(model, optimizer)
    assert second.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert first.current_step in (None, 0)


def test_an_optimizer_that_was_made_anew() -> None:
    model = _model()
    old = _sgd(model)
    first = watch(model, old)
    _step(model, old)
    optimizer = _sgd(model)
    with pytest.warns(GradmonWarning, match=AGAIN):
        second = watch(model, optimizer)
    del old
    norm = _step(model, optimizer)
    assert second.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert first.current_step == 0


class Wrapper(nn.Module):
    """What ``torch.compile`` puts around a model, without the compiler."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def _parametrized(model: nn.Module) -> nn.Module:
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Zero())  # type: ignore[index]
    return model


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "as DDP does": nn.DataParallel,
    "as torch.compile does": Wrapper,
    "both": lambda model: nn.DataParallel(Wrapper(model)),
    "parametrized": _parametrized,
}


@pytest.mark.parametrize("after", WRAPPED)
@pytest.mark.parametrize("before", ["nothing", "as DDP does", "as torch.compile does"])
def test_whatever_is_wrapped_around_a_model_it_is_the_same_model(before: str, after: str) -> None:
    inner = _model()
    first_model = WRAPPED[before](inner)
    first = watch(first_model, optimizer := _sgd(first_model))
    _step(first_model, optimizer)
    model = WRAPPED[after](inner)
    optimizer = _sgd(model)
    with pytest.warns(GradmonWarning, match=f"this Sequential {AGAIN}"):
        second = watch(model, optimizer)
    norm = _step(model, optimizer)
    assert second.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert first.current_step == 0


def test_a_model_that_is_compiled_afterwards() -> None:
    torch._dynamo.reset()
    inner = _model()
    optimizer = _sgd(inner)
    first = watch(inner, optimizer)
    _step(inner, optimizer)
    model = torch.compile(inner, backend="eager")
    with pytest.warns(GradmonWarning, match=AGAIN):
        second = watch(model, optimizer)
    norm = _step(model, optimizer)
    assert second.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert (first.current_step, second.current_step) == (0, 0)


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"evry": 2}, TypeError),
    ({"every": 0}, ValueError),
    ({"preset": "tiny"}, ValueError),
    ({"start_step": -1}, ValueError),
    ({"scaler": "cpu"}, TypeError),
    ({"layers": "["}, ValueError),
    ({"run_dir": __file__}, NotADirectoryError),
    ({"every": lambda step: 1 / 0}, ZeroDivisionError),
]


@pytest.mark.parametrize(("arguments", "kind"), BAD, ids=[next(iter(arguments)) for arguments, _ in BAD])
def test_a_second_call_with_bad_arguments_leaves_the_first_monitor_alone(
    arguments: dict[str, Any], kind: type[Exception], tmp_path: Path
) -> None:
    model = _model()
    optimizer = _sgd(model)
    first = watch(model, optimizer, run_dir=tmp_path / "run")
    _step(model, optimizer)
    hooks, told = _hooks(model, optimizer), run_status(tmp_path / "run").meta
    with pytest.raises(kind):
        watch(model, optimizer, **{"run_dir": tmp_path / "run", **arguments})
    other = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="was made for another model"):
        watch(model, _sgd(other))
    gc.collect()
    assert _hooks(model, optimizer) == hooks
    assert run_status(tmp_path / "run").meta == told
    norm = _step(model, optimizer)
    assert first.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    first.detach()
    assert gradmon.load_run(tmp_path / "run").steps == [0, 1]
    assert first.warning_counts() == {}


class Logs(nn.Linear, gradmon.MonitorMixin):
    """A layer that asks for its monitor."""


def test_layers_that_ask_for_their_monitor_find_the_one_that_watches() -> None:
    model = nn.Sequential(layer := Logs(4, 2))
    optimizer = _sgd(model)
    first = watch(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        watch(model, optimizer, every=lambda step: bool(1 / step))
    assert layer.get_module_monitor() is first
    with pytest.warns(GradmonWarning, match=AGAIN):
        second = watch(model, optimizer)
    assert layer.get_module_monitor() is second


def test_a_spike_in_the_last_step_of_the_first_is_no_error_of_the_second() -> None:
    model = _model()
    optimizer = _sgd(model)
    first = watch(model, optimizer, on_spike="raise")
    first.add_detector(SpikeDetector(lambda value: value > 1e3, signal="loss"))
    _step(model, optimizer)
    first.log_scalar("loss", 1e9)  # judged when nothing more can come for the step
    with pytest.warns(GradmonWarning) as caught:
        second = watch(model, optimizer)
    assert [("ended with a spike" in str(w.message)) for w in caught] == [False, True]
    _step(model, optimizer)
    assert (first.current_step, second.current_step) == (0, 0)


def test_what_marks_a_model_is_no_part_of_it() -> None:
    model = _model()
    before = set(model.__dict__)
    monitor = watch(model, optimizer := _sgd(model))
    assert set(model.__dict__) == before
    twin = copy.deepcopy(model)
    watch(twin, _sgd(twin)).detach()  # of which nothing is said, for it is another model
    torch.save(model, io.BytesIO())
    gone = weakref.ref(model), weakref.ref(monitor)
    del model, monitor, optimizer, twin
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_disabled_monitors_replace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = _model()
    for _ in range(2):
        watch(model, _sgd(model))


# --- what is allowed beside each other -------------------------------------------------------------------------------------------


def test_a_part_and_the_whole_may_be_watched_at_once() -> None:
    model = _model()
    optimizer = _sgd(model)
    whole, part = watch(model, optimizer), watch(model[0], optimizer)
    model(torch.randn(3, 4)).square().mean().backward()
    norms = [torch.cat([p.grad.double().flatten() for p in each.parameters()]).norm().item() for each in (model, model[0])]
    optimizer.step()
    found = [monitor.get_step_metrics()["gradmon/grad_norm"] for monitor in (whole, part)]
    assert found == pytest.approx(norms, rel=1e-6)


def test_several_monitors_may_be_attached_to_one_model_by_hand() -> None:
    model = _model()
    optimizer = _sgd(model)
    monitors = [ModuleMonitor(model) for _ in range(2)]
    for monitor in monitors:
        monitor._runtime.use_preset("standard")
        monitor.attach(optimizer)
    watch(model, optimizer)
    norm = _step(model, optimizer)
    for monitor in monitors:
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)


class Trainer:
    """Something that adapters belong to."""


def test_adapters_of_one_trainer_stay_and_those_of_another_one_are_replaced() -> None:
    model = _model()
    optimizer, trainer = _sgd(model), Trainer()
    first, second = AdapterMonitor(None, {}), AdapterMonitor(None, {"prefix": "b/"})
    for watching in (first, second):
        watching.begin(model, [optimizer], trainer=trainer)
    _step(model, optimizer)
    assert first.monitor is not None
    assert second.monitor is not None
    assert (first.monitor.current_step, second.monitor.current_step) == (0, 0)
    other = AdapterMonitor(None, {})  # both were left attached by a training that was broken off
    with pytest.warns(GradmonWarning, match=AGAIN) as caught:
        other.begin(model, [optimizer], trainer=Trainer())
    assert len(caught) == 2
    with pytest.warns(GradmonWarning, match=AGAIN):
        monitor = watch(model, optimizer)
    _step(model, optimizer)
    assert (first.monitor.current_step, second.monitor.current_step, monitor.current_step) == (0, 0, 0)
    again = AdapterMonitor(None, {})
    with pytest.warns(GradmonWarning, match=AGAIN):
        again.begin(model, [optimizer], trainer=trainer)
    for watching in (first, second, other, again):
        watching.end()
    assert _hooks(model, optimizer) == [0, 0, 0, 0]


def test_a_monitor_that_is_given_to_the_adapter_of_a_new_trainer_goes_on_there() -> None:
    model = _model()
    optimizer, given = _sgd(model), ModuleMonitor(preset="minimal")
    AdapterMonitor(given, {}).begin(model, [optimizer], trainer=Trainer())
    _step(model, optimizer)
    again = AdapterMonitor(given, {})  # of which the first one need not know
    assert again.begin(model, [optimizer], start_step=1, trainer=Trainer()) is given
    _step(model, optimizer)
    assert list(given.get_all_metrics()) == [0, 1]
    again.end()


# --- the run directory -----------------------------------------------------------------------------------------------------------


def _written(path: Path) -> list[tuple[int, int]]:
    """The number of the writer, and the step, of all that was written, also of what was replaced."""
    records = [(number, LogReader(path / f.name_of(number, f.VALUES)).follow()) for number in f.pairs_in(path)]
    return [(number, f.frame_of(record.data).step) for number, found in records for record in found if record.data[:1] == f.STEP]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers look at each step, not once a second, who else writes."""
    monkeypatch.setattr("torch_gradmon.runs.writer._LOOKS", 0.0)


def test_the_same_run_directory_twice_begins_anew_and_keeps_what_was_there(tmp_path: Path) -> None:
    model = _model()
    optimizer = _sgd(model)
    watch(model, optimizer, run_dir=tmp_path / "run")
    for _ in range(3):
        _step(model, optimizer)
    with pytest.warns(GradmonWarning, match=AGAIN):
        monitor = watch(model, optimizer, run_dir=tmp_path / "run", preset="full")
    with pytest.warns(
        GradmonWarning, match="has a run with steps up to 2, and this one, which begins with step 0, takes its place"
    ):
        norms = [_step(model, optimizer) for _ in range(2)]
    assert not run_status(tmp_path / "run").has_ended, (
        "that of the first monitor has, and it did not write over the facts of the second"
    )
    monitor.detach()
    assert _written(tmp_path / "run") == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    run = gradmon.load_run(tmp_path / "run")
    assert run.steps == [0, 1]
    assert list(run.series("gradmon/grad_norm").values()) == pytest.approx(norms, rel=1e-6)
    assert run._reader.meta["preset"] == "full"


def test_the_same_run_directory_goes_on_with_the_numbers_that_are_named(tmp_path: Path) -> None:
    model = _model()
    optimizer = _sgd(model)
    watch(model, optimizer, run_dir=tmp_path / "run")
    norms = [_step(model, optimizer) for _ in range(3)]
    with pytest.warns(GradmonWarning, match="start_step=3 continues"):
        monitor = watch(model, optimizer, run_dir=tmp_path / "run", start_step=3)
    norms += [_step(model, optimizer) for _ in range(2)]
    monitor.detach()
    run = gradmon.load_run(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4]
    assert list(run.series("gradmon/grad_norm").values()) == pytest.approx(norms, rel=1e-6)


def test_a_cell_that_makes_everything_anew_keeps_the_facts_of_the_new_run(tmp_path: Path) -> None:
    def cell() -> tuple[nn.Module, SGD, ModuleMonitor]:
        model = _model()
        optimizer = _sgd(model)
        return model, optimizer, watch(model, optimizer, run_dir=tmp_path / "run")

    model, optimizer, monitor = cell()
    for _ in range(3):
        _step(model, optimizer)
    old = model, optimizer, monitor
    model, optimizer, monitor = cell()
    with pytest.warns(GradmonWarning, match="takes its place"):
        _step(model, optimizer)
    facts = run_status(tmp_path / "run").meta
    assert not run_status(tmp_path / "run").has_ended
    del old
    gc.collect()  # only now the first one ends
    assert run_status(tmp_path / "run").meta == facts
    _step(model, optimizer)
    monitor.detach()
    assert gradmon.load_run(tmp_path / "run").steps == [0, 1]
    assert run_status(tmp_path / "run").has_ended
    assert monitor.warning_counts() == {"replaced": 1}


def test_two_monitors_do_not_write_into_one_run_directory(tmp_path: Path, impatient: None) -> None:
    models = [_model(), _model()]
    optimizers = [_sgd(model) for model in models]
    first, second = (watch(m, o, run_dir=tmp_path / "run") for m, o in zip(models, optimizers, strict=True))
    _step(models[0], optimizers[0])
    _step(models[1], optimizers[1])
    with pytest.warns(
        GradmonWarning, match=r"another monitor writes to the run directory .*run by now, so that this one, with step 1"
    ):
        _step(models[0], optimizers[0])
    _step(models[0], optimizers[0])
    _step(models[1], optimizers[1])
    first.detach()
    second.detach()
    assert gradmon.load_run(tmp_path / "run").steps == [0, 1]
    assert first.warning_counts() == {"store": 2}
    assert second.warning_counts() == {}


def test_a_run_directory_that_another_monitor_has_taken_is_not_taken_back_after_detach(tmp_path: Path, impatient: None) -> None:
    models = [_model(), _model()]
    optimizers = [_sgd(model) for model in models]
    first = watch(models[0], optimizers[0], run_dir=tmp_path / "run")
    _step(models[0], optimizers[0])
    second = watch(models[1], optimizers[1], run_dir=tmp_path / "run", start_step=5)
    _step(models[1], optimizers[1])
    with pytest.warns(GradmonWarning, match="another monitor writes to the run directory"):
        _step(models[0], optimizers[0])
    first.detach()
    first.attach(optimizers[0])
    _step(models[0], optimizers[0])
    _step(models[1], optimizers[1])
    first.detach()
    second.detach()
    assert gradmon.load_run(tmp_path / "run").steps == [0, 5, 6]
    assert first.warning_counts() == {"store": 2}
    assert second.warning_counts() == {}


def test_a_monitor_that_goes_on_after_detach_takes_its_run_directory_again(tmp_path: Path) -> None:
    model = _model()
    optimizer = _sgd(model)
    monitor = watch(model, optimizer, run_dir=tmp_path / "run")
    _step(model, optimizer)
    monitor.detach()
    monitor.attach(optimizer)
    _step(model, optimizer)
    monitor.detach()
    assert gradmon.load_run(tmp_path / "run").steps == [0, 1]


def test_a_store_finds_out_that_another_one_writes(tmp_path: Path, impatient: None) -> None:
    one, other = RunWriter(tmp_path, {"who": 1}), RunWriter(tmp_path, {"who": 2})
    one.claim({"who": 1})
    record = StepRecord(0, 0.0, True, {})
    one.log(record)
    with pytest.raises(Superseded):
        other.log(record)
    other.annotate({"who": 3})  # not its turn
    assert run_status(tmp_path).meta["who"] == 1
    other.claim({"who": 2})
    other.log(StepRecord(1, 0.0, True, {}))
    with pytest.raises(Superseded):
        one.log(StepRecord(2, 0.0, True, {}))
    one.annotate({"who": 1})
    one.rewind(0)
    assert run_status(tmp_path).meta["who"] == 2
    one.close()
    other.close()
    assert _written(tmp_path) == [(3, 0), (4, 1)]


def test_a_directory_that_cannot_be_asked_does_not_hold_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def refused(path: Path) -> None:
        asked.append(path)
        assert len(asked) < 5  # not for ever
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torch_gradmon.runs.writer.LogReader", refused)
    assert not Successors(tmp_path, 1).have_claimed()
    assert len(asked) == 1
