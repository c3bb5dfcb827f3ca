"""The values of a step: what a lookup, a late value and the flat keys see."""

from __future__ import annotations

import pickle
from array import array
from itertools import chain, starmap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor, load_run, watch
from torch_gradmon.core.keys import KEY_ORDERS, Key, format_key
from torch_gradmon.core.moments import VIEWS
from torch_gradmon.core.records import Block, KeyFormatter, StepValues
from torch_gradmon.runs import format as f
from torch_gradmon.runs.log import LogReader
from torch_gradmon.step.plan import checked_aggregation

A, B, C = (Key("gradient", name, "norm") for name in "abc")


def test_they_are_those_of_a_dict() -> None:
    values = StepValues(Block((A, B), [1.0, 2.0]), Block((C,), [3.0]))
    expected = {A: 1.0, B: 2.0, C: 3.0}
    assert values == expected
    assert list(values) == list(values.keys()) == [A, B, C]
    assert list(values.values()) == [1.0, 2.0, 3.0]
    assert dict(values.items()) == dict(values) == {**values} == expected
    assert (len(values), A in values, values[C], values.get(Key("", "d", ""))) == (3, True, 3.0, None)
    assert pickle.loads(pickle.dumps(values)) == expected
    assert repr(expected) in repr(values)
    with pytest.raises(KeyError):
        values[Key("", "d", "")]


@pytest.mark.parametrize("style", KEY_ORDERS)
def test_a_later_value_replaces_an_earlier_one(style: str) -> None:
    values = StepValues(Block((A, B), [1.0, 2.0])).updated({B: 5.0, C: 3.0})
    assert values == {A: 1.0, B: 5.0, C: 3.0}
    assert KeyFormatter(style, "x/")(values) == {format_key(key, style, "x/"): value for key, value in values.items()}


def test_many_late_values_are_merged() -> None:
    values = StepValues(Block((A,), [0.0]))
    for number in range(1000):
        values = values.updated({B: float(number)})
    assert values == {A: 0.0, B: 999.0}
    assert len(values.blocks) < 20


def test_what_came_since() -> None:
    before = StepValues(Block((A, B), [1.0, 2.0]))
    later = before.updated({B: 5.0}).updated({C: 3.0})
    assert later.since(before) == {B: 5.0, C: 3.0}
    assert before.since(before) == {}
    other = StepValues(Block((A, B), [1.0, 2.0]))
    assert other.since(before) == before.since(later) == {A: 1.0, B: 2.0}  # not made from it: all
    for number in range(50):  # merged in between
        later = later.updated({C: float(number)})
    assert later.since(before)[C] == 49.0


def test_a_dict_of_views_is_built_only_for_views() -> None:
    views, rest, loss = Block((A, B), [1.0, 2.0], "gradient"), Block((C._replace(source=""),), [3.0]), Key("", "loss", "")
    values = StepValues(views, rest).updated({loss: 4.0})
    assert (values[loss], values.get(rest.keys[0]), values.get(Key("", "d", "")), loss in values) == (4.0, 3.0, None, True)
    assert "loss" not in values
    assert (values["", "loss", ""], ("", "loss", "") in values) == (4.0, True), "a plain tuple is equal to a key"
    assert (values.get(("", "loss", "")), values.get("loss"), () in values) == (4.0, None, False)
    assert values._by_key is None, "a thousand records are kept with their dicts"
    assert values.without({A, loss}) == {B: 2.0, rest.keys[0]: 3.0}
    assert values._by_key is None
    assert (values[A], C in values) == (1.0, False)
    for number in range(50):
        values = values.updated({loss: float(number)})
        assert list(values)[:2] == [A, B], "the order stays"
    assert len(values.blocks) < 20
    assert values.blocks[0] is views, "it is still known as such when others are merged"
    assert values == {A: 1.0, B: 2.0, rest.keys[0]: 3.0, loss: 49.0}


