"""The benchmarks measure what they say: the right gradients, the right work, the right arithmetic. No time decides a test."""

from __future__ import annotations

import copy
import json
import math
import shutil
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import commits, rivals
from benchmarks.contenders import CONTENDERS, FIVE
from benchmarks.idle import PARAMETERS, Loop, armed_hooks, idle
from benchmarks.idle import markdown as idle_markdown
from benchmarks.models import GPT, Sizes
from benchmarks.report import markdown, sinks_markdown, with_section
from benchmarks.sets import SETS, SMALL_SHAPES, UNSEEN, GradientSet, Tensors, build, gradients
from benchmarks.stored import markdown as stored_markdown
from benchmarks.targets import judge, verdict
from benchmarks.timing import Floor, floor_for, interleave, quotients, spread, takes_part
from torch_gradmon.core.moments import ALWAYS, VIEWS, Column
from torch_gradmon.plugins.loop_audit import TRUSTED

from . import forked, oracle

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
MIXED = GradientSet("mixed", lambda: Tensors([(300, 200), (7,), (70_001,), (32, 32), (1024,)]))
TINY = GradientSet("tiny", lambda: GPT(Sizes(vocabulary=40, context=12, width=16, heads=2, blocks=2)))


def once(name: str, model: nn.Module) -> Any:
    """What a contender gives."""
    with ExitStack() as stack:
        return CONTENDERS[name].make(model, stack)()


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return SETS[name].build()


def test_the_large_sets_have_the_shapes_that_they_are_named_for() -> None:
    for name, tensors, elements in (("gpt2_124m", 148, 124_439_808), ("gpt_10m", 76, 9_703_680)):
        parameters = list(on_meta(name).parameters())
        assert (len(parameters), sum(p.numel() for p in parameters)) == (tensors, elements)
    billions = sum(p.numel() for p in on_meta("gpt_1b3_bf16").parameters()) / 1e9
    assert 1.25 < billions < 1.35


def test_the_small_sets_have_a_thousand_tensors() -> None:
    few = [tuple(p.shape) for p in on_meta("small_16_shapes").parameters()]
    assert len(few) == 1000
    assert set(few) == set(SMALL_SHAPES)
    assert len({math.prod(shape) for shape in SMALL_SHAPES}) == 16
    assert abs(sum(map(math.prod, few)) / 1000 - 1024) < 16
    assert sorted(p.numel() for p in on_meta("small_distinct").parameters()) == list(range(524, 1524))


def test_gradients_are_of_the_size_of_gradients_and_repeat() -> None:
    model, again = build(TINY, CPU, seed=3), build(TINY, CPU, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(again), strict=True))
    assert all(bool(g.isfinite().all()) and 1e-5 < float(g.std()) < 1e-1 for g in gradients(model))
    assert isinstance(model, GPT)
    assert model.tokens.weight.grad is not None
    empty = float((model.tokens.weight.grad == 0).all(dim=1).float().mean())
    assert 0 < empty < 3 * UNSEEN
    assert not any(bool((p.grad == 0).any()) for name, p in model.named_parameters() if "blocks" in name and p.grad is not None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("eager", frozenset[Column]()),
        ("eager_but_near_zero", frozenset({Column.NEAR_ZERO})),
        ("eager_norm", frozenset(Column) - ALWAYS - {Column.SQUARE_SUM}),
        pytest.param("fused", frozenset[Column](), marks=[pytest.mark.slow, NEEDS_COMPILER]),
        ("triton", frozenset[Column]()),
    ],
)
def test_our_kernels_measure_what_they_are_timed_for(name: str, left_out: frozenset[Column]) -> None:
    model = build(MIXED, CPU)
    try:
        rows = once(name, model)
    except rivals.LeftOut as reason:
        pytest.skip(str(reason))
    for row, gradient in zip(rows, gradients(model), strict=True):
        truth = oracle.values(gradient)
        for metric, view in VIEWS.items():
            if not view.columns & left_out:
                oracle.check_value(metric, view.compute(row[None])[0].item(), truth[metric], oracle.reals(gradient), metric)


def test_the_monitor_gives_five_values_of_each_gradient() -> None:
    model = build(TINY, CPU)
    values = once("monitor", model)
    assert len(values) == len(FIVE) * len(gradients(model))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        truth = oracle.values(parameter.grad)
        for metric in FIVE:
            found = values[f"gradient/{name}/{metric}"]
            oracle.check_value(metric, found, truth[metric], oracle.reals(parameter.grad), name)


def test_the_naive_loop_does_the_same_work() -> None:
    model = build(TINY, CPU)
    values = once("naive_loop", model)
    for name, parameter in model.named_parameters():
        truth = oracle.values(parameter.grad if parameter.grad is not None else [])
        for theirs, ours in (("norm", "norm"), ("max", "max"), ("near_zero", "sparsity")):
            assert values[f"{name}/{theirs}"] == pytest.approx(truth[ours], rel=1e-5)


