"""Bad arguments: what is raised says what was wrong and what to do, and nothing was changed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import (
    ModuleMonitor,
    MonitorMixin,
    RefinedCoordinateCheck,
    SpikeDetector,
    load_run,
    monitor_scaled_dot_product_attention,
)
from torch_gradmon.sinks import JsonlSink
from torch_gradmon.spikes import MedianMad

from .stored_runs import NO_RECORD, VALUES


class Loud(nn.ReLU, MonitorMixin):
    """A module that is linked to its monitor."""


class World:
    """A watched model with a little of everything, and what must not change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "a_file").write_text("text")
        (path / "garbage").mkdir()
        (path / "garbage" / VALUES).write_bytes(NO_RECORD)
        self.model = nn.Sequential(nn.Linear(3, 4), Loud(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        self.free = ModuleMonitor(self.model)
        self.free.add_gradient_metric("norm", metric_regex="0")
        self.attached = ModuleMonitor(self.model, preset="minimal")
        self.attached.add_sink(JsonlSink(path / "sink.jsonl"))
        self.attached.attach(self.optimizer)
        self.attached.begin_step(0)

    def state(self) -> list[Any]:
        found: list[Any] = [sorted((str(p), p.stat().st_size) for p in self.path.rglob("*"))]
        for module in self.model.modules():
            found += [
                (name, dict(value)) for name, value in sorted(vars(module).items()) if isinstance(value, dict) and "hook" in name
            ]
            found += [sorted(vars(module)), vars(module).get("_gradmon_link")]
        for parameter in self.model.parameters():
            hooks = parameter._post_accumulate_grad_hooks
            found += [None if hooks is None else dict(hooks), parameter._backward_hooks, parameter.detach().clone().tolist()]
        for optimizer in (self.optimizer, self.stranger):
            found += [dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)]
        for monitor in (self.free, self.attached):
            session = monitor._runtime
            found += [
                monitor._runtime.planner.registry.metrics,
                list(session.pipeline.detectors.detectors),
                list(session.pipeline.publisher.sinks),
                session.factory.summary.choice.keys,
            ]
            found += [session.state.step, session.state.is_open, monitor.has_reference_module(), monitor.state_dict()]
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _sink(values: dict[str, float], step: int) -> None:
    pass


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.norm()


def _clip(w: World, *args: Any, **kwargs: Any) -> Any:
    w.model(torch.ones(1, 3)).sum().backward()
    return w.free.clip_grad_norm_(*args, **kwargs)


def _with_state(w: World, **changes: Any) -> None:
    w.attached.load_state_dict({**w.attached.state_dict(), **changes})


def _attention(w: World, **changes: Any) -> None:
    x = torch.zeros(1, 2, 3, 4)
    monitor_scaled_dot_product_attention(w.attached, **{"module": "0", "query": x, "key": x, "value": x, **changes})


Call = Callable[[World], Any]
#: (call, exception, fragments of its message: the value, and the remedy)
BAD: list[tuple[Call, type[Exception], tuple[str, ...]]] = [
    # watch
    (lambda w: gradmon.watch("model", w.optimizer), TypeError, ("'model'", "torch.nn.Module")),
    (lambda w: gradmon.watch(w.model), ValueError, ("the optimizer is missing", "watch(model, optimizer)")),
    (lambda w: gradmon.watch(w.model, w.optimizer, preset="standrad"), ValueError, ("'standrad'", "did you mean standard?")),
    (lambda w: gradmon.watch(w.model, w.optimizer, every=0), ValueError, ("every=0", "positive int")),
    (lambda w: gradmon.watch(w.model, w.optimizer, layers="blocks["), ValueError, ("layers='blocks['", "regular expression")),
    (lambda w: gradmon.watch(w.model, w.optimizer, on_spike="warm"), ValueError, ("on_spike='warm'", "did you mean warn?")),
    (lambda w: gradmon.watch(w.model, w.optimizer, scaler="amp"), TypeError, ("'amp'", "torch.amp.GradScaler")),
    (lambda w: gradmon.watch(w.model, w.optimizer, run_dir=w.path / "a_file"), NotADirectoryError, ("a_file", "runs/first")),
    (lambda w: gradmon.watch(w.model, w.optimizer, run_dir=3), TypeError, ("run_dir", "3", "directory path")),
    (lambda w: gradmon.watch(w.model, w.stranger), ValueError, ("Sequential", "parameters were replaced", "another model")),
    (lambda w: gradmon.watch(w.model, w.model), TypeError, ("torch.optim.Optimizer", "Sequential")),
    (
        lambda w: gradmon.watch(w.model, w.optimizer, w.optimizer),
        ValueError,
        ("the same SGD", "twice", "name each optimizer once"),
    ),
    (lambda w: gradmon.watch(w.model, w.stranger, run_dir=w.path / "new"), ValueError, ("Sequential",)),
    (lambda w: gradmon.watch(w.model, w.optimizer, preset="x", run_dir=w.path / "new"), ValueError, ("'x'", "'minimal'")),
    (lambda w: gradmon.watch(w.model, "sgd", run_dir=w.path / "new"), TypeError, ("'sgd'", "torch.optim.Optimizer")),
    # ModuleMonitor
    (lambda w: ModuleMonitor(nn.Linear), TypeError, ("the class Linear", "an instance")),
    (lambda w: ModuleMonitor(every=2.5), ValueError, ("every=2.5", "positive int")),
    (lambda w: ModuleMonitor(every=True), ValueError, ("every=True", "positive int")),
    (lambda w: ModuleMonitor(every=2, monitor_step_fn=bool), ValueError, ("either every= or monitor_step_fn=",)),
    (lambda w: ModuleMonitor(monitor_step_fn=10), TypeError, ("10", "function of the step")),
    (lambda w: ModuleMonitor(key_order="metric"), ValueError, ("key_order='metric'", "metric_first")),
    (lambda w: ModuleMonitor(on_metric_error="rise"), ValueError, ("'rise'", "did you mean raise?")),
    (lambda w: ModuleMonitor(prefix=None), TypeError, ("prefix", "None", "str")),
    (lambda w: ModuleMonitor(zero_threshold=-1e-8), ValueError, ("zero_threshold=-1e-08", "at least 0")),
    (lambda w: ModuleMonitor(zero_threshold="small"), ValueError, ("zero_threshold='small'", "1e-8")),
    (lambda w: ModuleMonitor(history=0), ValueError, ("history=0", "positive int")),
    (lambda w: ModuleMonitor(max_update_rows=-1), ValueError, ("max_update_rows=-1", "positive int")),
    (lambda w: ModuleMonitor(update_regex="*"), ValueError, ("update_regex='*'", "regular expression")),
    (lambda w: ModuleMonitor(excluded_modules_regex="("), ValueError, ("excluded_modules_regex='('", "regular expression")),
    (lambda w: ModuleMonitor(format_module_name_fn="x"), TypeError, ("'x'", "function of a name")),
    (lambda w: ModuleMonitor(w.model, format_module_name_fn=lambda n: "same"), ValueError, ("'same'", "names must differ")),
    (lambda w: ModuleMonitor(scaler=2.0), TypeError, ("2.0", "torch.amp.GradScaler")),
    (lambda w: ModuleMonitor(w.model, run_dir=w.path / "new", key_order="x"), ValueError, ("'x'",)),
    (lambda w: ModuleMonitor("m", run_dir=w.path / "new"), TypeError, ("'m'",)),
    (lambda w: ModuleMonitor(w.model, run_dir=w.path / "new", format_module_name_fn=lambda n: ""), ValueError, ("differ",)),
    # metrics
    (lambda w: w.free.add_gradient_metric("nrom"), ValueError, ("'nrom'", "did you mean norm")),
    (lambda w: w.free.add_gradient_metric("mine"), ValueError, ("'mine'", "metric_fn")),
    (lambda w: w.free.add_gradient_metric(""), ValueError, ("metric_name=''", "such as 'norm'")),
    (lambda w: w.free.add_gradient_metric("a/b", _norm), ValueError, ("metric_name='a/b'", "without slashes")),
    (lambda w: w.free.add_gradient_metric(_norm), TypeError, ("metric_name", "function", "str")),
    (lambda w: w.free.add_gradient_metric("norm", 2), TypeError, ("2", "'norm'", "callable")),
    (lambda w: w.free.add_gradient_metric("x", _norm, "[a-"), ValueError, ("metric_regex='[a-'", "regular expression")),
    (lambda w: w.free.add_gradient_metric("x", _norm, 5), TypeError, ("metric_regex", "5", "int")),
    (lambda w: w.free.add_gradient_metric("x", _norm, ".*", "maen"), ValueError, ("'maen'", "did you mean mean")),
    (lambda w: w.free.add_gradient_metric("x", _norm, ".*", 3), TypeError, ("3", "callable or one of mean, sum, min, max")),
    (lambda w: w.free.add_gradient_metric("norm"), ValueError, ("'norm'", "'0.weight'", "already", "another name")),
    (lambda w: w.free.add_gradient_metric("rms", stages="after"), ValueError, ("'after'", "after_clip")),
    (lambda w: w.free.add_gradient_metric("rms", stages=()), ValueError, ("stages", "before_clip")),
    (lambda w: w.free.add_gradient_metric("rms", every=0), ValueError, ("every=0", "positive int")),
    (lambda w: w.free.add_parameter_metric("ratio"), ValueError, ("parameter metric 'ratio'", "metric_fn")),
    (lambda w: w.free.add_update_metric("ration"), ValueError, ("'ration'", "did you mean ratio?")),
    (lambda w: w.free.add_optimizer_metric("norm"), ValueError, ("'norm'", "exp_avg_norm")),
    (lambda w: w.free.add_activation_metric("sparsty"), ValueError, ("'sparsty'", "did you mean sparsity?")),
    (lambda w: w.free.add_parameter_difference_metric("x", every="2"), ValueError, ("every='2'", "positive int")),
    (lambda w: w.free.add_model_metric("grad_men"), ValueError, ("'grad_men'", "did you mean grad_mean")),
    (lambda w: ModuleMonitor(preset="cheap"), ValueError, ("'cheap'", "'minimal', 'standard', 'full'")),
    (lambda w: w.free.add_micro_batch_metrics(0), ValueError, ("batch_size=0", "positive int")),
    (lambda w: ModuleMonitor(spike_capture=gradmon.SpikeCapture(before=-1)), ValueError, ("before=-1", "or 0 for none")),
    (
        lambda w: ModuleMonitor(distributed=gradmon.Distributed(process_group=3)),
        TypeError,
        ("process_group", "mesh.get_group()", "3"),
    ),
    (lambda w: ModuleMonitor(distributed=gradmon.Distributed(distinct="(")), ValueError, ("distinct",)),
    (lambda w: w.attached.log_scalar("x", 1.0, dist_reduce="average"), ValueError, ("dist_reduce", "mean")),
    # modules
    (lambda w: w.free.set_module(None), TypeError, ("None", "torch.nn.Module")),
    (lambda w: w.free.set_module(nn.Linear(1, 1)), ValueError, ("Sequential", "another ModuleMonitor")),
    (lambda w: w.free.set_reference_module({}), TypeError, ("{}", "torch.nn.Module")),
    (
        lambda w: w.free.monitor_activations(nn.Linear(1, 1), torch.ones(1)),
        ValueError,
        ("Linear", "not part of the watched model", "str"),
    ),
    (lambda w: w.free.monitor_activations(3, torch.ones(1)), TypeError, ("3", "module of the watched model or a name")),
    # the loop
    (lambda w: ModuleMonitor().attach(w.optimizer), ValueError, ("no module", "set_module(model)")),
    (lambda w: w.free.attach(), ValueError, ("monitor.attach(optimizer)",)),
    (lambda w: w.free.attach(list(w.model.parameters())), TypeError, ("torch.optim.Optimizer", "list")),
    (lambda w: w.attached.attach(w.optimizer), ValueError, ("already attached", "detach()")),
    (lambda w: w.free.attach(w.optimizer, start_step=-1), ValueError, ("start_step=-1", "not be negative")),
    (lambda w: w.free.attach(w.optimizer, start_step=1.0), TypeError, ("start_step", "1.0", "int")),
    (lambda w: w.free.begin_step("3"), TypeError, ("step", "'3'", "int")),
    (lambda w: w.free.begin_step(-3), ValueError, ("step=-3", "not be negative")),
    (lambda w: w.free.begin_step(torch.tensor(3)), TypeError, ("step", "tensor(3)", "int")),
    (lambda w: _clip(w, 1.0, 3.0, exact=True), ValueError, ("norm_type=3.0", "exact=False")),
    (lambda w: ModuleMonitor().clip_grad_norm_(1.0), ValueError, ("parameters=",)),
    # values
    (lambda w: w.attached.log_scalar(3, 1.0), TypeError, ("3", "str")),
    (lambda w: w.attached.log_scalar("", 1.0), ValueError, ("key", "empty")),
    (lambda w: w.attached.log_scalar("loss", "0.5"), TypeError, ("'loss'", "'0.5'", "number")),
    (lambda w: w.attached.log_scalar("loss", torch.ones(3)), ValueError, ("'loss'", "(3,)", "log_tensor")),
    (lambda w: w.attached.log_scalar("loss", 1.0, "avg"), ValueError, ("'avg'", "mean")),
    (lambda w: w.attached.log_scalar("loss", torch.tensor(1j)), TypeError, ("loss", "complex", "abs()")),
    (lambda w: w.attached.log_scalar("gradmon/grad_norm", 1.0), ValueError, ("'gradmon/grad_norm'", "choose another")),
    (lambda w: w.attached.log_tensor("x", torch.ones(2, dtype=torch.complex64)), TypeError, ("'x'", "complex64", "abs()")),
    (lambda w: w.attached.log_scalars([("loss", 1.0)]), TypeError, ("[('loss', 1.0)]", "dict")),
    (lambda w: w.attached.log_scalars({"a": 1.0, "b": None}), TypeError, ("'b'", "None")),
    (lambda w: w.attached.log_tensor("x", [1.0]), TypeError, ("'x'", "[1.0]", "log_scalar")),
    (lambda w: _attention(w, query=torch.zeros(3, 4)), ValueError, ("query", "(3, 4)", "[..., heads, length, size]")),
    (lambda w: _attention(w, module=nn.Linear(1, 1)), ValueError, ("Linear", "not part of the watched model")),
    (lambda w: _attention(w, module=7), TypeError, ("7", "module of the watched model or a name")),
    (lambda w: w.free.add_activation_metric("norm", of="outputs"), ValueError, ("of='outputs'", "did you mean output")),
    (lambda w: w.free.add_activation_metric("norm", of=()), ValueError, ("of is empty", "output_gradient")),
    (lambda w: w.free.add_activation_metric("norm", of="input", split_calls=1), TypeError, ("split_calls", "1", "True or False")),
    (lambda w: w.free.add_activation_metric("dead", of="input"), ValueError, ("input", "'dead'", "metric_fn")),
    (lambda w: w.free.add_activation_difference_metric("nrom"), ValueError, ("'nrom'", "did you mean norm")),
    (lambda w: RefinedCoordinateCheck(w.model), TypeError, ("Sequential", "ModuleMonitor")),
    (lambda w: RefinedCoordinateCheck(ModuleMonitor()), ValueError, ("no module to check", "set_module(model)")),
    (lambda w: RefinedCoordinateCheck(w.free), ValueError, ("no reference module", 'monitor.set_reference_module("init")')),
    (lambda w: w.free.add_attention_metric("entropie"), ValueError, ("'entropie'", "did you mean entropy")),
    (lambda w: w.free.add_attention_metric("entropy", "("), ValueError, ("metric_regex='('", "regular expression")),
    (lambda w: w.free.add_attention_metric("entropy", heads="all"), TypeError, ("heads", "'all'", "True or False")),
    (lambda w: w.free.set_reference_module("first"), ValueError, ("'first'", "'init'")),
    (lambda w: w.attached.set_reference_module(w.model), ValueError, ("watched model itself", "'init'")),
    (lambda w: ModuleMonitor().set_reference_module("init"), ValueError, ("no module to copy", "set_module(model)")),
    (lambda w: w.attached.set_detail(), ValueError, ("nothing to change", "reset=True")),
    (lambda w: w.attached.set_detail(every=2, reset=True), ValueError, ("reset=True", "no other argument")),
    (lambda w: w.attached.set_detail(preset="fully"), ValueError, ("'fully'", "did you mean full")),
    # outlets and spikes
    (lambda w: w.free.add_sink(object()), TypeError, ("object object", "log(dict, step=)", "callable")),
    (lambda w: w.free.add_sink(_sink, keys="("), ValueError, ("keys='('", "regular expression")),
    (lambda w: w.free.add_sink(_sink, every=-1), ValueError, ("every=-1", "positive int")),
    (lambda w: w.free.add_sink(gradmon.sinks.AlertSink("hook")), ValueError, ("'hook'", "https://example.org/hook")),
    (lambda w: w.free.add_sink(gradmon.sinks.AlertSink(3)), TypeError, ("3", "webhook or to a function")),
    (
        lambda w: w.free.add_sink(gradmon.sinks.AlertSink(print, on="stalled")),
        ValueError,
        ("'stalled'", "gradmon serve DIRECTORY --alert URL"),
    ),
    (lambda w: JsonlSink(None), TypeError, ("None", "file path")),
    (lambda w: JsonlSink(w.path), IsADirectoryError, ("is a directory", "metrics.jsonl")),
    (lambda w: w.free.add_detector(MedianMad()), TypeError, ("MedianMad", "SpikeDetector(rule)")),
    (lambda w: SpikeDetector(rule="mad"), TypeError, ("'mad'", "MedianMad()")),
    (lambda w: SpikeDetector(signal=""), ValueError, ("''", "'grad_norm'")),
    (lambda w: SpikeDetector().update(4, "high"), TypeError, ("'high'", "step 4", "number")),
    (lambda w: MedianMad(window=0), ValueError, ("window", "0", "positive int")),
    (lambda w: MedianMad(threshold=0), ValueError, ("threshold", "0", "positive number")),
    (lambda w: MedianMad(window=8, warmup=9), ValueError, ("warmup=9", "window=8")),
    # resume and reading
    (lambda w: w.attached.load_state_dict(None), TypeError, ("None", "ModuleMonitor.state_dict()")),
    (lambda w: w.attached.load_state_dict({"step": 3}), ValueError, ("'step'", "lacks detectors, next_step, summary")),
    (lambda w: w.free.load_state_dict(w.attached.state_dict()), ValueError, ("grad_norm", "before loading")),
    (lambda w: _with_state(w, next_step="many"), ValueError, ("state['next_step']", "'many'", "nothing was loaded")),
    (lambda w: _with_state(w, summary={}), ValueError, ("state['summary']", "{}", "nothing was loaded")),
    (
        lambda w: _with_state(w, detectors={"grad_norm": {"rule": {}}}),
        ValueError,
        ("state['detectors']", "{'rule': {}}", "nothing was loaded"),
    ),
    (lambda w: load_run(w.path / "nowhere"), FileNotFoundError, ("nowhere", "does not exist")),
    (lambda w: load_run(w.path / "garbage"), ValueError, ("garbage", "not a run of torch_gradmon")),
    (lambda w: load_run(w.path / "a_file"), ValueError, ("a_file", "not a run of torch_gradmon")),
    (lambda w: load_run(5), TypeError, ("5", "path")),
]


def _words(row: tuple[Call, type[Exception], tuple[str, ...]]) -> str:
    return f"{row[0].__code__.co_firstlineno}-{row[1].__name__}-{row[2][0]}"


@pytest.mark.parametrize(("call", "expected", "fragments"), BAD, ids=map(_words, BAD))
def test_bad_input_raises_with_the_value_and_the_remedy_and_changes_nothing(
    world: World, call: Call, expected: type[Exception], fragments: tuple[str, ...]
) -> None:
    before = world.state()
    with pytest.raises(expected) as caught:
        call(world)
    message = str(caught.value)
    assert [fragment for fragment in fragments if fragment not in message] == [], message
    assert type(caught.value) is expected
    assert "\n" not in message.strip()
    assert len(message) < 400
    for old, new in zip(before, world.state(), strict=True):
        assert new == old


def test_the_table_covers_the_public_interface() -> None:
    used = {name for call, *_ in BAD for name in call.__code__.co_names} | {"clip_grad_norm_"}
    methods = {name for name in dir(ModuleMonitor) if name.startswith(("add_", "set_", "load_"))} | {"attach", "begin_step"}
    functions = {"RefinedCoordinateCheck", "watch", "load_run", "ModuleMonitor", "SpikeDetector", "JsonlSink", "_attention"}
    assert not (methods | functions) - used


def test_a_bad_call_leaves_a_monitor_that_still_works(world: World) -> None:
    for call, expected, _ in BAD:
        with pytest.raises(expected):
            call(world)
    world.optimizer.zero_grad()
    world.model(torch.ones(1, 3)).sum().backward()
    expected_norm = torch.cat([p.grad.flatten() for p in world.model.parameters()]).double().norm().item()
    world.optimizer.step()
    world.attached.end_step()
    assert world.attached.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected_norm, rel=1e-6)


def test_optimizer_of_another_model_is_named_as_such_first() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^this SGD was made for another model: no parameter of this Linear is in there"):
        gradmon.watch(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"^these 2 optimizers were made for another model"):
        gradmon.watch(model, *(torch.optim.SGD([each], lr=0.1) for each in other.parameters()))


@pytest.mark.parametrize("kind", [list, tuple])
def test_list_of_optimizers_is_answered_with_a_star(kind: type) -> None:
    model = nn.Linear(2, 2)
    given = kind([torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(TypeError, match=rf"got a {kind.__name__} of 1: write watch\(model, \*optimizers\)"):
        gradmon.watch(model, given)
