"""Where two runs part: real trainings with one change each, made-up tables against plain arithmetic, and the command line."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, diff_runs, load_run
from torch_gradmon.analysis.comparison import STAGES, Order, is_clock
from torch_gradmon.analysis.diff import RunDiff
from torch_gradmon.analysis.run import read_run, settings_that_differ
from torch_gradmon.cli.main import main
from torch_gradmon.core.keys import Key, parse_key
from torch_gradmon.core.moments import ALL_COLUMNS
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs.reader import RunReader
from torch_gradmon.runs.writer import RunWriter

from .stored_runs import emptied
from .test_run_window import values_of

pytestmark = pytest.mark.thorough

#: What happens in a step, before its forward pass.
Change = Callable[[int, "Net", torch.optim.Optimizer, Tensor], Tensor]


class Net(nn.Module):
    """The modules are called in another order than they are defined in."""

    def __init__(self, blocks: str = "blocks") -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        setattr(self, blocks, nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.drop = nn.Dropout(0.2)
        self.embed = nn.Linear(4, 6)
        self.called = blocks
        self.noise, self.shrink = 0.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(getattr(self, self.called)):
            x = block(x)
            if number == 1:
                x = x + self.noise
                x = x * self.shrink + (x * (1 - self.shrink)).detach()  # the same value, another gradient
        return self.head(self.drop(x))


def train(
    path: Path,
    change: Change | None = None,
    *,
    steps: int = 24,
    seed: int = 0,
    preset: str = "standard",
    blocks: str = "blocks",
    every: int = 1,
    log: Mapping[str, Callable[[int], float]] | None = None,
    tag: Callable[[int], object] | None = None,
    **settings: Any,
) -> Path:
    """A training in which ``change`` may do something."""
    torch.manual_seed(seed)
    model = Net(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    monitor = gradmon.watch(model, optimizer, preset=preset, run_dir=path, on_spike=None, every=every)
    data = torch.Generator().manual_seed(7)
    for step in range(steps):
        x = torch.randn(8, 4, generator=data)
        model.limit = 0.5
        if change is not None:
            x = change(step, model, optimizer, x)
        loss = (model(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), model.limit)
        if tag is not None:
            monitor.log_context(batch=tag(step))
        optimizer.step()
        monitor.log_scalars({"loss": loss.item(), **{key: value(step) for key, value in (log or {}).items()}})
    monitor.detach()
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("full"), preset="full")


def test_a_training_that_is_done_again_is_the_same_to_the_bit(base: Path, tmp_path: Path) -> None:
    again = train(tmp_path)
    for found in (diff_runs(base, again, rtol=0), diff_runs(load_run(base), load_run(again))):
        assert not found.diverges
        assert found.exit_code == 0
        assert (found.first, found.onset, found.largest, found.divergences, found.interpretation) == (None, None, None, (), "")
        assert found.steps == tuple(range(24))
        assert found.stages["parameters"].tensors == 10
        assert not any(found.unmatched)
        assert found.not_compared == ("gradmon/overhead_fraction",)
    assert "none of the compared values differs at all" in str(found)


# --- one change, in step 13 ----------------------------------------------------------------------------------------------------------


def _rate(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 13:
        optimizer.param_groups[0]["lr"] = 2e-2
    return x


def _limit(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model.limit = 0.05 if step == 13 else 0.5
    return x


def _random(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 13:
        torch.rand(1)
    return x


def _data(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return x + 0.1 if step == 13 else x


def _noise(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model.noise = 0.1 if step == 13 else 0.0
    return x


def _weight(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 13:
        with torch.no_grad():
            model.embed.weight += 0.01
    return x


def _backward(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model.shrink = 0.5 if step == 13 else 1.0
    return x


def _decay(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 10:  # in which updates are measured
        optimizer.param_groups[0]["weight_decay"] = 0.5
    return x


def _decay_unseen(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 12:  # in which they are not
        optimizer.param_groups[0]["weight_decay"] = 0.5
    return x


@pytest.mark.parametrize(
    ("preset", "change", "step", "key", "reading"),
    [
        ("standard", _rate, 13, "context/lr", "The parameters and gradients are the same, and the learning rate differs."),
        ("standard", _limit, 13, "gradient/embed.bias/norm", "the clip, or its limit"),
        ("standard", _random, 13, "loss", "The parameters are the same, and the loss differs: other data, other random numbers"),
        ("full", _random, 13, "activation/drop/norm", "this is the first activation that differs"),
        ("standard", _data, 13, "loss", "other data"),
        ("full", _data, 13, "activation/embed/norm", "The parameters are the same, and this is the first activation"),
        ("full", _noise, 13, "activation/blocks.2.0/norm", "other code in the forward pass"),
        ("standard", _weight, 13, "parameter/embed.weight/norm", "All values that both runs recorded in step 12 are the same"),
        (
            "full",
            _backward,
            13,
            "gradient_before_clip/blocks.1.0.bias/norm",
            "loss are the same, and gradients differ: the backward pass",
        ),
        ("standard", _decay, 10, "update/head.weight/norm", "the optimizer's result differs"),
        ("standard", _decay_unseen, 13, "parameter/head.weight/norm", "the optimizer's settings"),
    ],
)
def test_one_change_is_found_where_it_was_made(
    preset: str, change: Change, step: int, key: str, reading: str, base: Path, full: Path, tmp_path: Path
) -> None:
    changed = train(tmp_path, change, preset=preset)
    found = diff_runs(full if preset == "full" else base, changed)
    assert found.first is not None
    assert (found.first.step, found.first.key) == (step, key)
    assert found.first == found.divergences[0]
    assert reading in found.interpretation
    assert found.exit_code == 1
    stages = list(STAGES)
    assert [stages.index(parting.stage) for parting in found.divergences] == sorted(
        stages.index(parting.stage) for parting in found.divergences
    )
    for name, stage in found.stages.items():
        parted = sum(parting.stage == name for parting in found.divergences)
        assert stage.tensors_part + stage.values_part == parted <= stage.tensors + stage.values
    assert all(
        stage.tensors_part + stage.values_part == 0
        for name, stage in found.stages.items()
        if stages.index(name) < stages.index(found.first.stage)
    )


def test_every_value_of_a_parting_is_that_of_the_runs(base: Path, tmp_path: Path) -> None:
    changed = train(tmp_path, _data)
    found = diff_runs(base, changed)
    runs = load_run(base), load_run(changed)
    values = [{**values_of(run._reader, 13), "context/lr": run.record(13).context["lr"][0]} for run in runs]
    assert len(found.divergences) > 20
    for parting in found.divergences:
        assert (parting.a, parting.b) == (values[0][parting.key], values[1][parting.other])
        if parting.key.endswith(("norm", "loss", "max")):
            assert parting.relative == pytest.approx(abs(parting.a - parting.b) / max(abs(parting.a), abs(parting.b)), rel=1e-12)


def test_the_growth_is_that_of_the_values(base: Path, tmp_path: Path) -> None:
    found = diff_runs(base, train(tmp_path, _data))
    runs = load_run(base), load_run(tmp_path)
    assert list(found.growth) == ["loss", "gradmon/param_norm", "gradmon/grad_norm"]
    assert list(found.growth["loss"]) == [13, 14, 16, 23]
    for key, growth in found.growth.items():
        one, other = (run.series(key) for run in runs)
        for step, relative in growth.items():
            assert relative == abs(one[step] - other[step]) / max(abs(one[step]), abs(other[step]))
    assert found.growth["gradmon/param_norm"][13] == 0 < found.growth["gradmon/param_norm"][14]


def test_another_seed_parts_in_the_first_step(base: Path, tmp_path: Path) -> None:
    found = diff_runs(base, train(tmp_path, seed=1))
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (0, "parameters")
    assert "another seed, initialisation or checkpoint" in found.interpretation


def test_no_more_than_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {step: {f"x{number}": float(step) for number in range(40)} for step in range(1000)}
    one = _log(tmp_path / "a", values)
    other = _log(tmp_path / "b", {**values, 5: {**values[5], "x7": 0.0}})
    read = []
    window = RunReader.window
    monkeypatch.setattr(RunReader, "window", lambda run, steps: read.append(len(steps)) or window(run, steps))
    monkeypatch.setattr("torch_gradmon.analysis.comparison._CELLS", 4000)
    found = diff_runs(one, other)
    assert found.first is not None
    assert (found.first.step, found.first.key) == (5, "x7")
    assert sum(read) < 60
    read.clear()
    assert diff_runs(one, one).exit_code == 0
    assert sum(read) >= 2000
    assert max(read) <= 100  # of forty values each


def test_tags_that_are_not_the_same_are_told(tmp_path: Path) -> None:
    one = train(tmp_path / "a", tag=lambda step: [step, 2])
    other = train(tmp_path / "b", _data, tag=lambda step: [step if step != 13 else 99, 2])
    found = diff_runs(one, other)
    assert found.tags == {"batch": ([13, 2], [99, 2])}
    assert "tags of step 13 that differ: batch [13, 2] and [99, 2]" in str(found)


def test_rounding_is_told_from_more(base: Path, tmp_path: Path) -> None:
    def rounded(step: int, model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        model.noise = 1e-7 if step == 5 else 0.0
        return x

    changed = train(tmp_path, rounded)
    found = diff_runs(base, changed, rtol=1e-2)
    assert not found.diverges
    assert found.onset is not None
    assert found.largest is not None
    assert found.onset.step == 5
    assert 0 < found.onset.relative < found.largest.relative < 1e-2
    assert "of the size of rounding in float32" in found.interpretation
    tight = diff_runs(base, changed, rtol=0)
    assert tight.first is not None
    assert tight.first.step == 5
    assert "more than rounding" in diff_runs(base, train(tmp_path / "more", _data)).interpretation


# --- what only one has -------------------------------------------------------------------------------------------------------------


def test_settings_of_optimizers_that_differ_are_the_cause(base: Path, tmp_path: Path) -> None:
    decayed = diff_runs(base, train(tmp_path / "decayed", weight_decay=0.01001))
    assert decayed.settings == {"weight_decay": ("0.01", "0.01001")}
    assert decayed.onset is not None
    assert decayed.onset.relative < 2e-6
    assert decayed.interpretation.endswith("The optimizers differ in weight_decay, which may be the cause.")
    assert "settings that differ: weight_decay 0.01 and 0.01001" in str(decayed)
    shorter = diff_runs(base, train(tmp_path / "shorter", betas=(0.8, 0.99), foreach=False))
    assert shorter.settings == {"betas": ("0.9, 0.999", "0.8, 0.99"), "foreach": ("", "False")}
    assert json.loads(shorter.to_json())["settings"]["betas"] == ["0.9, 0.999", "0.8, 0.99"]
    assert "The optimizers differ in betas, foreach, which" in shorter.interpretation
    data = diff_runs(base, train(tmp_path / "data", _data, weight_decay=0.02), ignore=["^parameter", "param_norm", "^update"])
    assert "settings that differ: weight_decay" in str(data)
    assert diff_runs(base, base).settings == {}
    other = diff_runs(base, train(tmp_path / "other", seed=1, weight_decay=0.02))
    assert other.onset is not None
    assert other.onset.key.startswith("parameter/")
    assert "weight_decay" not in other.interpretation  # they differ before any step
    assert "settings that differ: weight_decay 0.01 and 0.02" in str(other)


def test_settings_are_compared_group_by_group() -> None:
    def made(*rates: float | None) -> dict[str, Any]:
        return {"optimizers": [{"optimizer": "SGD", "settings": {} if rate is None else {"lr": rate}} for rate in rates]}

    assert settings_that_differ(made(0.1, 0.2, 0.1), made(0.1, 0.2, 0.2)) == {"lr": ("0.1 | 0.2 | 0.1", "0.1 | 0.2 | 0.2")}
    assert settings_that_differ(made(0.1, 0.1), made(0.2, 0.2)) == {"lr": ("0.1", "0.2")}
    assert settings_that_differ(made(None), made(0.2)) == {}  # one was on a device


def test_common_steps_are_compared_and_the_others_told(base: Path, tmp_path: Path) -> None:
    seldom = train(tmp_path, every=2, steps=30)
    found = diff_runs(base, seldom)
    assert not found.diverges
    assert found.steps == tuple(range(0, 24, 2))
    assert found.unmatched[0].steps == tuple(step for step in range(24) if step % 2)
    assert found.unmatched[1].steps == (24, 26, 28)
    # a spike score follows from the steps before, which are not the same
    assert {"gradmon/spike_score", "gradmon/clip_fraction"} <= set(found.not_compared)
    assert diff_runs(base, seldom, strict=True).exit_code == 1
    assert diff_runs(base, seldom, keys="spike_score").exit_code == 1  # who asks for it gets it
    assert (
        "gradmon/spike_score" in diff_runs(base, seldom, first=21).not_compared
    )  # of which steps before the first one tell, too


def test_a_run_that_was_resumed_is_compared_by_its_last_word(base: Path, tmp_path: Path) -> None:
    resumed = train(tmp_path, _data)  # parts in step 13, and is taken back to 10
    store, whole = RunWriter(resumed), read_run(base)
    for step in range(10, 24):
        context = dict(whole.context(step))
        tables = {source: table for source in whole.sources if (table := whole.table(source, step)) is not None}
        values = {parse_key(key): value for key, value in whole.metrics(step).items()}
        store.log(StepRecord(step, context.pop("time"), context.pop("applied"), values, tables, context))
    store.close()
    assert diff_runs(base, resumed).exit_code == 0
    assert diff_runs(base, resumed).largest is None or diff_runs(base, resumed).largest.relative < 1e-6


def _log(path: Path, values: Mapping[int, Mapping[str, float]], context: Mapping[int, Mapping[str, Any]] | None = None) -> Path:
    store = RunWriter(path)
    for step, found in values.items():
        keys = {parse_key(key): value for key, value in found.items()}
        store.log(StepRecord(step, float(step), True, keys, {}, (context or {}).get(step, {})))
    store.close()
    return path


def test_what_one_run_lacks_is_told_and_counts_if_strict(tmp_path: Path) -> None:
    a = _log(tmp_path / "a", {step: {"x": 1.0, "y": 2.0, "z": float(step)} for step in range(4)})
    b = _log(tmp_path / "b", {0: {"x": 1.0, "z": 0.0}, 1: {"x": 1.0}, 2: {"x": 1.0, "w": 1.0}, 3: {"x": 1.0}})
    found = diff_runs(a, b)
    assert found.exit_code == 0
    assert [lone.keys for lone in found.unmatched] == [("y",), ("w",)]
    assert [lone.gaps for lone in found.unmatched] == [{"z": (3, 1)}, {}]
    assert "but 2 tensors and values are in one of them only" in str(found)
    assert diff_runs(a, b, strict=True).exit_code == 1
    assert diff_runs(a, b, strict=True, keys="^x$").exit_code == 0
    assert diff_runs(a, b, strict=True, keys="^[xz]$").exit_code == 1  # the gap
    assert diff_runs(a, b, strict=True, keys="^[xz]$", last=0).exit_code == 0


def test_a_tensor_without_a_gradient_in_one_run_is_told(tmp_path: Path) -> None:
    table = StatsTable(("u", "v"), torch.ones(2, 8, dtype=torch.float64), ALL_COLUMNS)
    for name, lacking in (("a", ()), ("b", (2, 3))):
        store = RunWriter(tmp_path / name)
        for step in range(5):
            some = StatsTable(("u",), table.rows[:1], ALL_COLUMNS) if step in lacking else table
            store.log(StepRecord(step, 0.0, True, {}, {"gradient": some}))
        store.close()
    found = diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 0
    assert [lone.gaps for lone in found.unmatched] == [{"gradient/v": (2, 2)}, {}]
    assert diff_runs(tmp_path / "a", tmp_path / "b", strict=True).exit_code == 1


@pytest.mark.parametrize("steps_at_a_time", [1, 8])
def test_gaps_are_counted_wherever_they_are(steps_at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.analysis.comparison._CELLS", 1 if steps_at_a_time == 1 else 1 << 20)
    table = StatsTable(("old.u", "old.v"), torch.ones(2, 8, dtype=torch.float64), ALL_COLUMNS)
    for name, prefix, every in (("a", "old.", 2), ("b", "new.", 3)):
        store = RunWriter(tmp_path / name)
        for step in range(12):
            names = tuple(prefix + each[-1] for each in table.names)
            tables = {"parameter": StatsTable(names, table.rows, ALL_COLUMNS)}
            values = {Key("", "x", ""): 1.0}
            if step % every == 0:
                tables["update"] = StatsTable(names, table.rows, ALL_COLUMNS)
                values |= {Key("", "seldom", ""): 2.0, Key("parameter", names[0], "mine"): 3.0}
            store.log(StepRecord(step, 0.0, True, values, tables))
        store.close()
    found = diff_runs(tmp_path / "a", tmp_path / "b", rename={"^old": "new"})
    assert not found.diverges
    only_a, only_b = (2, 4, 8, 10), (3, 9)
    gaps = {"update/{}.u", "update/{}.v", "seldom", "parameter/{}.u/mine"}
    for lone, steps in zip(found.unmatched, (only_a, only_b), strict=True):
        assert not lone.keys
        assert lone.gaps == {key.format("old"): (len(steps), steps[0]) for key in gaps}
    assert diff_runs(tmp_path / "a", tmp_path / "b", rename={"^old": "new"}, strict=True).exit_code == 1
    assert (
        diff_runs(tmp_path / "a", tmp_path / "b", rename={"^old": "new"}, strict=True, keys="x$|norm", ignore="update").exit_code
        == 0
    )


def test_what_one_run_has_alone_outside_of_the_steps_that_count_does_not_count(tmp_path: Path) -> None:
    table = StatsTable(("u",), torch.ones(1, 8, dtype=torch.float64), ALL_COLUMNS)
    for name in ("a", "b"):
        store = RunWriter(tmp_path / name)
        for step in range(40):
            values = {Key("", "x", ""): 1.0}
            if name == "a" and step == 30:
                values[Key("", "val/score", "")] = 1.0
            tables = {"parameter": table} | ({"update": table} if name == "a" and step == 35 else {})
            store.log(StepRecord(step, 0.0, True, values, tables))
        store.close()
    assert diff_runs(tmp_path / "a", tmp_path / "b", strict=True).exit_code == 1
    assert diff_runs(tmp_path / "a", tmp_path / "b", last=20, strict=True).exit_code == 0
    assert diff_runs(tmp_path / "a", tmp_path / "b", first=20, last=32, strict=True).unmatched[0].keys == ("val/score",)
    assert diff_runs(tmp_path / "a", tmp_path / "b", first=32, strict=True).unmatched[0].keys == ("update/u",)


def test_tags_that_are_nan_are_alike_and_json(tmp_path: Path) -> None:
    for name, tag, value in (("a", math.nan, 1.0), ("b", math.nan, 2.0), ("c", 3.0, 1e308), ("d", 3.0, -1e308)):
        store = RunWriter(tmp_path / name)
        store.log(StepRecord(0, 0.0, True, {Key("", "loss", ""): value}, {}, {"tags": {"temperature": tag}}))
        store.close()
    assert diff_runs(tmp_path / "a", tmp_path / "b").tags == {}
    found = diff_runs(tmp_path / "a", tmp_path / "c")
    assert json.loads(found.to_json())["tags"] == {"temperature": ["NaN", 3.0]}
    far = diff_runs(tmp_path / "c", tmp_path / "d")
    assert far.first is not None
    assert (far.first.relative, "finite" in far.interpretation) == (math.inf, False)
    assert json.loads(far.to_json())["first"]["relative"] == "Infinity"


# --- values --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "parts"),
    [
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.inf, -math.inf, True),
        (math.inf, 1.0, True),
        (1.0, math.nan, True),
        (math.nan, math.inf, True),
        (0.0, 0.0, False),
        (0.0, -0.0, False),
        (0.0, 1e-30, True),
        (1e300, -1e300, True),
        (1.0, 1.0 + 0.9e-5, False),
        (1.0, 1.0 + 1.1e-5, True),
        (-1.0, 1.0, True),
    ],
)
def test_two_values(a: float, b: float, parts: bool, tmp_path: Path) -> None:
    for left, right in ((a, b), (b, a)):
        one, other = tmp_path / f"{left}", tmp_path / f"{right} "
        _log(one, {0: {"x": left, "same": 1.0}})
        _log(other, {0: {"x": right, "same": 1.0}})
        found = diff_runs(one, other)
        assert found.diverges is parts
        assert (found.first is None) is not parts
        if parts:
            assert found.first is not None
            assert found.first.relative > 0
            assert float(found.to_dict()["first"]["a"]) == pytest.approx(left, nan_ok=True)  # "NaN", "Infinity"
            json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for path in (one, other):
            emptied(path)


def test_small_values_that_are_differences_are_judged_by_larger_ones(tmp_path: Path) -> None:
    def table(mean: float, near_zero: float, std: float = 1.0) -> StatsTable:
        row = [1000.0, 1000 * mean, 800.0, 1000 * (mean**2 + std**2), near_zero, 0.0, -3.0, 3.0]
        return StatsTable(("w",), torch.tensor([row], dtype=torch.float64), ALL_COLUMNS)

    def parts(one: StatsTable, other: StatsTable, **options: Any) -> bool:
        for name, some in (("a", one), ("b", other)):
            emptied(tmp_path / name)
            store = RunWriter(tmp_path / name)
            store.log(StepRecord(0, 0.0, True, {}, {"gradient": some}))
            store.close()
        return diff_runs(tmp_path / "a", tmp_path / "b", **options).diverges

    assert not parts(table(1e-9, 0), table(2e-9, 0))  # a mean beside an rms of 1
    assert not parts(table(1e-9, 0), table(2e-9, 0), keys="/mean$")  # which is looked at, even if it is not compared
    assert parts(table(1e-3, 0), table(1.1e-3, 0))
    assert parts(table(1e-9, 0), table(2e-9, 0), rtol=0)
    assert not parts(table(0.5, 7), table(0.5, 9))  # two elements
    assert parts(table(0.5, 7), table(0.5, 10))
    assert parts(table(0.5, 7), table(0.5, 8), rtol=0)
    assert not parts(table(1.0, 0, 1e-7), table(1.0, 0, 2e-7), keys="/std$")  # of a tensor that is almost constant
    assert parts(table(1.0, 0, 1e-3), table(1.0, 0, 1.1e-3), keys="/std$")


def test_learning_rates_scales_and_refusals_are_compared(tmp_path: Path) -> None:
    contexts: dict[str, dict[str, Any]] = {
        "base": {"lr": [0.1, 0.2], "amp_scale": 8.0},
        "rate": {"lr": [0.1, 0.3], "amp_scale": 8.0},
        "scale": {"lr": [0.1, 0.2], "amp_scale": 4.0},
        "groups": {"lr": [0.1], "amp_scale": 8.0},
        "time": {"lr": [0.1, 0.2], "amp_scale": 8.0, "overhead_fraction": 3.0},
    }
    paths = {name: _log(tmp_path / name, {0: {"x": 1.0}}, {0: context}) for name, context in contexts.items()}
    firsts = {name: diff_runs(paths["base"], path).first for name, path in paths.items()}
    assert {name: first and first.key for name, first in firsts.items()} == {
        "base": None,
        "rate": "context/lr/1",
        "scale": "context/amp_scale",
        "groups": None,
        "time": None,
    }
    model = nn.Linear(2, 1)
    for name, factor in (("c", 1.0), ("d", math.inf)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        monitor = ModuleMonitor(model, run_dir=tmp_path / name)
        monitor.attach(optimizer, scaler=scaler)
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.log_scalar("x", 1.0)
        monitor.detach()
    found = diff_runs(tmp_path / "c", tmp_path / "d", keys="^context/")
    assert [parting.key for parting in found.divergences] == ["context/applied"]


def test_what_tells_of_time_is_not_compared(base: Path, tmp_path: Path) -> None:
    log = {"tokens_per_sec": lambda step: 3.0 * step, "step_time_ms": float, "timestep_loss": float}
    one = train(tmp_path / "a", log=log, steps=3)
    other = train(tmp_path / "b", log={**log, "tokens_per_sec": float, "step_time_ms": lambda step: 9.0}, steps=3)
    found = diff_runs(one, other)
    assert not found.diverges
    assert set(found.not_compared) == {"gradmon/overhead_fraction", "tokens_per_sec", "step_time_ms"}
    assert diff_runs(one, other, keys="tokens").diverges
    assert not is_clock(Key("gradient", "time.weight", "norm"))


# --- rules ----------------------------------------------------------------------------------------------------------------------------


def test_patterns_choose_what_is_compared_and_how_closely(base: Path, tmp_path: Path) -> None:
    changed = train(tmp_path, _limit)
    found = diff_runs(base, changed, keys="^gradient_before_clip/", last=13)
    assert not found.diverges
    assert set(found.stages) == {"gradients before clipping"}
    assert not diff_runs(base, changed, ignore=["^gradient/", "gradmon/"], last=13).diverges
    assert not diff_runs(base, changed, tolerances={"^gradient/": 1.0, "gradmon/": 1.0}, last=13).diverges
    found = diff_runs(base, changed, tolerances={"head": 1.0, "^gradient/": 1e-3}, last=13)
    assert found.first is not None
    assert found.first.key == "gradmon/grad_norm_after_clip" or "head" not in found.first.key
    # the first pattern that is found decides
    assert not diff_runs(
        base, changed, tolerances={"^gradient/.*norm": 1.0, "^gradient/": 0.0}, keys="^gradient/.*norm", last=13
    ).diverges


def test_modules_that_were_renamed_are_compared(base: Path, tmp_path: Path) -> None:
    renamed = train(tmp_path, blocks="layers")
    found = diff_runs(base, renamed)
    assert not found.diverges  # in what both have
    assert found.stages["parameters"].tensors == 4
    assert "parameter/layers.0.0.weight" in found.unmatched[1].keys
    assert diff_runs(base, renamed, strict=True).exit_code == 1
    found = diff_runs(base, renamed, rename={r"^blocks\.(\d)": r"layers.\1"}, strict=True)
    assert found.exit_code == 0
    assert found.stages["parameters"].tensors == 10
    found = diff_runs(base, train(tmp_path / "other", _noise, blocks="layers"), rename={"^blocks": "layers"}, keys="weight/norm")
    assert found.first is not None
    assert found.first.key.replace("blocks", "layers") == found.first.other


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": "nothing"}, ValueError, "keys: 'nothing' matches no key of the two runs"),
        ({"ignore": ["loss", "nothing"]}, ValueError, "ignore: 'nothing' matches no key"),
        ({"tolerances": {"nothing": 1.0}}, ValueError, "tolerances: 'nothing' matches no key"),
        ({"rename": {"nothing": "x"}}, ValueError, "rename: 'nothing' matches no name of a tensor of the first run"),
        ({"rename": {r"blocks\.\d": "blocks.9"}}, ValueError, "would both be called 'blocks.9.0.weight'"),
        ({"rename": {"blocks": r"\3"}}, ValueError, "cannot replace 'blocks'"),
        ({"rename": {"blocks": 3}}, TypeError, "must be its replacement"),
        ({"rename": [("a", "b")]}, TypeError, "rename must be a dict"),
        ({"keys": "("}, ValueError, r"keys='\(' is not a valid regular expression"),
        ({"keys": 3}, TypeError, "keys must be a pattern or a list"),
        ({"rtol": -1.0}, ValueError, "rtol=-1.0 must be a number of at least 0"),
        ({"rtol": math.nan}, ValueError, "rtol=nan"),
        ({"atol": "1"}, TypeError, "atol must be a number"),
        ({"tolerances": {"loss": True}}, TypeError, r"tolerances\['loss'\] must be a number"),
        ({"first": -1}, ValueError, "first=-1 must not be negative"),
        ({"first": 30}, ValueError, "no step in common: the first has none of the selected ones"),
        ({"strict": 1}, TypeError, "strict must be True or False"),
        ({"keys": "overhead", "ignore": "overhead"}, ValueError, "leave out all that the runs have in common"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str, base: Path) -> None:
    with pytest.raises(error, match=message):
        diff_runs(base, base, **options)


def test_runs_without_anything_in_common_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor and no value in common; rename= \(--rename\)"):
        diff_runs(base, _log(tmp_path / "a", {0: {"x": 1.0}}))
    with pytest.raises(
        ValueError, match="no step in common: the first has 24 steps from 0 to 23, the second 1 steps from 99 to 99"
    ):
        diff_runs(base, _log(tmp_path / "b", {99: {"loss": 1.0}}))
    with pytest.raises(FileNotFoundError, match="there is no run"):
        diff_runs(base, tmp_path / "nowhere")


# --- the order of a step ---------------------------------------------------------------------------------------------------------------


def test_values_are_ranked_as_they_come_about() -> None:
    calls = ["embed", "blocks.0.attn", "blocks.0", "blocks.1.attn", "blocks.1", "head", "[root module]"]
    parameters = ["head.weight", "blocks.0.attn.weight", "blocks.1.attn.weight", "embed.weight"]
    order = Order(
        {
            "activation": calls,
            "parameter": parameters,
            "gradient": parameters,
            "input": ["[root module]", *calls],
            "update": parameters,
        }
    )
    expected = [
        "parameter/embed.weight/norm",
        "parameter/blocks.0.attn.weight/norm",
        "parameter/blocks.1.attn.weight/norm",
        "parameter/head.weight/norm",
        "gradmon/param_norm",
        "input/[root module]/norm",
        "activation/embed/norm",
        "input/blocks.0.attn/norm",
        "attention_entropy/blocks.0.attn/mean",
        "activation/blocks.0/norm",
        "activation/blocks.1/norm",
        "activation/head/count",
        "activation/head/nonfinite_count",
        "activation/head/norm",
        "activation/head/mine",
        "activation/[root module]/norm",
        "loss",
        "activation_gradient/head/norm",
        "activation_gradient/embed/norm",
        "gradient_before_clip/head.weight/norm",
        "gradient_before_clip/blocks.1.attn.weight/norm",
        "gradient_before_clip/embed.weight/norm",
        "gradmon/grad_norm",
        "gradient/head.weight/norm",
        "gradmon/grad_norm_after_clip",
        "optimizer/head.weight/exp_avg_norm",
        "update/embed.weight/norm",
        "update/head.weight/norm",
        "gradmon/update_ratio",
        "gradmon/spike_score",
    ]
    keys = [parse_key(text) for text in expected]
    ranks = [order.rank(key) for key in keys]
    assert ranks == sorted(ranks)
    assert [key for _, key in sorted(zip(ranks, keys, strict=True), reverse=True)][::-1] == keys


# --- algebra ---------------------------------------------------------------------------------------------------------------------------

_NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e-8, 1e20, math.inf, -math.inf, math.nan]),
    st.floats(-10, 10, width=32),
)
_STEPS = st.lists(st.tuples(_NUMBERS, _NUMBERS, st.sampled_from([0.0, 1e-9, 1e-7, 1e-5, 1e-3, 1.0])), min_size=1, max_size=6)
_QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _pair(path: Path, rows: list[tuple[float, float, float]]) -> tuple[Path, Path]:
    """Two runs of two values; in each step the second is off by so much, relative."""
    runs = path / "one", path / "other"
    for run in runs:
        emptied(run)
    _log(runs[0], {step: {"x": x, "y": y} for step, (x, y, _) in enumerate(rows)})
    _log(runs[1], {step: {"x": x * (1 + off), "y": y * (1 - off)} for step, (x, y, off) in enumerate(rows)})
    return runs


def _naive(rows: list[tuple[float, float, float]], rtol: float, atol: float) -> int | None:
    for step, (x, y, off) in enumerate(rows):
        for a, b in ((x, x * (1 + off)), (y, y * (1 - off))):
            equal = a == b or (a != a and b != b)
            if not equal and not (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= atol + rtol * max(abs(a), abs(b))):
                return step
    return None


@_QUICK
@given(_STEPS, st.sampled_from([0.0, 1e-8, 1e-6, 1e-4, 1e-2]), st.sampled_from([0.0, 1e-6, 1.0]))
def test_the_first_parting_is_that_of_plain_arithmetic(
    tmp_path: Path, rows: list[tuple[float, float, float]], rtol: float, atol: float
) -> None:
    one, other = _pair(tmp_path, rows)
    found, back = diff_runs(one, other, rtol, atol), diff_runs(other, one, rtol, atol)
    expected = _naive(rows, rtol, atol)
    assert (None if found.first is None else found.first.step) == expected
    assert [(p.step, p.key, p.a, p.b) for p in found.divergences if p.a == p.a and p.b == p.b] == [
        (p.step, p.key, p.b, p.a) for p in back.divergences if p.a == p.a and p.b == p.b
    ]
    assert diff_runs(one, one, 0.0).onset is None
    assert found.steps == tuple(range(len(rows) if expected is None else expected + 1))


@_QUICK
@given(_STEPS)
def test_a_wider_tolerance_never_parts_earlier(tmp_path: Path, rows: list[tuple[float, float, float]]) -> None:
    one, other = _pair(tmp_path, rows)
    found = [diff_runs(one, other, rtol) for rtol in (0.0, 1e-8, 1e-6, 1e-4, 1e-2, 1e6)]
    steps = [math.inf if each.first is None else each.first.step for each in found]
    assert steps == sorted(steps)
    for narrow, wide in itertools.pairwise(found):
        if narrow.first is not None and wide.first is not None and narrow.first.step == wide.first.step:
            assert {p.key for p in wide.divergences} <= {p.key for p in narrow.divergences}
    assert len({each.onset and (each.onset.step, each.onset.key) for each in found}) == 1


# --- words, JSON, command line -----------------------------------------------------------------------------------------------------------


def test_it_is_told_on_one_screen(base: Path, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    shutil.copytree(full, "full")
    train(Path("data"), _data)
    found = diff_runs("base", "data")
    for each in (
        found,
        diff_runs("full", train(Path("random"), _random, preset="full")),
        diff_runs("base", "base"),
        diff_runs("full", "data"),
    ):
        lines = str(each).splitlines()
        assert len(lines) <= 45
        assert [line for line in lines if len(line) > 100] == []
    first, second = str(found).splitlines()[:2]
    assert first == "base and data diverge in step 13: loss"
    one, other = (load_run(path).series("loss")[13] for path in ("base", "data"))
    assert second.startswith(f"  {one:.6g} and {other:.6g}, relative difference ")


def test_the_command_line(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = train(tmp_path, _data, blocks="layers")
    assert main(["diff", str(base), str(base)]) == 0
    assert "are equal within the tolerance" in " ".join(capsys.readouterr().out.split())
    words = ["diff", str(base), str(changed), "--rename", "^blocks=layers"]
    assert main(words) == 1
    assert "diverge in step 13: loss" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["step"] == 13
    assert found["parts"] is True
    assert found == diff_runs(base, changed, rename={"^blocks": "layers"}).to_dict() | {"runs": [str(base), str(changed)]}
    assert main([*words, "--last", "12", "--strict"]) == 0
    assert main([*words, "--tol", ".=1e9", "--atol", "1e9"]) == 0
    assert main([*words, "--ignore", "loss|grad|update|spike|param"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keys", "nothing"], "keys: 'nothing' matches no key"),
        (["--tol", "loss"], "--tol loss: give two parts with an equals sign"),
        (["--tol", "loss=x"], "--tol loss=x: 'x' is not a number"),
        (["--rename", "a"], "--rename a: give two parts"),
        (["--rtol", "-1"], "rtol=-1.0 must be a number of at least 0"),
        (["--first", "99"], "no step in common"),
    ],
)
def test_a_wrong_request_is_no_parting(words: list[str], message: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(base), str(base), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_run_that_is_not_there_is_a_wrong_request(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(base), str(tmp_path / "nowhere")]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_the_result_is_public() -> None:
    assert isinstance(gradmon.analysis.diff.RunDiff, type)
    assert gradmon.analysis.diff.RunDiff is RunDiff
    assert callable(gradmon.diff_runs)