@pytest.mark.parametrize("name", ["torch_clip", "exact_clip"])
def test_clipping_leaves_the_gradients_for_the_next_contender(name: str) -> None:
    model = build(TINY, CPU)
    before = copy.deepcopy(gradients(model))
    assert float(once(name, model)) == pytest.approx(oracle.values(before)["norm"], rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))


def test_a_package_that_is_not_there_is_left_out_with_a_reason() -> None:
    with pytest.raises(rivals.LeftOut, match="not installed"):
        rivals._package("no_such_package_of_anybody")


def test_ratios_are_taken_between_the_floors_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing.gc.collect", lambda: 0)  # here there is nothing to be measured
    now = {"floor": 1.0, "quick": 2.0, "slow": 60.0}
    log: list[str] = []

    def run(name: str) -> Any:
        return lambda: log.append(name)

    def clock(call: Any) -> float:
        call()
        # the floor grows from one measurement to the next: 1, 2, 3, ...
        return now[log[-1]] if log[-1] != "floor" else float(log.count("floor"))

    found = interleave(
        Floor(run("floor"), scale=0.5), {"quick": run("quick"), "slow": run("slow")}, frozenset({"slow"}), rounds=15, clock=clock
    )
    assert found.floors == [0.5 * n for n in range(1, 41)]
    assert log == [each for name in log[1::3] for each in ("floor", name, "floor")]
    assert sorted(found.ratios["quick"]) == list(range(15))
    assert sorted(found.ratios["slow"]) == [0, 3, 6, 9, 12]
    position = log.index("quick")
    floors = log[:position].count("floor")
    assert found.ratios["quick"][0] == pytest.approx(2.0 / (0.5 * (floors + floors + 1) / 2))
    assert quotients(found.seconds["slow"], found.seconds["quick"]) == [30.0] * 5


def test_few_rounds_are_for_everybody() -> None:
    assert all(takes_part(number, 14, slow=True) for number in range(14))
    assert all(takes_part(number, 30, slow=False) for number in range(30))


def test_the_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "quartile_1": 2.0, "quartile_3": 4.0, "count": 5}
    assert spread([7.0]) == {"median": 7.0, "quartile_1": 7.0, "quartile_3": 7.0, "count": 1}


def test_the_floor_is_one_sum_for_each_tensor() -> None:
    tensors = gradients(build(TINY, CPU))
    floor = floor_for(tensors)
    sums = floor.run()
    assert isinstance(sums, list)
    assert floor.scale == 1
    assert [float(s) for s in sums] == [float(t.sum()) for t in tensors]


def test_an_idle_step_has_one_hook_on_a_parameter() -> None:
    loop = Loop(watched=True)
    assert armed_hooks(loop.model) == PARAMETERS + 1  # step 0 is monitored
    for _ in range(3):
        loop.step()
    assert armed_hooks(loop.model) == 1  # that of the audit
    for _ in range(TRUSTED):
        loop.step()
    assert armed_hooks(loop.model) == 0
    assert loop.monitor is not None
    loop.monitor.detach()


def test_what_an_idle_step_costs_is_told_in_a_paragraph() -> None:
    text = idle_markdown(idle(10, instances=2))
    assert "µs of Python, 0 hooks on parameters" in text
    assert "µs and 1 hook on a parameter." in text


def around(value: float) -> dict[str, float]:
    return {"median": value, "quartile_1": 0.5 * value, "quartile_3": 2 * value, "count": 3}


def result() -> dict[str, Any]:
    def contender(label: str, ratio: float, ours: bool) -> dict[str, Any]:
        return {"label": label, "ours": ours, "ratio": around(ratio), "ms": around(10 * ratio)}

    machine = {"processor": "Abacus", "instructions": "BEADS", "cores": 2, "torch_threads": 2, "gpu": None}
    where = {"device": "cpu", "threads": 1}
    section = {
        "set": "gpt2_124m",
        "title": "Some set",
        "floor_ms": around(10),
        "contenders": {"eager": contender("ours", 4.5, True), "torch_module_monitor": contender("theirs", 18, False)},
        "left_out": {"wandb_watch": "not installed"},
        "times_faster": [{"ours": "eager", "than": "torch_module_monitor", **around(4.0)}],
    }
    step = {"title": "Some model", "parameters": 1000, "tokens": 4096, "steps": 20, "step_ms": around(1234), "same_bits": True}
    own = {"own_pct": around(1.5), "own_pct_mean": 1.7, "own_pct_with_updates": around(3)}
    difference = {"difference_ms": around(20), "difference_pct": around(1.6)}
    return {
        "machine": {**machine, "system": "Wood", "python": "3.11", "torch": "2.13.0"},
        "versions": {"torch_gradmon": "0.1.0", "wandb": None},
        "date": "2026-01-02",
        "device": "cpu",
        "rounds": 3,
        "gradients": [{**section, **where}, {**section, **where, "threads": 2}],
        "training": [{**step, **own, **difference, **where}],
    }