def test_a_kept_record_takes_little_more_than_its_numbers(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.zeros(2) for _ in range(50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, run_dir=tmp_path)
    for metric in ("norm", "rms", "mean", "std", "max"):
        monitor.add_gradient_metric(metric)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.stack([*model.parameters()]).sum()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.get_step_metrics()
    for record in monitor._runtime.pipeline.history.records():
        views = [block for block in record.values.blocks if block.table]
        assert sum(len(block.keys) for block in views) == 2 * 5 * 50
        assert all(isinstance(block.numbers, array) for block in views)
        assert record.values._by_key is None
    monitor.detach()


@pytest.mark.parametrize("stores", [True, False])
def test_a_number_that_is_logged_late_counts_as_one_that_is_merged(stores: bool, tmp_path: Path) -> None:
    """With a named aggregation each value goes through a buffer of its own."""
    seen, added = list[list[str]](), []
    for aggregation in (None, "mean"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / str(aggregation)
        monitor = watch(model, optimizer, run_dir=path if stores else None)
        shown: list[str] = []
        monitor.add_sink(lambda values, step, shown=shown: shown.append(repr(values)), keys="^(?!.*overhead)")
        for step in range(12):
            optimizer.zero_grad()
            loss = model(torch.full((4, 3), float(step))).square().sum()
            loss.backward()
            if step % 4 == 3:
                monitor.log_scalar("early", step, aggregation)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach(), aggregation)
            if stores and aggregation is None:
                assert load_run(path).record(step).metrics["loss"] == loss.item(), "the file has it by now"
            monitor.log_scalar("zero", -0.0, aggregation)
            if step % 3 == 2:
                monitor.log_scalar("loss", 3.0, aggregation)
                monitor.log_scalar("nan", float("nan"), aggregation)
        monitor.detach()
        seen.append(shown)
        if stores:
            records = (record.data for record in LogReader(path / f.name_of(1, f.VALUES)).follow())
            frames = (f.frame_of(data) for data in records if data[:1] == f.STEP)
            added.append([(frame.step, frame.keys, frame.values.tobytes()) for frame in frames if frame.flags & f.AMENDS])
    assert seen[0] == seen[1]
    assert (len(seen[0]), sum("'loss'" in text and "'zero': 0.0" in text for text in seen[0])) == (12, 12)
    assert added == [added[0]] * 2 if stores else not added


class Branching(nn.Module):
    """Calls its second layer in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.step = nn.Linear(3, 3), nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        x = self.first(x)
        return x if self.step % 2 else self.second(x)


def test_values_of_outputs_are_blocks_too_and_follow_what_is_called_and_asked_for() -> None:
    model, outputs = Branching(), dict[str, Tensor]()
    for name in ("first", "second"):
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out.detach()}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, on_spike=None)
    monitor.add_activation_metric("norm", metric_regex="first|second")
    for step in range(8):
        if step == 4:
            monitor.add_activation_metric("mean", metric_regex="second")
        outputs.clear()
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        expected = {Key("activation", name, "norm"): out.double().norm() for name, out in outputs.items()}
        if step >= 4 and "second" in outputs:
            expected[Key("activation", "second", "mean")] = outputs["second"].double().mean()
        monitor.get_step_metrics()
        record = monitor._runtime.pipeline.last
        blocks = [block for block in record.values.blocks if block.table == "activation"]
        found = {key: number for block in blocks for key, number in zip(block.keys, block.numbers, strict=True) if key.name}
        assert found == {key: pytest.approx(float(value), rel=1e-6) for key, value in expected.items()}
        assert all(isinstance(block.numbers, array) for block in blocks)
        assert not any(key.source == "activation" for key in record.values_beside_views())
    monitor.detach()


def test_flat_keys_follow_the_blocks() -> None:
    formatted, first = KeyFormatter("name_first", ""), (A, B)
    for blocks in (
        [(first, [1.0, 2.0])],
        [(first, [3.0, 4.0])],
        [((A, B), [5.0, 6.0])],
        [((B, A), [7.0, 8.0])],
        [((A,), [9.0]), ((C,), [1.0])],
        [((C,), [1.0])],
        [],
        [(first, [1.0, 2.0])],
    ):
        pairs = chain.from_iterable(zip(keys, numbers, strict=True) for keys, numbers in blocks)
        expected = {format_key(key): value for key, value in pairs}
        assert formatted(StepValues(*starmap(Block, blocks))) == expected
        assert list(formatted(StepValues(*starmap(Block, blocks)))) == list(expected)


def test_a_caller_may_change_the_dict() -> None:
    formatted = KeyFormatter("name_first", "")
    values = StepValues(Block((A, B), [1.0, 2.0]))
    formatted(values).clear()
    formatted(values)["more"] = 1.0
    assert formatted(values) == {"gradient/a/norm": 1.0, "gradient/b/norm": 2.0}


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("layers", [None, "all", "blocks", "top", "2"])
def test_views_of_tables_are_not_stored_and_nothing_else_is_left_out(is_finite: bool, layers: str | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model.register_parameter("alone", nn.Parameter(torch.ones(3)))  # a block of the name of its only tensor
    model.register_forward_pre_hook(lambda self, args: args[0] * self.alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, preset="full", on_spike=None, layers=layers)
    for metric in ("norm", "max", "std"):
        monitor.add_gradient_metric(metric)
    monitor.add_update_metric("ratio")
    monitor.add_update_metric("norm")
    monitor.add_gradient_metric("first", lambda gradient: gradient.flatten()[0])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        if not is_finite:
            model[0].weight.grad.fill_(float("nan"))
        optimizer.step()
        monitor.log_scalar("loss", 1.0)
        monitor.get_step_metrics()
        record = monitor._runtime.pipeline.last
        stored = dict(record.values_beside_views())
        follow = {
            (source, name, metric)
            for source, table in record.tables.items()
            for name in table.names
            for metric in VIEWS
            if table.has(metric)
        }
        by_key = {key: value for key, value in record.values.items() if key not in follow}
        assert stored == pytest.approx(by_key, nan_ok=True)
        views = {key.metric for key in record.values if key not in stored and key.source in ("gradient", "update")}
        assert views >= {"norm", "max", "std"}
        kept = {format_key(key) for key in stored}
        assert {"gradient/0.bias/first", "loss"} <= kept
        assert "update/2.bias/ratio" in kept
        (remembered,) = (one for one in monitor._runtime.pipeline.history.sampled() if one.step == record.step)
        assert stored.keys() == remembered.values.keys(), "no view of an activation either"
        assert Key("gradient", "2.bias", "norm") not in remembered.values
        assert remembered.tables["gradient"].has("norm")


@pytest.mark.parametrize("stored", [False, True])
def test_late_numbers_merge_with_whatever_else_is_logged_late(stored: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, run_dir=tmp_path if stored else None)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        monitor.log_scalar("loss", 1.0)
        monitor.log_scalar("rate", torch.tensor(7.0))
        monitor.log_scalar("seen", torch.tensor(4.0), aggregation_fn="max")
        monitor.log_scalar("loss", 3.0)
        monitor.log_scalar("turns", 2)
        monitor.log_scalar("rate", 9.0)
        monitor.log_scalar("seen", 6.0, aggregation_fn="max")
    expected = {"loss": 2.0, "rate": 8.0, "seen": 6.0, "turns": 2.0}
    found = monitor.get_all_metrics()
    assert [{name: values[name] for name in expected} for values in found.values()] == [expected] * 5
    monitor.detach()
    if stored:
        values = load_run(tmp_path).record(4).metrics
        assert {name: values[name] for name in expected} == expected


def test_a_value_with_the_key_of_a_built_in_that_is_logged_after_the_step_is_stored_in_its_place(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, run_dir=tmp_path)
    key = Key("gradient", "weight", "norm")
    monitor.add_gradient_metric("norm")
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if step == 1:
            monitor._runtime.lifecycle.values.log(key, 7.0, checked_aggregation(None, "aggregation_fn"), "")
        assert monitor.get_step_metrics()[format_key(key)] == (7.0 if step == 1 else pytest.approx(6**0.5))
    monitor.detach()
    assert load_run(tmp_path).series(format_key(key)) == pytest.approx({0: 6**0.5, 1: 7.0, 2: 6**0.5})


def test_metrics_by_key_need_no_dict_of_keys() -> None:
    """It costs more than the statistics of small tensors."""
    model = nn.Linear(3, 2)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("max")
    for step in range(3):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        monitor.begin_step(step)
        monitor.monitor_gradients()
        monitor.end_step()
        found = monitor.get_step_metrics()
        assert found["gradient/bias/norm"] == pytest.approx(2**0.5)
        last = monitor._runtime.pipeline.last
        assert isinstance(last.values, StepValues)
        assert last.values._by_key is None


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_number_that_no_float_holds_costs_only_itself(has_directory: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, run_dir=tmp_path if has_directory else None)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        if step == 2:
            with pytest.warns(match="a value of x is lost"):
                monitor.log_scalar("x", 10**400)
        else:
            monitor.log_scalar("x", step)
    assert monitor.get_step_metrics()["x"] == 3.0
    monitor.detach()
