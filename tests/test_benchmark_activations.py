"""What activations cost is measured on the right work, with a stopwatch that sees the monitor and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import activations, rivals, watched
from benchmarks.activations import compare, judge
from benchmarks.contenders import FIVE
from benchmarks.models import GPT, Sizes
from benchmarks.report import activations_markdown, watched_table
from benchmarks.timing import Floor, Samples
from benchmarks.watched import Cost, Side, clock, outputs
from benchmarks.watchers import METRICS, WATCHERS, Watcher, own

from . import oracle

pytestmark = pytest.mark.thorough

TINY = Sizes(vocabulary=40, context=12, width=16, heads=2, blocks=2)
RIVALS = ("torch_module_monitor", "torch_module_monitor_plain")
needs_rival = [pytest.mark.extra, pytest.mark.skipif(not find_spec("torch_module_monitor"), reason="not installed")]


def model_and_batch() -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(TINY)
    with torch.no_grad():
        model.norm.weight[:4] = 0  # so that a quarter of its output is exactly zero
    text = torch.randint(TINY.vocabulary, (2, 13))
    return model, (text[:, :-1], text[:, 1:])


def values(watcher: str, metrics: tuple[str, ...] = FIVE) -> dict[str, float]:
    model, batch = model_and_batch()
    side = Side(model, WATCHERS[watcher].watch(model, metrics), batch)
    side.step()
    return side.values


@pytest.mark.parametrize("metrics", [names for _, names in METRICS.values()])
def test_ours_gives_the_values_of_every_output(metrics: tuple[str, ...]) -> None:
    model, batch = model_and_batch()
    of: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name != "positions":  # only its weight is used
            module.register_forward_hook(lambda m, a, y, name=name or "[root module]": of.update({name: y.detach()}))
    model(*batch)
    found = values("eager", metrics)
    assert found.keys() == {f"activation/{name}/{metric}" for name in of for metric in metrics}
    for name, output in of.items():
        truth = oracle.values(output)
        for metric in metrics:
            oracle.check_value(metric, found[f"activation/{name}/{metric}"], truth[metric], oracle.reals(output), name)


@pytest.mark.parametrize("rival", [pytest.param(name, marks=needs_rival) for name in RIVALS])
def test_the_rival_does_the_same_work(rival: str) -> None:
    ours, theirs = values("eager"), values(rival)
    assert theirs == pytest.approx(ours, rel=1e-2, abs=1e-6)
    assert theirs["activation/norm/sparsity"] == 0.25


def test_without_a_compiler_the_fused_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch_gradmon.statistics.cpp.CppStatistics.__init__", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        own(model_and_batch()[0], FIVE, compiled=True)


class FakeTime:
    """A clock that only goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> Callable[..., None]:
        def work(*_: object) -> None:
            self.now += seconds

        return work


class SlowLayer(nn.Module):
    """Its forward takes 1,000 seconds and its backward pass 5,000."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self.weight, self.time = nn.Parameter(torch.ones(2)), time
        self.weight.register_hook(time.passes(5000))  # type: ignore[no-untyped-call]  # torch's own

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        self.time.now += 1000
        return (x * self.weight).sum()


class SlowModel(nn.Module):
    """One layer, and 300 seconds more."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self.layer, self.time = SlowLayer(time), time

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.time.now += 300
        loss: Tensor = self.layer(x, y)
        return loss


class SlowMonitor:
    """Takes 1, 2 and 4 seconds in the calls, 10 before and 30 after each module."""

    def __init__(self, time: FakeTime, model: nn.Module) -> None:
        self.time = time
        for module in model.modules():
            module.register_forward_pre_hook(time.passes(10))
            module.register_forward_hook(time.passes(30))

    def begin_step(self, step: int) -> None:
        self.time.now += 1

    def end_step(self) -> None:
        self.time.now += 2

    def get_step_metrics(self) -> dict[str, float]:
        self.time.now += 4
        return {"value": 1.0}


