"""Many ranks: the numbers of one process, whatever wrapper spreads the model over how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.exchange import SOURCES, SOURCES_OF_A_TENTH_STEP, predicted
from torch_gradmon import ModuleMonitor, load_run
from torch_gradmon.core import torch_modes
from torch_gradmon.core.moments import ALWAYS, Column

from .rank_runs import (
    Setting,
    alone,
    alone_with_partial_sums,
    attached,
    badly_aggregated,
    batch_values,
    by_functions,
    bytes_of,
    changed_on_the_way,
    compiled_blocks,
    converted,
    coordinates,
    counted,
    decided,
    dropped,
    in_disorder,
    in_groups,
    late,
    left_in_the_middle,
    logged,
    logged_again,
    logged_between,
    looks_closer,
    merged,
    out_of_step,
    recorded,
    shardwise,
    train,
    train_with_reductions,
    unchanged,
    unlike,
    watched_in_part,
    with_a_plain_reference,
    with_experts,
)
from .ranks import on_ranks

pytestmark = pytest.mark.ranks

TWO = [
    *(Setting("ddp", clip=clip) for clip in ("", "torch", "monitor")),
    Setting("ddp", (("gradient_as_bucket_view", True),), clip="torch"),
    Setting("ddp", (("static_graph", True),)),
    Setting("ddp", (("find_unused_parameters", True),), extra="some"),
    Setting("ddp", micro=2),
    *(Setting("fsdp2", clip=clip) for clip in ("", "torch", "monitor")),
    Setting("fsdp2", (("mixed", True),), clip="torch"),
    Setting("fsdp2", (("offload", True),)),
    Setting("fsdp2", (("reshard_after_forward", False),)),
    Setting("fsdp2", micro=2),
    Setting("tp"),
    Setting("tp", (("sequence", True),)),
]
FOUR = [
    Setting("ddp", clip="torch"),
    Setting("fsdp2", clip="torch"),
    Setting("fsdp2", (("shape", (2, 2)),)),
    Setting("tp"),
    Setting("tp", (("with_fsdp", True),)),
    Setting("tp", (("sequence", True), ("with_fsdp", True))),
]


@pytest.mark.parametrize(("ranks", "setting"), [*((2, setting) for setting in TWO), *((4, setting) for setting in FOUR)], ids=str)
def test_each_rank_has_the_numbers_of_the_whole(ranks: int, setting: Setting) -> None:
    _check(on_ranks(ranks, train, setting))


@pytest.mark.parametrize("setting", [Setting("fsdp2", clip="torch"), Setting("tp")], ids=str)
def test_so_it_is_where_ranks_are_so_many_that_rows_are_reduced_and_not_gathered(setting: Setting) -> None:
    _check(on_ranks(4, train_with_reductions, setting))


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sets(st.sampled_from(list(Column))), st.booleans())
def test_rows_of_many_ranks_are_those_of_one(seed: int, columns: set[Column], gathers: bool) -> None:
    first, second = on_ranks(2, merged, seed, sorted(map(int, columns)), gathers)
    present = sorted(columns | ALWAYS)
    assert torch.equal(first[0].nan_to_num(7.0), second[0].nan_to_num(7.0))
    torch.testing.assert_close(first[0][:, present], first[1][:, present], equal_nan=True, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("wrap", "tensors"), [("DDP", 0), ("FSDP2", 28)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: int, wrap: str, tensors: int) -> None:
    results = on_ranks(ranks, bytes_of, wrap)
    assert all(found == results[0] for found in results)
    for step, calls in enumerate(results[0]):
        sources = SOURCES if step % 10 else SOURCES_OF_A_TENTH_STEP
        formula = predicted(tensors, sources, ranks)
        assert (len(calls), sum(sent for _, sent in calls)) == (formula["collectives"], formula["sent"])


def _check(results: list[list[tuple[dict[str, float], dict[str, float]]]]) -> None:
    for steps in zip(*results, strict=True):
        values = [{key: value for key, value in found.items() if key != "gradmon/overhead_fraction"} for found, _ in steps]
        assert all(found == values[0] for found in values), "the ranks differ"
        expected = steps[0][1]
        per_layer = {key for key in values[0] if not key.startswith("gradmon/")}
        assert per_layer == {key for key in expected if not key.startswith("gradmon/")}
        for key, value in expected.items():
            name = key.rpartition("/")[0]
            unit = expected.get(f"{name}/l1_norm", 0.0) if key.endswith("/mean") else 0.0
            spread = 1e-7 * expected.get(f"{name}/rms", 0.0) if key.endswith("/std") else 0.0
            assert values[0][key] == pytest.approx(value, rel=1e-6, abs=1e-6 * unit + spread + 1e-30), key


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_and_logged_values_are_those_of_all_ranks(ranks: int, wrap: str) -> None:
    results = on_ranks(ranks, batch_values, wrap)
    for found, expected in results:
        for values, true in zip(found, expected, strict=True):
            assert {key: values.get(key) for key in true} == pytest.approx(true, rel=1e-6, abs=1e-7)
            assert ("seldom" in values) == ("seldom" in true)
    own = [[{key: value for key, value in values.items() if key != "own"} for values in found] for found, _ in results]
    assert all(values == own[0] for values in own)


def test_replicated_gradients_are_exchanged_by_nobody() -> None:
    assert on_ranks(2, counted, "ddp", False) == [[[]] * 13] * 2


@pytest.mark.parametrize("values", [False, True])
def test_one_exchange_a_step_of_parameters_times_columns(values: bool) -> None:
    first, second = on_ranks(2, counted, "fsdp2", values)
    assert first == second
    gather = first[-1][0][0]
    assert gather in ("all_gather_single", "all_gather_into_tensor")
    # in the first step the ranks tell each other what there is besides the parameters
    names = [[name for name, _ in calls] for calls in first]
    assert names[0] == ([gather] * 4 if values else [gather])
    assert names[1:] == [[gather]] * 12
    others = 5 + 1 if values else 0  # the outputs of four layers and of the root, and the loss
    for step, calls in enumerate(first):
        # gradients before and after clipping and parameters; every tenth step updates, and what they refer to
        sources = 5 if step % 10 == 0 else 3
        rows = sources * 8 + (others if step else 0) + 1  # the last tells whether a rank has anything new
        assert calls[0][1] == rows * 8 * 8


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_loss_that_is_nan_on_one_rank_is_a_spike_on_all(wrap: str) -> None:
    results = on_ranks(2, decided, wrap)
    assert str(results[0][:2]) == str(results[1][:2])  # NaN is not equal to itself
    events = results[0][0]
    assert [(step, signal) for step, signal, _ in events] == [(30, "loss"), (40, "loss")]
    assert not results[0][2]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_loss_that_comes_after_the_exchange_is_judged_by_no_rank_and_that_is_said(wrap: str) -> None:
    for events, _, complaints in on_ranks(2, decided, wrap, True):
        assert not events
        assert complaints["late:loss"] > 40


@pytest.mark.parametrize("what", ["raises", "no gradients", "logs", "reads"])
def test_ranks_that_do_not_see_the_same_keep_step(what: str) -> None:
    first, second = on_ranks(2, in_disorder, what)
    drop = {"gradmon/overhead_fraction"}
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if k not in drop} == {k: v for k, v in b.items() if k not in drop}
    assert ("only here" in first[1]) == (what == "logs")
    assert first[3]["gradient/first.weight/norm"] > 0


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_monitor_on_one_rank_alone_hangs_nobody(wrap: str) -> None:
    found, missing, complaints = on_ranks(2, alone, wrap)[0]
    assert len(found) == 4
    assert ("gradmon/grad_norm" in found[-1]) == (wrap == "ddp")
    assert found[-1]["loss"] > 0
    assert f"ranks:{'values' if wrap == 'ddp' else 'tensors'}" in complaints
    if wrap == "fsdp2":
        assert "rank 1 did not come to the exchange" in missing["gradmon/grad_norm"]


@pytest.mark.parametrize("on_all", [False, True])
def test_the_first_rank_logs_unless_all_are_asked_to(tmp_path: Path, on_all: bool) -> None:
    first, second = on_ranks(2, logged, str(tmp_path), on_all)
    assert first == [*range(30)]
    assert second == ([*range(30)] if on_all else [])
    directories = [tmp_path / "run" / f"rank{rank}" for rank in range(2)] if on_all else [tmp_path / "run"]
    runs = [load_run(directory) for directory in directories]
    for run in runs:
        assert run.steps == [*range(30)]
        assert [event.step for event in run.spikes] == [20]
        assert run.series("gradient_before_clip/first.weight/norm") == runs[0].series("gradient_before_clip/first.weight/norm")
    if not on_all:
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_parameters_that_are_others_on_each_rank_are_taken_together() -> None:
    results = on_ranks(2, with_experts)
    for values, expected, missing in results:
        assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-6, abs=1e-8)
        assert "gradient/shared.weight/custom" in values
        assert "sharded over ranks" in missing["gradient/expert.weight/custom"]


def test_a_process_group_is_all_that_is_merged_over() -> None:
    results = on_ranks(4, in_groups)
    for found, true in results:
        assert found == pytest.approx(true, rel=1e-6)
    assert results[2][1] == pytest.approx(2 * results[0][1])


@pytest.mark.parametrize("order", ["watch, then ddp", "set, then fully_shard", "replaced", "tensor parallel, converted"])
def test_a_monitor_may_come_before_or_after_a_wrapper_and_puts_hooks_back_that_died(order: str) -> None:
    for found, true, complaints, said in on_ranks(2, attached, order):
        assert [values.get("gradmon/grad_norm") for values in found] == pytest.approx(true, rel=1e-6)
        assert not complaints, said


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 no values in compiled graphs")
@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_blocks_compiled_one_by_one_share_a_graph_on_each_rank(wrap: str) -> None:
    for eager, bare, compiled in on_ranks(2, compiled_blocks, wrap):
        assert compiled[0] == bare[0] > 0
        assert all(map(torch.equal, compiled[1], bare[1]))
        assert len(eager[2]) == 22
        assert compiled[2] == pytest.approx(eager[2], rel=1e-5)


def test_monitors_find_each_other_after_one_was_left_alone() -> None:
    on_ranks(2, alone, "fsdp2")
    for events, _, complaints in on_ranks(2, decided, "fsdp2"):
        assert events
        assert not complaints


@pytest.mark.parametrize("apart", [0, 1])
def test_values_of_different_steps_are_not_merged(apart: int) -> None:
    for tables, values, complaints in on_ranks(2, out_of_step, apart):
        assert tables == ([] if apart else ["gradient"])
        assert values == ({} if apart else {"x": 1.5})
        assert complaints.get("ranks:skew", 0) == apart


def test_ranks_look_closer_together_in_the_step_after_the_next() -> None:
    for close, monitored, complaints in on_ranks(2, looks_closer):
        assert close == [102, 103, 104]
        assert monitored == [*range(0, 101, 5), 102, 103, 104, 105, 110]
        assert complaints["budget:off"] > 0


def test_an_engine_of_deepspeed_is_refused_by_its_name() -> None:
    # the package itself was not run here; its class is DeepSpeedEngine in deepspeed.runtime.engine
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ValueError, match="a DeepSpeedEngine cannot be watched: it steps by itself"):
        ModuleMonitor(engine())


def test_what_changes_on_the_way_is_followed_also_where_parameters_are_on_the_shelf() -> None:
    for found in on_ranks(2, changed_on_the_way):
        for norms, true in found:
            assert norms == pytest.approx(true, rel=1e-6)
        assert len(found[3][1]) == len(found[0][1]) + 1


def test_steps_that_are_recorded_for_a_spike_are_those_of_all_ranks(tmp_path: Path) -> None:
    for every in (1, 5):
        on_ranks(2, recorded, str(tmp_path), every)
    always, seldom = (load_run(tmp_path / str(every)) for every in (1, 5))
    around = [step for step in seldom.steps if seldom.record(step).context.get("monitored") is False]
    assert around == [96, 97, 98, 99, 101, 106, 107, 108]
    for step in around:
        assert seldom.record(step).metrics["gradmon/grad_norm"] == always.record(step).metrics["gradmon/grad_norm"]
        here, there = (run._reader.table("gradient_before_clip", step) for run in (seldom, always))
        assert here is not None
        assert there is not None
        assert torch.equal(here.rows, there.rows)


@pytest.mark.parametrize("wrap", ["fsdp2", "tp"])
def test_a_function_that_is_declared_shardwise_has_the_value_of_the_whole_tensor(wrap: str) -> None:
    for values, expected, missing in on_ranks(2, shardwise, wrap):
        assert {key: values.get(key) for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
        name = "first.weight" if wrap == "fsdp2" else "up.weight"
        assert f"gradient/{name}/median" not in values
        assert "shardwise=True declares" in missing[f"gradient/{name}/median"]


@pytest.mark.parametrize("arguments", [{}, {"metric_fn": torch.median, "metric_aggregation_fn": lambda values: values.max()}])
def test_what_cannot_be_merged_is_not_shardwise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"shardwise=True is for a metric_fn whose values on parts of a tensor merge by 'mean'"):
        ModuleMonitor().add_gradient_metric("norm", **arguments, shardwise=True)


@pytest.mark.parametrize("how", ["detach", "at the interpreter's end"])
def test_who_leaves_in_the_middle_of_a_step_waits_for_nobody(how: str) -> None:
    assert on_ranks(2, left_in_the_middle, how) == [True, True]


def test_an_aggregation_that_fails_on_one_rank_holds_nobody_up() -> None:
    for found in on_ranks(2, badly_aggregated):
        assert [values["good"] for values in found] == [1.5] * 3
        assert all("activation/first/norm" in values for values in found)


def test_a_lone_monitor_adds_up_nothing() -> None:
    keys, missing = on_ranks(2, alone_with_partial_sums)[0]
    assert len(keys) == 3
    assert not any("gradmon/grad_norm" in each for each in keys)
    assert missing["gradmon/grad_norm"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_is_logged_in_recorded_steps_is_merged_too(tmp_path: Path, wrap: str) -> None:
    on_ranks(2, logged_between, wrap, str(tmp_path))
    run = load_run(tmp_path / wrap)
    assert any(run.record(step).context.get("monitored") is False for step in run.steps)
    assert run.series("mean") == {step: step + 0.5 for step in run.steps}
    assert run.series("loss") == dict.fromkeys(run.steps, 1.5)


def test_a_reference_that_is_not_spread_is_no_reference_to_what_is() -> None:
    for values, missing, complaints in on_ranks(2, with_a_plain_reference):
        assert values["gradient/first.weight/norm"] > 0
        assert "not sharded over ranks in the same way" in missing["parameter_difference/first.weight/norm"]
        assert not complaints


def test_a_part_of_a_model_whose_parameters_are_kept_above_it_is_measured_where_they_lie() -> None:
    for found in on_ranks(2, watched_in_part):
        for values, true in found:
            assert {key: values.get(key) for key in true} == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("spread", [True, False])
def test_hooks_that_died_in_a_conversion_are_put_back_and_that_is_said_once(spread: bool) -> None:
    for found, true, why, said in on_ranks(2, converted, spread):
        assert found.pop(3) is None
        assert found == pytest.approx([norm for step, norm in enumerate(true) if step != 3], rel=1e-6)
        assert why == "the hooks on parameters had died, as in a conversion of DTensors by .to(); they are registered again"
        assert len(said) == 1
        assert said[0].endswith("gradients before clipping are missing in step 3")


@pytest.mark.parametrize(
    ("ranks", "setting", "every"),
    [
        *((2, setting, 2) for setting in TWO),  # steps that are monitored, and steps that are recorded
        *((4, setting, 2) for setting in FOUR),
        *((2, Setting(wrap, clip="torch" * (wrap != "tp")), 1) for wrap in ("ddp", "fsdp2", "tp")),
    ],
    ids=str,
)
def test_training_is_the_same_bit_for_bit_on_every_rank(ranks: int, setting: Setting, every: int) -> None:
    assert on_ranks(ranks, unchanged, setting, every) == [True] * ranks


def test_the_coordinate_check_is_that_of_one_process_with_all_the_data() -> None:
    first, second = on_ranks(2, coordinates, 2, True)
    alone = coordinates(0, 1, False)
    assert first == second
    assert first.keys() == alone.keys()
    assert len(first) > 20
    assert first == pytest.approx(alone, rel=1e-4, abs=1e-7), "gradients are added up in another order"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_a_function_aggregates_is_never_that_of_one_rank(wrap: str) -> None:
    for values, true, missing in on_ranks(2, by_functions, wrap):
        assert {key: values[key] for key in true} == pytest.approx(true, rel=1e-6)
        assert not [key for key in values if "largest" in key or "several" in key or "both" in key]
        assert all("named reducer" in missing[f"activation/first/{name}"] for name in ("largest", "several"))


def test_a_value_that_ranks_have_merged_takes_no_late_ones() -> None:
    for rank, (found, complaints) in enumerate(on_ranks(2, logged_again)):
        shared = {"sum": 3.0, "total": 2.0}
        assert found == [{**shared, "own": 10.0 + rank}] * 2 + [{"sum": 12.0, "total": 13.0, "own": 21.0}]
        assert complaints == {"late:sum": 2, "late:total": 2, "late:own": 2}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_late_rank_joins_and_its_values_are_never_missed_in_silence(wrap: str) -> None:
    results = on_ranks(2, late, wrap)
    for rank, (values, missing, complaints, waited) in enumerate(results):
        assert not [name for name in complaints if name.startswith("ranks:")]
        if wrap == "ddp":
            assert "rank 1 did not come" in missing[0]["activation/first/mean"]
            assert not {"activation/first/mean", "rank"} & {*values[0]}
        assert [found["rank"] for found in values[-2:]] == [1.0, 1.0]
        assert sum(waited) < (1.0 if rank else 3.0)
    first, second = ([found["activation/first/mean"] for found in values[-2:]] for values, *_ in results)
    assert first == second


def test_monitors_meet_after_others_were_dropped_on_some_ranks() -> None:
    (freed, sums), (_, other_sums) = on_ranks(2, dropped)
    assert freed == [True, True]
    assert sums == other_sums == [2.0, 2.0]


def test_tensors_with_equal_names_are_reported_where_others_differ() -> None:
    for rank, (values, true, missing, warned) in enumerate(on_ranks(2, unlike, "names")):
        assert {key: values[key] for key in true} == pytest.approx(true, rel=1e-6)
        assert f"gradient/expert{rank}.weight/norm" not in values
        assert "rank 1 differs in names of parameters" in missing[f"gradient/expert{rank}.weight/norm"]
        assert sum("rank 1 differs" in text for text in warned) == 1


def test_activations_are_shared_where_metrics_of_tensors_differ() -> None:
    for values, true, missing, _ in on_ranks(2, unlike, "metrics"):
        assert {key: values[key] for key in true} == pytest.approx(true, rel=1e-6)
        assert "rank 1 differs in metrics" in missing["gradient/first.weight/norm"]