def test_the_table_says_what_was_measured() -> None:
    text = markdown([result()])
    assert "| ours | 4.50 (2.25 to 9.00) |" in text
    assert "| theirs | 18.0 (9.00 to 36.0) |" in text
    assert "| ours | theirs | 4.00 (2.00 to 8.00) |" in text
    assert "**CPU, 1 thread**" in text
    assert "**CPU, 2 threads**" in text
    assert "Abacus (2 cores, BEADS), Wood" in text
    assert "wandb" not in text  # was not there
    assert "1.50 (0.75 to 3.00) % of a step" in text


def test_the_readme_changes_between_the_markers_only() -> None:
    start, end = "<!-- benchmark -->", "<!-- /benchmark -->"
    text = f"above\n{start}\nold\n{end}\nbelow"
    given = result()
    kept = copy.deepcopy(given)
    written = with_section(text, "benchmark", markdown([given]))
    assert written == f"above\n{start}\n\n{markdown([given])}\n\n{end}\nbelow"
    assert with_section(written, "benchmark", markdown([given])) == written
    assert given == kept
    for broken in ("nothing", f"{end} {start}", f"{start} {start} {end}"):
        with pytest.raises(ValueError, match="page needs one"):
            with_section(broken, "benchmark", markdown([given]))


def test_the_table_of_two_commits_is_that_of_the_results_kept():
    page = Path("docs/benchmarks.md").read_text(encoding="utf-8")
    assert with_section(page, "commits", commits.results()) == page


def test_aims_are_met_or_missed_by_so_much() -> None:
    assert verdict(4.5, 5, 4, small_is_good=True) == "4.50 (<= 5: met by 10 %; 4: missed by 12 %)"
    assert verdict(4.5, 5, 4, small_is_good=False) == "4.50 (>= 5: missed by 10 %; 4: met by 12 %)"
    assert [line.partition(": ")[0] for line in judge(result())] == [
        "Some set, eager, x floor",
        "Some set, eager, times as fast as torch_module_monitor",
        "Some model, whole step, own time in %",
    ]


def _sinks() -> dict[str, Any]:
    rows = [
        {"sink": "Sink", "values": size, "ours_us": around(10.0 * size), "by_hand": "its own call", "ratio": around(0.5)}
        for size in (14, 1000)
    ]
    machine = {"processor": "Abacus", "cores": 2, "python": "3"}
    return {"machine": machine, "versions": {"tracker": "1.0"}, "date": "2026-01-01", "sinks": rows}


def test_what_sinks_cost_has_a_row_for_each() -> None:
    text = sinks_markdown(_sinks())
    assert "| Sink (by hand: its own call) | 140 (70.0 to 280) | 10000 (5000 to 20000) | 0.50 (0.25 to 1.00) |" in text
    assert "Abacus (2 cores), Python 3; tracker 1.0; 2026-01-01" in text


@pytest.mark.extra
def test_what_a_run_directory_costs_is_measured_beside_sqlite(tmp_path: Path) -> None:
    program = "import runpy; runpy.run_module('benchmarks.stored', run_name='__main__', alter_sys=True)"
    done = forked.run(program, "--quick", "--out", tmp_path / "stored.json", cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "stored.json").read_text())
    assert found["writing"]["ratio"]["count"] == 50
    assert all(each["median"] > 0 for each in found["writing"]["us"].values())
    read = [found["reading"][what]["megabytes"] for what in ("follow", "loss", "row", "layer")]
    assert read == sorted(read)
    assert read[0] > 0
    assert "its row in a list of runs" in stored_markdown(found)


@pytest.mark.extra
@pytest.mark.skipif(not all(map(find_spec, ("wandb", "tensorboard", "trackio"))), reason="a logger is not installed")
def test_the_sinks_are_measured_beside_their_own_calls(tmp_path: Path) -> None:
    program = "import runpy; runpy.run_module('benchmarks.sinks', run_name='__main__', alter_sys=True)"
    done = forked.run(program, "--quick", "--out", tmp_path / "sinks.json", cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "sinks.json").read_text())
    assert {(row["sink"], row["values"]) for row in found["sinks"]} == {
        (sink, size) for sink in ("JsonlSink", "WandbSink", "TensorBoardSink", "TrackioSink") for size in (14, 1000)
    }
    assert all(row["ours_us"]["median"] > 0 and row["ratio"]["count"] == 3 for row in found["sinks"])