def test_what_is_added_is_the_hooks_and_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(watched, "time", time)
    batch = torch.ones(2), torch.ones(2)
    model = SlowModel(time)
    side = Side(model, SlowMonitor(time, model), batch)
    hooks, calls = 2 * (10 + 30), 1 + 2 + 4
    expected = Cost(hooks + calls, 1300 + hooks + calls, 6300 + hooks + calls)
    assert [side.step(), side.step()] == side.costs == [expected, expected]  # without those that warm up
    assert side.values == {"value": 1.0}
    assert model.layer.weight.grad is None
    bare = Side(SlowModel(time), None, batch)
    assert bare.step() == Cost(0, 1300, 6300)
    assert clock(side.step) == hooks + calls
    assert clock(time.passes(17)) == 17


def test_a_hook_outside_of_the_stopwatch_is_not_overlooked() -> None:
    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        model, batch = model_and_batch()
        side = Side(model, None, batch)
        side.step()
        register(model.blocks[1], lambda *_: None)
        with pytest.raises(RuntimeError, match="Block was installed outside"):
            side.step()


def test_outputs_are_those_of_all_modules() -> None:
    model, batch = model_and_batch()
    found = outputs(model, batch)
    assert len(found) == sum(1 for _ in model.modules()) - 1  # the positions are not called
    assert torch.equal(found[-1], model(*batch))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_section_has_all_who_could_take_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Absent:
        def __init__(self, *_: object, **__: object) -> None:
            raise ImportError("no such package")

    def package(name: str) -> Any:
        return type("Package", (), {"ModuleMonitor": Absent})

    monkeypatch.setattr(rivals, "_package", package)
    monkeypatch.delitem(WATCHERS, "fused")  # compiles
    section = compare("five", torch.get_num_threads(), 3, TINY, length=8)
    assert list(section["contenders"]) == ["eager"]
    assert section["left_out"] == dict.fromkeys(RIVALS, "ImportError: no such package")
    assert "left out: torch-module-monitor" in capsys.readouterr().out
    eager = section["contenders"]["eager"]
    assert all(eager[each]["count"] == 3 for each in ("ratio", "ms", "difference_ms", "added_pct"))
    assert section["floor_ms"]["count"] == 2 * 2 * 3  # before and after each step, those of the bare model too
    assert (section["outputs"], section["tokens"], section["times_faster"]) == (18, 32, [])


def test_a_watched_step_is_compared_with_the_bare_one_of_its_round() -> None:
    bare, watched_steps = [Cost(0, 1, 4), Cost(0, 2, 5)], [Cost(0.2, 1.5, 5), Cost(0.5, 2.25, 9)]
    found = activations._beside(bare, watched_steps)
    assert found["difference_ms"]["median"] == (500 + 250) / 2
    assert found["added_pct"]["median"] == pytest.approx((5 + 10) / 2)


def test_ours_is_set_against_others_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"theirs": {0: 0.08, 1: 0.09}, "plain": {0: 1.0, 1: 1.0}, "ours": {0: 0.02, 1: 0.01}, "bare": {0: 0.0, 1: 0.0}}

    def interleave(floor: Floor, runs: dict[str, Callable[[], object]], *_: object) -> Samples:
        for run in runs.values():
            run()
        return Samples([0.001], {name: seconds[name] for name in runs}, {name: {0: 1.0, 1: 1.0} for name in runs})

    monkeypatch.setattr(activations, "interleave", interleave)
    everybody = {
        "theirs": Watcher("theirs", own),
        "plain": Watcher("", own, metrics=("five",)),
        "ours": Watcher("", own, ours=True),
    }
    monkeypatch.setattr(activations, "WATCHERS", everybody)
    section = compare("norm", torch.get_num_threads(), 2, TINY, length=8)
    assert list(section["contenders"]) == ["theirs", "ours"]  # the plain functions are the same for the norm
    (entry,) = section["times_faster"]
    assert (entry["ours"], entry["than"], entry["count"], entry["median"]) == ("ours", "theirs", 2, pytest.approx((4 + 9) / 2))


def around(value: float) -> dict[str, float]:
    return {"median": value, "quartile_1": 0.5 * value, "quartile_3": 2 * value, "count": 3}


def made_up(which: str, threads: int) -> dict[str, Any]:
    figures = {"ms": around(40), "ratio": around(8), "difference_ms": around(44), "added_pct": around(5)}
    factors = {
        ("eager", "torch_module_monitor"): 4.2,
        ("eager", "torch_module_monitor_plain"): 9,
        ("fused", "torch_module_monitor"): 5.6,
    }
    return {
        "set": which,
        "title": "some metrics",
        "threads": threads,
        "outputs": 46,
        "elements": 25_000_000,
        **{
            name: around(number)
            for name, number in (("floor_ms", 5), ("forward_ms", 300), ("step_ms", 900), ("stopwatch_ms", 0.1))
        },
        "contenders": {name: {"label": watcher.label, **figures} for name, watcher in WATCHERS.items()},
        "times_faster": [{"ours": ours, "than": than, **around(value)} for (ours, than), value in factors.items()],
    }


def test_aims_are_judged_against_both_ways_to_write_the_functions() -> None:
    lines = list(judge([made_up("five", 1), made_up("norm", 1), made_up("five", 2)]))
    assert len(lines) == 6
    lean = [line for line in lines if "module_monitor," in line]
    assert lean == [
        "1 thread, eager: aimed at 3.5 times less than torch_module_monitor, measured 4.20 (2.10 to 8.40), met by 20 %",
        "1 thread, fused: aimed at 7 times less than torch_module_monitor, measured 5.60 (2.80 to 11.2), missed by 20 %",
        "2 threads, eager: aimed at 3.5 times less than torch_module_monitor, measured 4.20 (2.10 to 8.40), met by 20 %",
        "2 threads, fused: aimed at 7 times less than torch_module_monitor, measured 5.60 (2.80 to 11.2), missed by 20 %",
    ]
    assert all("torch_module_monitor_plain" in line for line in lines if line not in lean)


def test_the_table_has_a_row_for_each() -> None:
    text = "\n".join(watched_table(made_up("five", 1)))
    result = {"machine": {"processor": "P", "cores": 2, "torch": "2"}, "date": "2026-01-01", "activations": [made_up("five", 1)]}
    assert text in activations_markdown(result)
    assert (
        "| torch_gradmon, eager | 40.0 (20.0 to 80.0) | 8.00 (4.00 to 16.0) | 44.0 (22.0 to 88.0) | 5.00 (2.50 to 10.0) |" in text
    )
    assert "| torch_gradmon, fused | torch-module-monitor, lean functions | 5.60 (2.80 to 11.2) |" in text
    assert "46 outputs of 25,000,000 numbers; the floor takes 5.00 (2.50 to 10.0) ms" in text


def test_the_result_is_written_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def section(which: str, threads: int, rounds: int) -> dict[str, Any]:
        asked.append((which, threads, rounds))
        return made_up(which, threads)

    monkeypatch.setattr(activations, "compare", section)
    monkeypatch.setattr(activations, "RESULTS", tmp_path)
    activations.main(["--quick", "--threads", "1"])
    assert not list(tmp_path.iterdir())
    activations.main(["--rounds", "7", "--threads", "1", "2"])
    quick = activations.QUICK_ROUNDS
    assert asked == [("five", 1, quick), ("norm", 1, quick), ("five", 1, 7), ("norm", 1, 7), ("five", 2, 7), ("norm", 2, 7)]
    result = json.loads((tmp_path / "activations.json").read_text())
    assert result["activations"] == [made_up(which, threads) for threads in (1, 2) for which in METRICS]
    assert result["rounds"] == 7
    assert set(result["versions"]) == {"torch_gradmon", "torch-module-monitor"}
