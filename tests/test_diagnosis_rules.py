"""Each rule on both sides of its threshold, on statistics that are written down by hand."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.synthetic_run import history
from torch_gradmon.analysis.diagnosis import Diagnosis, Finding
from torch_gradmon.analysis.diagnosis.diagnose import diagnose_history
from torch_gradmon.analysis.diagnosis.findings import NotMeasured
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.rules.depth import check_attention, check_clipping, check_depth, check_spikes
from torch_gradmon.analysis.diagnosis.rules.loss import check_learning_rate, check_loss, check_units
from torch_gradmon.analysis.diagnosis.rules.nonfinite import check_nonfinite, check_precision
from torch_gradmon.analysis.diagnosis.rules.unused_parameters import (
    check_bounds,
    check_latent,
    check_unused_parameters,
    check_weights,
)
from torch_gradmon.core.keys import Key
from torch_gradmon.core.loop_mistakes import LoopFinding
from torch_gradmon.core.moments import Column
from torch_gradmon.core.records import SpikeEvent

LAYERS = [f"{place}.weight" for place in range(9)]


def _noise(step: int) -> float:
    return random.Random(step).uniform(-0.05, 0.05)


def flat(step: int) -> float:
    return 2.0 + _noise(step)


def falls(step: int) -> float:
    return 2.0 * 0.97**step + abs(_noise(step))


def rises(step: int) -> float:
    return 2.0 + step / 50 + _noise(step)


def _rules(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.rule) for finding in findings]


# --- depth -------------------------------------------------------------------------------------------------------------------


def _fading(factor: float) -> dict[str, float]:
    return {name: factor ** (8 - place) for place, name in enumerate(LAYERS)}


@pytest.mark.parametrize(("factor", "found"), [(0.4, True), (0.6, False), (1.0, False), (1.3, False)])
def test_gradients_vanish_where_the_first_layers_have_a_hundredth_of_the_last(factor: float, found: bool) -> None:
    run = history(loss=flat, gradient_before_clip=_fading(factor), parameter=dict.fromkeys(LAYERS, 0.1))
    assert _rules(check_depth(run)) == [("warning", "vanishing-gradients")] * found
    if found:
        (finding,) = check_depth(run)
        assert finding.where == "0.weight"
        assert finding.evidence["last third / first third"] == pytest.approx(factor**-6, rel=1e-6)


def test_small_gradients_beside_a_large_one_of_that_depth_have_not_faded() -> None:
    ratios = {
        "a.q": 1e-5,
        "a.k": 1e-5,
        "a.v": 0.01,
        "b.q": 1e-5,
        "b.k": 1e-5,
        "b.v": 0.01,
        "b.out": 0.02,
        "b.up": 0.01,
        "head": 1.0,
    }
    gradients = {f"{name}.weight": ratio for name, ratio in ratios.items()}
    run = history(
        loss=flat, gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 1.0), matrices=dict.fromkeys(gradients, 1)
    )
    assert "vanishing-gradients" not in [finding.rule for finding in check_depth(run)]


def test_a_head_that_is_louder_than_the_whole_body_is_no_fading() -> None:
    ratios = {"a": 1e-3, "b": 3e-4, "c": 1e-4, "d": 5e-5, "head": 1.0}
    gradients = {f"{name}.weight": ratio for name, ratio in ratios.items()}
    run = history(loss=flat, gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1))
    assert "vanishing-gradients" not in [finding.rule for finding in check_depth(run)]
    rising = dict(zip(gradients, sorted(gradients.values()), strict=True))
    run = history(loss=flat, gradient_before_clip=rising, parameter=dict.fromkeys(gradients, 0.1))
    assert "vanishing-gradients" in [finding.rule for finding in check_depth(run)]


def test_small_gradients_are_judged_relative_to_weights() -> None:
    fading = _fading(0.3)
    run = history(loss=flat, gradient_before_clip=fading, parameter={name: 0.1 * rms for name, rms in fading.items()})
    assert "vanishing-gradients" not in [finding.rule for finding in check_depth(run)]


def test_small_gradients_are_no_finding_while_the_loss_falls() -> None:
    assert check_depth(history(loss=falls, gradient_before_clip=_fading(0.1), parameter=dict.fromkeys(LAYERS, 0.1))) == []


@pytest.mark.parametrize(
    ("rms", "odd", "loss", "expected"),
    [
        (1.0, 9, flat, [("warning", "initialisation-scale")]),
        (1.0, 9, falls, [("info", "initialisation-scale")]),
        (1.0, 4, flat, []),
        (0.29, 9, flat, []),
        (0.31, 9, flat, [("warning", "initialisation-scale")]),
        (0.0029, 9, flat, [("warning", "initialisation-scale")]),
        (0.0031, 9, flat, []),
        (0.0, 9, flat, []),
    ],
)
def test_weights_on_a_wrong_scale(rms: float, odd: int, loss: Callable[[int], float], expected: list[tuple[str, str]]) -> None:
    parameters = {name: rms if place < odd else 0.1 for place, name in enumerate(LAYERS)}
    run = history(loss=loss, gradient_before_clip=dict.fromkeys(LAYERS, 1e-3), parameter=parameters)
    assert _rules(check_depth(run)) == expected
    if expected:
        assert check_depth(run)[0].evidence["std * sqrt(fan in)"] == pytest.approx(rms * 10)


@pytest.mark.parametrize(("of_ten", "found"), [(5, True), (6, False)])
def test_the_depth_of_players_that_step_by_turns_is_not_that_of_one_model(of_ten: int, found: bool) -> None:
    turns = lambda step: {"by_turns": 1.0} if step % 10 < of_ten else {}  # noqa: E731
    run = history(loss=flat, gradient_before_clip=_fading(0.4), parameter=dict.fromkeys(LAYERS, 0.1), context=turns)
    assert _rules(check_depth(run)) == [("warning", "vanishing-gradients")] * found


def test_embeddings_have_no_fan_in_and_no_scale() -> None:
    run = history(loss=flat, gradient_before_clip={"a.weight": 1e-3}, parameter={"a.weight": 5.0}, matrices={"a.weight": 0})
    assert check_depth(run) == []


def test_gradients_explode_out_of_proportion_to_the_loss() -> None:
    def of(rms: float) -> list[tuple[str, str]]:
        # norm of the gradient times norm of the weights, each of 100 elements, over a loss of 2
        gradients = {"a.weight": rms, "b.weight": 1e-3}
        return _rules(check_depth(history(loss=flat, gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1))))

    assert of(70.0) == [("warning", "exploding-gradients")]
    assert of(50.0) == []


def test_outputs_that_explode_over_the_depth() -> None:
    gradients, parameters = dict.fromkeys(LAYERS, 1e-3), dict.fromkeys(LAYERS, 0.1)

    def of(last: float) -> list[tuple[str, str]]:
        outputs = {"0": 1.0, "1": 3.0, "2": last}
        return _rules(check_depth(history(loss=flat, gradient_before_clip=gradients, parameter=parameters, activation=outputs)))

    assert of(150.0) == [("warning", "exploding-gradients")]
    assert of(90.0) == []


def test_gradients_of_a_loss_that_is_solved_at_once_are_not_out_of_proportion() -> None:
    run = history(
        loss=lambda step: 2.0 * 0.1**step, gradient_before_clip={"a.weight": lambda step: 0.3**step}, parameter={"a.weight": 0.1}
    )
    assert check_depth(run) == []


def test_outputs_that_a_mask_makes_infinite_do_not_explode() -> None:
    rows = dict.fromkeys(LAYERS, 1e-3)
    outputs = {"0": 1.0, "mask": math.inf}
    assert (
        check_depth(history(loss=flat, gradient_before_clip=rows, parameter=dict.fromkeys(LAYERS, 0.1), activation=outputs)) == []
    )


def test_gradients_that_vanish_until_the_loss_is_at_rest_and_all_are_small() -> None:
    fading = {name: (lambda step, rms=rms: rms if step < 15 else 1e-6) for name, rms in _fading(0.3).items()}
    run = history(loss=flat, gradient_before_clip=fading, parameter=dict.fromkeys(LAYERS, 0.1))
    assert _rules(check_depth(run)) == [("warning", "vanishing-gradients")]


def test_a_fade_that_was_not_there_at_the_first_step_was_made_by_the_training() -> None:
    def finding(first: float) -> Finding:
        fading = {name: (lambda step, rms=rms: rms if step else first * rms ** (1 - first)) for name, rms in _fading(0.3).items()}
        (found,) = check_depth(history(loss=flat, gradient_before_clip=fading, parameter=dict.fromkeys(LAYERS, 0.1)))
        return found

    assert "warm-up" in finding(1.0).advice
    assert "ReLU" in finding(1e-9).advice


@pytest.mark.parametrize(
    ("size", "first", "found"), [(12.0, 30.0, True), (12.0, 3.0, False), (4.0, 30.0, False), (float("nan"), 30.0, False)]
)
def test_a_model_that_begins_far_too_loud(size: float, first: float, found: bool) -> None:
    run = history(
        loss=lambda step: first * 0.9**step + 1.0,
        gradient_before_clip=dict.fromkeys(LAYERS, 1e-3),
        parameter=dict.fromkeys(LAYERS, 0.1),
        activation={"0": 1.0, "head": size, "[root module]": size},
    )
    assert _rules(check_depth(run)) == [("info", "initialisation-scale")] * found
    assert [finding.where for finding in check_depth(run)] == ["head"] * found


@pytest.mark.parametrize(("factor", "severity"), [(0.9, "info"), (0.99, "warning")])
def test_loud_outputs_that_are_gone_at_once_are_information(factor: float, severity: str) -> None:
    run = history(
        loss=lambda step: 14.0 * factor**step + 1.0,
        gradient_before_clip=dict.fromkeys(LAYERS, 1e-3),
        parameter=dict.fromkeys(LAYERS, 0.1),
        activation={"0": 1.0, "head": 12.0, "[root module]": 12.0},
        steps=400,
    )
    run.chance["loss"] = 2.9
    assert _rules(check_depth(run)) == [(severity, "initialisation-scale")]


def test_without_the_shapes_nothing_is_said_of_depth() -> None:
    with pytest.raises(NotMeasured):
        check_depth(history(matrices={}))


# --- reach -------------------------------------------------------------------------------------------------------------------


def test_a_parameter_without_gradient_is_named_and_its_share_told() -> None:
    gradients = {"a.weight": 1.0, "b.weight": None, "c.weight": 0.0}
    (finding,) = check_unused_parameters(history(gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1)))
    assert (finding.rule, finding.severity, finding.where) == ("no-gradient", "warning", "b.weight")
    assert finding.evidence["share of all elements"] == pytest.approx(2 / 3)
    assert "Also in c.weight." in finding.cause


def test_a_bias_that_is_taken_out_again_needs_no_mending() -> None:
    body = {"a.weight": 1.0, "a.bias": 0.0, "b.weight": 1.0, "b.bias": 1.0}
    parameters = dict.fromkeys(body, 0.1)
    (finding,) = check_unused_parameters(history(loss=falls, gradient_before_clip=body, parameter=parameters))
    assert (finding.severity, finding.where) == ("info", "a.bias")
    assert "takes the bias out again" in finding.cause
    (finding,) = check_unused_parameters(history(loss=flat, gradient_before_clip=body, parameter=parameters))
    assert finding.severity == "warning"  # it may be what is missing
    for changed in ({"a.bias": None}, {"a.weight": 0.0}, {"b.weight": None}):  # cut off; nothing in the layer; another one too
        (finding,) = check_unused_parameters(history(loss=falls, gradient_before_clip={**body, **changed}, parameter=parameters))
        assert "takes the bias out again" not in finding.cause
        assert "a.bias" in finding.where + finding.cause


def test_a_gradient_that_is_nan_is_one() -> None:
    rows = {"a.weight": 1.0, "b.weight": {"rms": math.nan, "nonfinite_count": 3}, "c.weight": None}
    (finding,) = check_unused_parameters(history(gradient_before_clip=rows, parameter=dict.fromkeys(rows, 0.1)))
    assert (finding.where, finding.evidence["parameters without gradient"]) == ("c.weight", 1.0)


@pytest.mark.parametrize("name", ["experts.3.weight", "blocks.3.weight"])
def test_an_expert_that_no_batch_reached_is_only_worth_knowing(name: str) -> None:
    gradients = {"a.weight": 1.0, "blocks.1.weight": lambda step: 1.0 if step % 3 else None, name: None}
    (finding,) = check_unused_parameters(history(gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1)))
    assert (finding.severity, finding.where) == ("info", name)


def test_a_small_part_without_gradient_is_only_worth_knowing() -> None:
    rows = {"a.weight": {"rms": 1.0, "count": 1000}, "pooler.weight": None}
    parameters = {"a.weight": {"rms": 1.0, "count": 1000}, "pooler.weight": {"rms": 1.0, "count": 100}}
    assert _rules(check_unused_parameters(history(gradient_before_clip=rows, parameter=parameters))) == [("info", "no-gradient")]


def test_a_parameter_that_was_seen_too_seldom_is_not_judged() -> None:
    gradients = {"a.weight": 1.0}
    parameters = {"a.weight": 0.1, "b.weight": lambda step: 0.1 if step > 85 else None}
    assert check_unused_parameters(history(gradient_before_clip=gradients, parameter=parameters)) == []


def test_a_branch_whose_gradient_is_nan_is_not_frozen() -> None:
    gradients = {LAYERS[0]: lambda step: {"rms": math.nan, "nonfinite_count": 3} if step > 40 else 0.1, LAYERS[1]: 0.1}
    run = history(loss=falls, gradient_before_clip=gradients, parameter=dict.fromkeys(LAYERS[:2], 0.1))
    assert "gradient-dropped-to-zero" not in [finding.rule for finding in check_unused_parameters(run)]


@pytest.mark.parametrize(("last", "found"), [(20, True), (3, False), (90, False)])
def test_parameters_that_are_frozen_on_the_way_are_information(last: int, found: bool) -> None:
    gradients = {LAYERS[0]: lambda step: 0.1 if step <= last else None, LAYERS[1]: 0.1}
    run = history(loss=falls, gradient_before_clip=gradients, parameter=dict.fromkeys(LAYERS[:2], 0.1))
    assert _rules(check_unused_parameters(run)) == [("info", "gradient-dropped-to-zero")] * found
    if found:
        assert check_unused_parameters(run)[0].steps[0] == last + 1


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (lambda step: 1.0 if step < 60 else 0.0, ["gradient-dropped-to-zero"]),
        (lambda step: 1.0 if step < 60 else 1e-9, ["gradient-dropped-to-zero"]),
        (lambda step: 1.0 if step < 60 else 1e-3, []),
        (lambda step: 1.0 if step < 60 or step % 3 == 0 else 0.0, ["gradient-dropped-to-zero"]),
        (lambda step: 1.0 if step % 2 else 0.0, []),
        (lambda step: 0.9**step, []),
        (lambda step: 0.0 if step < 40 else 1.0, []),
        (lambda step: 0.0 if step < 15 or step >= 60 else 1.0, []),  # it was so from the beginning
    ],
)
def test_gradients_that_drop_to_zero(gradient: Callable[[int], float], expected: list[str]) -> None:
    run = history(loss=flat, gradient_before_clip={"a.weight": gradient}, parameter={"a.weight": 0.1})
    assert [finding.rule for finding in check_unused_parameters(run)] == expected
    if expected:
        assert check_unused_parameters(run)[0].steps[0] in (60, 61)


def test_a_gradient_may_be_gone_after_the_first_fifth() -> None:
    run = history(loss=falls, gradient_before_clip={"a.weight": lambda step: float(step < 20)}, parameter={"a.weight": 0.1})
    assert _rules(check_unused_parameters(run)) == [("warning", "gradient-dropped-to-zero")]


def test_one_layer_that_drops_to_zero_is_named() -> None:
    gradients = {"a.weight": 1.0, "b.weight": lambda step: 1.0 if step < 50 else 0.0}
    (finding,) = check_unused_parameters(
        history(loss=flat, gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1))
    )
    assert (finding.rule, finding.where, finding.steps[0]) == ("gradient-dropped-to-zero", "b.weight", 50)


def test_a_loss_that_is_solved_may_have_no_gradient() -> None:
    gradient = {"a.weight": lambda step: 1.0 if step < 60 else 0.0}
    run = history(loss=lambda step: 2.0 if step < 60 else 0.0, gradient_before_clip=gradient, parameter={"a.weight": 0.1})
    assert _rules(check_unused_parameters(run)) == [("info", "gradient-dropped-to-zero")]


# --- precision ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "zeros", "found"),
    [(3 * 2.0**-24, 0.9, True), (3 * 2.0**-24, 0.1, False), (2.0**-10, 0.9, False), (3.3 * 2.0**-24, 0.9, False)],
)
def test_gradients_that_were_float16_and_too_small(largest: float, zeros: float, found: bool) -> None:
    stats = {"rms": largest / 3, "min": -(2.0**-24), "max": largest, "zero_count": zeros}
    run = history(gradient_before_clip={"a.weight": stats, "b.weight": stats})
    assert _rules(check_precision(run)) == [("warning", "low-precision-underflow")] * found


def test_a_gradient_that_once_had_other_numbers_was_no_float16() -> None:
    def stats(step: int) -> dict[str, float]:
        largest = 1e-6 if step == 7 else 2.0**-23
        return {"rms": 1e-8, "min": -(2.0**-24), "max": largest, "zero_count": 0.9}

    assert check_precision(history(gradient_before_clip={"a.weight": stats, "b.weight": stats})) == []


@pytest.mark.parametrize(("output", "found"), [(0.333251953125, True), (0.3332, False), (0.33203125, False)])
def test_gradients_that_are_all_zero_are_underflow_only_where_outputs_are_float16(output: float, found: bool) -> None:
    # the first has eleven digits, as float16 does; the second more; the third eight, as bfloat16 does
    nothing = {"rms": 0.0, "min": 0.0, "max": 0.0, "zero_count": 1.0}
    outputs = {"rms": 0.1, "min": -output, "max": output}
    run = history(gradient_before_clip={"a.weight": nothing}, activation={"a": outputs, "b": outputs})
    assert _rules(check_precision(run)) == [("warning", "low-precision-underflow")] * found


@pytest.mark.parametrize(
    ("dtype", "update", "gradient", "found"),
    [
        ("bfloat16", 0.9, 0.0, True),
        ("float16", 0.9, 0.0, True),
        ("float16", 0.5, 0.0, False),  # half of the elements move
        ("float16", 0.9, 0.8, False),  # rows of an embedding that no batch has
        ("float32", 0.9, 0.0, False),
    ],
)
def test_updates_that_half_precision_rounds_to_nothing(dtype: str, update: float, gradient: float, found: bool) -> None:
    run = _of_halves(
        dtype,
        parameter={"rms": 0.1},
        update={"rms": 1e-5, "zero_count": update},
        gradient_before_clip={"rms": 0.1, "zero_count": gradient},
    )
    assert _rules(check_precision(run)) == [("warning", "low-precision-underflow")] * found


def _of_halves(dtype: str, **sources: Mapping[str, Any]) -> History:
    names = ("a.weight", "b.weight")
    rows = {source: dict.fromkeys(names, stats) for source, stats in sources.items()}
    run = history(loss=flat, **rows)
    known = {name: {"shape": [10, 10], "dtype": f"torch.{dtype}"} for name in names}
    return History(run.records, matrices=run.matrices, parameters=known)


def _columns(run: History, source: str, columns: frozenset[Column]) -> None:
    for record in run.records:
        record.tables[source] = replace(record.tables[source], columns=columns)  # type: ignore[index]


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float16", True), ("float32", False)])
@pytest.mark.parametrize("missing", ["update", "gradient_before_clip"])
def test_lost_updates_that_no_zeros_show_are_not_judged(dtype: str, said: bool, missing: str) -> None:
    run = _of_halves(dtype, parameter={"rms": 0.1}, update={"rms": 1e-7, "zero_count": 0.9}, gradient_before_clip={"rms": 0.1})
    _columns(run, missing, frozenset({Column.COUNT, Column.SQUARE_SUM, Column.MIN, Column.MAX}))
    diagnosis = diagnose_history(run)
    found = {finding.rule for finding in diagnosis.findings}
    assert ("precision" in diagnosis.unseen) == said
    assert "low-precision-underflow" not in found
    assert ("learning-rate-low" in found) == (not said)
    if said:
        word = missing.removesuffix("_before_clip")
        assert "2 matrices are kept in half precision" in diagnosis.unseen["precision"]
        assert f"call monitor.add_{word}_metric('sparsity')" in diagnosis.unseen["precision"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_are_lost_to_the_dtype_of_the_weights(dtype: str) -> None:
    run = _of_halves(dtype, parameter={"rms": 0.1}, update={"rms": 1e-5, "zero_count": 0.9}, gradient_before_clip={"rms": 0.1})
    assert _rules(check_precision(run)) == [("warning", "low-precision-underflow")] * (dtype == "bfloat16")


def test_matrices_that_rounding_keeps_still_are_part_of_one_finding() -> None:
    run = _of_halves(
        "bfloat16", parameter={"rms": 0.1}, update={"rms": 0.0, "zero_count": 1.0}, gradient_before_clip={"rms": 0.1}
    )
    found = [finding for finding in diagnose_history(run).findings if finding.rule in ("low-precision-underflow", "zero-update")]
    assert [finding.rule for finding in found] == ["low-precision-underflow"]
    assert found[0].evidence["matrices whose update is exactly zero"] == 2.0
    plain = _of_halves("float32", parameter={"rms": 0.1}, update={"rms": 0.0, "zero_count": 1.0}, gradient={"rms": 0.1})
    assert "zero-update" in [finding.rule for finding in diagnose_history(plain).findings]


# --- units -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zeros", "kind", "loss", "expected"),
    [
        (0.97, "ReLU", flat, [("warning", "dead-units")]),
        (0.97, "ReLU", falls, [("info", "dead-units")]),
        (0.5, "ReLU", flat, []),
        (0.97, "Dropout", flat, []),
    ],
)
def test_dead_units_by_their_outputs(
    zeros: float, kind: str, loss: Callable[[int], float], expected: list[tuple[str, str]]
) -> None:
    run = history(loss=loss, activation={"1": {"rms": 0.1, "zero_count": zeros}}, kinds={"1": kind})
    assert _rules(check_units(run)) == expected


@pytest.mark.parametrize(("zeros", "below", "severity"), [(1.0, 0.0, "warning"), (0.99, 0.0, "info"), (1.0, 0.1, "info")])
def test_a_layer_of_which_no_unit_fires_matters_where_it_keeps_all_gradients(zeros: float, below: float, severity: str) -> None:
    run = history(
        loss=falls,
        activation={"1": {"rms": 0.1, "zero_count": zeros}},
        kinds={"1": "ReLU"},
        parameter={"0.weight": 0.1, "2.weight": 0.1},
        gradient_before_clip={"0.weight": below, "2.weight": 0.1},
    )
    assert _rules(check_units(run)) == [(severity, "dead-units")]


@pytest.mark.parametrize(("weight", "bias", "found"), [(0.8, 0.8, True), (0.8, 0.0, False), (0.3, 0.9, False), (1.0, 1.0, False)])
def test_dead_units_by_rows_of_zeros_in_weight_and_bias(weight: float, bias: float, found: bool) -> None:
    gradients = {"0.weight": {"rms": 0.1, "zero_count": weight}, "0.bias": {"rms": 0.1, "zero_count": bias}}
    faded = {name: {**stats, "rms": 1e-7} for name, stats in gradients.items()}
    assert check_units(history(loss=flat, gradient_before_clip=faded, activation={"0": 1.0})) == []
    run = history(loss=flat, gradient_before_clip=gradients, activation={"0": 1.0})
    assert _rules(check_units(run)) == [("warning", "dead-units")] * found


@pytest.mark.parametrize(
    ("kind", "stats", "found"),
    [
        ("Tanh", {"rms": 0.95}, True),
        ("Tanh", {"rms": 0.7}, False),
        ("RNN", {"rms": 0.95}, True),
        ("Linear", {"rms": 0.95}, False),
        ("Sigmoid", {"rms": math.sqrt(0.49), "mean": 0.5}, True),  # nearly all are 0 or 1
        ("Sigmoid", {"rms": math.sqrt(0.3), "mean": 0.5}, False),
        ("Sigmoid", {"rms": 0.02, "mean": 0.01}, True),
    ],
)
def test_saturated_units(kind: str, stats: dict[str, float], found: bool) -> None:
    run = history(loss=flat, activation={"1[0]": stats}, kinds={"1": kind})
    assert _rules(check_units(run)) == [("warning", "saturated-units")] * found
    assert [f.severity for f in check_units(history(loss=falls, activation={"1": stats}, kinds={"1": kind}))] == ["info"] * found


def test_without_activations_units_are_unseen() -> None:
    with pytest.raises(NotMeasured):
        check_units(history(loss=flat))


# --- clipping ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "share", "loss", "expected"),
    [
        (50.0, 1.0, flat, [("warning", "always-clipped")]),
        (50.0, 1.0, falls, [("info", "always-clipped")]),
        (5.0, 1.0, flat, []),
        (50.0, 0.5, flat, []),
    ],
)
def test_a_bound_far_below_the_usual_norm(
    norm: float, share: float, loss: Callable[[int], float], expected: list[tuple[str, str]]
) -> None:
    values = {"grad_norm": lambda _: norm, "grad_norm_after_clip": lambda _: 1.0, "clip_fraction": lambda _: share}
    found = check_clipping(history(loss=loss, values=values))
    assert _rules(found) == expected
    for finding in found:
        assert finding.evidence["median norm"] == norm
        assert finding.evidence["bound"] == 1.0


def test_what_has_no_bound_in_common_is_not_taken_for_a_clip_of_the_whole_gradient() -> None:
    # as after a sum of losses, whose gradient the loop divides by the number of tokens
    values = {
        "grad_norm": lambda step: 50.0 + step,
        "grad_norm_after_clip": lambda step: 1.0 + step / 30,
        "clip_fraction": lambda _: 1.0,
    }
    (finding,) = check_clipping(history(loss=flat, values=values))
    assert (finding.rule, finding.severity) == ("always-clipped", "info")
    assert "not to one norm, as by a clip with one bound" in finding.cause
    # as after sign_(), which makes most norms larger
    values = {"grad_norm": lambda step: 1.0, "grad_norm_after_clip": lambda step: 9.0, "clip_fraction": lambda _: 0.0}
    assert check_clipping(history(loss=flat, values=values)) == []


@pytest.mark.parametrize(
    ("norm", "severity"),
    [
        (lambda step: 30.0 if step in (40, 70) else 1.0, "warning"),
        (lambda step: 30.0 if step == 40 else 1.0, "info"),
        (lambda step: 5.0 if step in (40, 70) else 1.0, "info"),
        (lambda step: 30.0 if step in (1, 3) else 1.0, "info"),
        (lambda step: 100 * 0.9**step * (30 if step in (60, 80) else 1), "info"),  # far above its neighbours, below the beginning
    ],
)
def test_a_clip_that_never_acts_is_a_fault_where_outliers_pass(norm: Callable[[int], float], severity: str) -> None:
    values = {"grad_norm": norm, "grad_norm_after_clip": norm, "clip_fraction": lambda _: 0.0}
    assert _rules(check_clipping(history(loss=flat, values=values))) == [(severity, "never-clipped")]
    assert _rules(check_clipping(history(loss=falls, values=values))) == [("info", "never-clipped")]


@pytest.mark.parametrize(
    ("bound", "outliers", "cause"),
    [
        (None, 0, "The loop writes to gradients"),
        (40.0, 0, ""),
        (0.0, 0, ""),
        (40.0, 1, "No gradient reaches the bound of the clip, 40."),
        (0.0, 1, ""),
        (40.0, 2, "No gradient reaches the bound of the clip, 40, though 2 steps"),
        (0.0, 2, "Gradients are not clipped, though 2 steps"),
    ],
)
def test_the_bound_of_a_trainer_is_known(bound: float | None, outliers: int, cause: str) -> None:
    values = {name: lambda step: 30.0 if step in (40, 70)[:outliers] else 1.0 for name in ("grad_norm", "grad_norm_after_clip")}
    run = history(loss=flat, values={**values, "clip_fraction": lambda step: 0.0})
    run.clip_bound = bound
    found = [finding.cause for finding in check_clipping(run)]
    assert len(found) == bool(cause)
    assert all(each.startswith(cause) for each in found)


def test_where_nothing_clips_nothing_is_said() -> None:
    assert check_clipping(history(values={"grad_norm": lambda step: 30.0 if step in (40, 70) else 1.0})) == []
    with pytest.raises(NotMeasured):
        check_clipping(history())


# --- rates -------------------------------------------------------------------------------------------------------------------


def _updates(ratio: float, **others: float) -> dict[str, dict[str, float]]:
    names = [*LAYERS, *others]
    return {
        "parameter": dict.fromkeys(names, 0.1),
        "update": {**dict.fromkeys(LAYERS, 0.1 * ratio), **{name: 0.1 * other for name, other in others.items()}},
        "gradient_before_clip": dict.fromkeys(names, 1e-3),
    }


def explodes(step: int) -> float:
    return 0.7 * 1000.0**step if step < 3 else math.nan


def leaves(step: int) -> float:
    return 2.0 if step == 0 else 8.0 * 0.98**step


@pytest.mark.parametrize(
    ("ratio", "loss", "expected"),
    [
        (0.25, flat, [("warning", "learning-rate-high"), ("warning", "update-ratio-high")]),
        (0.25, leaves, [("warning", "learning-rate-high"), ("info", "update-ratio-high")]),
        (
            500.0,
            lambda step: 0.7 * 1000**step if step < 3 else math.nan,
            [("warning", "learning-rate-high"), ("info", "update-ratio-high")],
        ),
        (0.25, falls, [("info", "update-ratio-high")]),
        (0.05, flat, []),
        (1e-5, flat, [("warning", "learning-rate-low")]),
        (1e-5, falls, []),
        (1e-3, flat, []),
        (0.0, flat, []),
    ],
)
def test_rates_by_updates_and_loss_together(ratio: float, loss: Callable[[int], float], expected: list[tuple[str, str]]) -> None:
    assert _rules(check_learning_rate(history(loss=loss, **_updates(ratio)))) == expected


def _head_alone(rises: float) -> History:
    """Of a new head of small weights on a frozen body: its first updates are large, and soon small."""
    draw = random.Random(0)

    def loss(step: int) -> float:
        return 0.69 + (rises if step == 1 else 0.0) + 0.01 * draw.gauss(0, 1)

    rows = _updates(0.0)
    rows["update"] = {name: lambda step: 0.1 * (0.3 if step < 10 else 0.01) for name in LAYERS}  # type: ignore[dict-item,misc]
    return history(200, loss=loss, **rows)


@pytest.mark.parametrize(("rises", "found"), [(0.0, False), (0.2, True)])
def test_a_loss_that_only_has_noise_does_not_suffer_from_the_rate(rises: float, found: bool) -> None:
    assert bool(check_learning_rate(_head_alone(rises))) == found


@pytest.mark.parametrize(
    ("ratio", "others", "expected"),
    [
        (0.15, {}, "learning-rate-high"),
        (0.05, {"one.weight": 0.5}, "update-ratio-high"),  # the rest is fine
    ],
)
def test_a_rate_that_throws_the_loss_far_is_that_of_all_if_most_move_far(
    ratio: float, others: dict[str, float], expected: str
) -> None:
    first = check_learning_rate(history(loss=leaves, **_updates(ratio, **others)))[0]
    assert first.rule == expected
    assert ("in a group of its own" in first.advice) == bool(others)


def test_most_parameters_are_no_group_of_their_own() -> None:
    (finding,) = check_learning_rate(history(loss=falls, **_updates(0.25)))
    assert (finding.rule, finding.advice) == ("update-ratio-high", "Lower the learning rate.")


@pytest.mark.parametrize("rises", [True, False])
def test_a_low_rate_that_still_rises_has_too_long_a_warm_up(rises: bool) -> None:
    run = history(loss=flat, context=lambda step: {"lr": [1e-8 * (step if rises else 1)]}, **_updates(1e-5))
    (finding,) = check_learning_rate(run)
    assert finding.rule == "learning-rate-low"
    assert ("shorten the warm-up" in finding.advice) == rises


def _raised(to: float, until: int = 100) -> Callable[[int], Mapping[str, Any]]:
    return lambda step: {"lr": [1e-4, 1e-3 * (to if 40 <= step < until else 1.0)]}


def _spoilt(step: int) -> float:
    return 0.5 + 0.01 * (step % 3) if step < 40 else 1.4 + 0.01 * (step % 3)


@pytest.mark.parametrize(
    ("to", "until", "loss", "found"),
    [
        (100.0, 100, _spoilt, True),
        (100.0, 100, lambda step: math.nan if step > 45 else _spoilt(0) + 0.01 * (step % 3), True),
        (100.0, 100, lambda step: _spoilt(step) if step < 70 else 0.4, False),  # it came down again
        (100.0, 100, falls, False),
        (4.0, 100, _spoilt, False),
        (100.0, 50, _spoilt, False),  # and so did the rate
        (10.0, 100, lambda step: math.inf if step == 45 else falls(step), False),  # a step that a GradScaler left out
        (10.0, 100, lambda step: math.nan if step % 15 == 14 else falls(step), False),
    ],
)
def test_a_rate_that_leaps_for_good_and_spoils_the_loss(to: float, until: int, loss: Callable[[int], float], found: bool) -> None:
    leapt = check_learning_rate(history(loss=loss, context=_raised(to, until), **_updates(1e-3)))
    assert [(finding.rule, finding.severity) for finding in leapt] == ([("learning-rate-high", "warning")] if found else [])
    if found:
        assert leapt[0].steps == (40, 99)
        assert leapt[0].evidence["learning rate before"] == 1e-3
        assert leapt[0].evidence["from then on"] == pytest.approx(1e-3 * to)
        assert leapt[0].cause.startswith("The learning rate of group 1 rose to 100 times what it was in step 40 and stayed")


def test_a_leap_for_a_while_is_called_so() -> None:
    (leapt,) = check_learning_rate(history(loss=_spoilt, context=_raised(100.0, 70), **_updates(1e-3)))
    assert "in step 40 and stayed there until step 69, and the loss is worse since then" in leapt.cause
    (leapt,) = check_learning_rate(
        history(loss=lambda step: _spoilt(step // 5), every=5, context=_raised_later, **_updates(1e-3))
    )
    assert "rose to 100 times what it was between steps 195 and 200 and stayed there, and" in leapt.cause


def _raised_later(step: int) -> Mapping[str, Any]:
    return {"lr": [1e-4 * (100 if step >= 200 else 1)]}


def test_a_new_group_is_no_leap() -> None:
    unfrozen = history(loss=_spoilt, context=lambda step: {"lr": [1e-4, 1e-3][: 1 + (step >= 40)]}, **_updates(1e-3))
    assert check_learning_rate(unfrozen) == []
    at_last = history(loss=lambda step: math.inf if step == 99 else falls(step), context=_raised_at_last, **_updates(1e-3))
    assert check_learning_rate(at_last) == []


def _raised_at_last(step: int) -> Mapping[str, Any]:
    return {"lr": [1e-3 * (100 if step == 99 else 1)]}


def test_a_restart_of_a_schedule_is_no_leap() -> None:
    cycles = history(loss=_spoilt, context=lambda step: {"lr": [1e-5 + 1e-2 * (1 - step % 40 / 40)]}, **_updates(1e-3))
    assert check_learning_rate(cycles) == []


@pytest.mark.parametrize(("first", "later", "found"), [(0.5, 0.05, True), (0.05, 0.5, False)])
def test_it_is_the_first_updates_that_tell_a_high_rate(first: float, later: float, found: bool) -> None:
    rows = _updates(0.0)
    rows["update"] = {name: lambda step: 0.1 * (first if step < 10 else later) for name in LAYERS}  # type: ignore[dict-item,misc]
    assert ("learning-rate-high" in [finding.rule for finding in check_learning_rate(history(loss=leaves, **rows))]) == found


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.15, "update-ratio-high"), (0.05, ""), (1e-5, ""), (5e-7, "update-ratio-low")],
)
def test_a_part_that_moves_by_its_own_rate_is_named(ratio: float, expected: str) -> None:
    found = check_learning_rate(history(loss=flat, **_updates(2e-3, **{"own.weight": ratio})))
    assert [(finding.rule, finding.where) for finding in found] == [(expected, "own.weight")] * bool(expected)


def test_a_part_that_is_slow_for_its_small_gradient_has_no_wrong_rate() -> None:
    rows = _updates(2e-3, **{"own.weight": 5e-7})
    rows["gradient_before_clip"]["own.weight"] = 1e-3 * 5e-7 / 2e-3
    assert check_learning_rate(history(loss=flat, **rows)) == []


def test_a_part_is_slow_only_beside_others_that_are_not() -> None:
    rows = _updates(5e-5, **{"own.weight": 5e-7})
    rows["gradient_before_clip"]["own.weight"] = 1.0
    assert check_learning_rate(history(loss=flat, **rows)) == []


def test_without_updates_rates_are_unseen() -> None:
    with pytest.raises(NotMeasured):
        check_learning_rate(history(parameter={"a.weight": 0.1}))


# --- attention ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entropy", "loss", "expected"),
    [
        (0.1, flat, [("warning", "attention-entropy-collapse")]),
        (0.1, falls, [("warning", "attention-entropy-collapse")]),  # from the start on
        (0.2, falls, [("info", "attention-entropy-collapse")]),
        (0.4, flat, []),
    ],
)
def test_attention_that_looks_at_one_key(entropy: float, loss: Callable[[int], float], expected: list[tuple[str, str]]) -> None:
    heads = {
        ("attention_entropy_normalized", "a", "mean"): lambda _: entropy,
        ("attention_entropy_normalized", "a", "min"): lambda _: 0.0,
    }
    assert _rules(check_attention(history(loss=loss, heads=heads))) == expected


@pytest.mark.parametrize(
    ("first", "last", "loss", "expected"),
    [
        (1.0, 200.0, falls, "warning"),
        (1.0, 50.0, falls, "info"),
        (1.0, 50.0, flat, "warning"),
        (1.0, 20.0, flat, ""),
        (50.0, 200.0, flat, ""),
    ],
)
def test_attention_logits_that_grow(first: float, last: float, loss: Callable[[int], float], expected: str) -> None:
    heads = {("attention_max_logit", "a", "max"): lambda step: first + (last - first) * min(step / 60, 1)}
    assert _rules(check_attention(history(loss=loss, heads=heads))) == [(expected, "attention-logit-growth")] * bool(expected)


# --- weights -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "loss", "expected"),
    [
        (lambda step: 1.03**step, falls, "warning"),
        (lambda step: 1.015**step, falls, "info"),
        (lambda step: 1.015**step, flat, "warning"),
        (lambda step: math.sqrt(1 + step), falls, ""),
        (lambda step: 1 + 9 * (1 - 0.9**step), flat, ""),
        (lambda step: 1.005**step, flat, ""),
        (lambda step: float(step), flat, ""),
    ],
)
def test_weights_that_grow_without_bound(norm: Callable[[int], float], loss: Callable[[int], float], expected: str) -> None:
    run = history(loss=loss, parameter={"a.weight": norm, "b.bias": lambda step: 1.1**step})
    assert [finding.severity for finding in check_weights(run)] == [expected] * bool(expected)


@pytest.mark.parametrize(("step_length", "is_cause"), [(0.03, True), (0.06, True), (0.2, False)])
def test_weights_that_grow_since_updates_go_to_and_fro_are_no_cause(step_length: float, is_cause: bool) -> None:
    run = history(
        loss=flat, parameter={"a.weight": lambda step: 1.03**step}, update={"a.weight": lambda s: step_length * 1.03**s}
    )
    (growth,), (plateau,) = check_weights(run), check_loss(run)
    ranked = Diagnosis.of([*check_learning_rate(run), growth, plateau], None, {}).findings
    expected = ["weight-growth", "loss-plateau"]
    assert [finding.rule for finding in ranked] == expected if is_cause else ["update-ratio-high", *expected]


# --- spikes ------------------------------------------------------------------------------------------------------------------


def _spike(step: int, value: float, score: float) -> SpikeEvent:
    return SpikeEvent(step, "grad_norm", value, score, 5.0, "grad_norm is high", usual=1.0)


def test_a_spike_is_told_with_the_layer_that_made_it() -> None:
    gradients = {
        "a.weight": lambda step: 5.0 if step == 60 else 0.1,  # 50 times what is usual
        "b.weight": lambda step: 3.0 if step == 60 else 0.01,  # 300 times
        "c.weight": lambda step: 0.1 if step == 60 else 1e-5,  # 10,000 times, and nothing beside the others
    }
    run = history(loss=flat, gradient_before_clip=gradients, parameter=dict.fromkeys(gradients, 0.1))
    run.events = [_spike(20, 4.0, 6.0), _spike(60, 58.3, 30.0)]
    (finding,) = check_spikes(run)
    assert (finding.rule, finding.severity, finding.where, finding.steps) == ("spike", "warning", "b.weight", (60, 60))
    assert "58.3 times what was usual; b.weight (300 times its usual norm, 26% of the square) moved most, then " in finding.cause
    assert "There was 1 other spike, none larger." in finding.cause
    assert "monitor.why(60)" in finding.advice
    assert finding.evidence["grad_norm"] == 58.3


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("loss", "The loss rises"),
        ("train/loss", "The loss rises"),
        ("loss_d", "loss_d rises"),
        ("actor_loss", "actor_loss rises"),
    ],
)
def test_a_loss_that_is_not_the_whole_one_is_named(name: str, start: str) -> None:
    run = history(loss=None)
    for step, record in enumerate(run.records):
        run.records[step] = record._replace(values={Key("", name, ""): 1.0 + step / 20})
    (finding,) = check_loss(run)
    assert finding.cause.startswith(start)
    assert ("Nothing, if this is the loss of one network" in finding.advice) == (name == "loss_d")


@pytest.mark.parametrize(("size", "by_turns", "severity"), [(31.0, 1.0, "info"), (31.0, 0.0, "warning"), (310.0, 1.0, "warning")])
def test_the_spike_of_a_player_is_grave_if_it_is_huge(size: float, by_turns: float, severity: str) -> None:
    run = history(
        loss=lambda step: 0.6 if step == 60 else 0.1 + 0.5 * 0.8**step,
        context=lambda step: {"by_turns": 1.0} if by_turns else {},
        gradient_before_clip={"a.weight": lambda step: size if step == 60 else 1.0},
        values={"grad_norm": lambda step: size if step == 60 else 1.0},
    )
    run.events = [SpikeEvent(60, "gradmon/grad_norm", size, 40.0, 8.0, "far above", usual=1.0)]
    assert [finding.severity for finding in check_spikes(run)] == [severity]


def test_without_spikes_or_without_gradients_of_them_nothing_is_claimed() -> None:
    run = history(loss=flat, gradient_before_clip={"a.weight": 1.0})
    assert check_spikes(run) == []
    run.events = [_spike(5000, 9.0, 9.0)]  # of a step that is not looked at
    assert check_spikes(run) == []
    other = history(loss=flat)
    other.events = [_spike(60, math.inf, math.inf), _spike(61, 9.0, 9.0)]  # infinity is another rule's
    (finding,) = check_spikes(other)
    assert (finding.where, finding.steps) == ("", (61, 61))


# --- loss --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (flat, [("warning", "loss-plateau")]),
        (falls, []),
        (rises, [("warning", "loss-divergence")]),
        (lambda step: falls(step) if step < 50 else 0.5 + (step - 50) / 10, [("warning", "loss-divergence")]),
        (
            lambda step: falls(step) if step < 50 else 0.5 + (step - 50) / 50,
            [("warning", "loss-divergence")],
        ),  # below its beginning
        (lambda step: falls(step) if step < 50 else falls(50) + (step - 50) / 250, []),  # it loses an eighth of its fall
        (lambda step: 10 * _noise(step), [("info", "loss-plateau")]),
        (
            lambda step: 1.4 + _noise(step) if step > 10 else 1.0 + _noise(step),
            [("warning", "loss-divergence")],
        ),  # at once, then rests
        (
            lambda step: (1.95 - step / 160 if step > 5 else 1.0) + _noise(step),
            [("info", "loss-plateau")],
        ),  # at once, and falls since then
        (lambda step: 1.1 + _noise(step) if step > 10 else 1.0 + _noise(step), [("warning", "loss-plateau")]),
        (
            lambda step: 2.0 + _noise(step) if step > 9 else 2.3 + _noise(step),
            [("warning", "loss-plateau")],
        ),  # it fell a little, and rests
        (lambda step: max(2.6 - step / 50, 2.0) + _noise(step), [("info", "loss-plateau")]),  # it took a while to fall that much
        (lambda step: -2.0 - step / 10, []),
    ],
)
def test_what_the_loss_does(loss: Callable[[int], float], expected: list[tuple[str, str]]) -> None:
    assert _rules(check_loss(history(loss=loss))) == expected


@pytest.mark.parametrize(("steps", "fall", "severity"), [(200, 0.0, "warning"), (60, 0.0, "info"), (60, 0.65, "info")])
def test_a_fall_that_noise_may_hide_is_no_plateau_to_warn_of(steps: int, fall: float, severity: str) -> None:
    run = history(steps, loss=lambda step: 3.0 - fall * step / 60 + random.Random(step).uniform(-0.9, 0.9))
    assert run.learning.state == "flat"
    (finding,) = check_loss(run)
    assert (finding.rule, finding.severity) == ("loss-plateau", severity)
    assert ("as far as its noise" in finding.cause) == (severity == "info")


@pytest.mark.parametrize("steps", [20, 25, 30, 40, 50, 60, 80])
def test_a_short_noisy_run_that_falls_slowly_is_no_fault(steps: int) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        losses = [abs(5 * math.exp(-0.003 * step) * (1 + 0.2 * draw.gauss(0, 1))) for step in range(steps)]
        found = check_loss(history(steps, loss=losses.__getitem__))
        assert all(finding.severity == "info" or finding.rule == "loss-divergence" for finding in found), (seed, _rules(found))


@pytest.mark.parametrize(("steps", "severity"), [(30, "info"), (35, "info"), (100, "warning")])
def test_so_few_losses_that_none_could_rank_apart_are_no_plateau_to_warn_of(steps: int, severity: str) -> None:
    assert _rules(check_loss(history(steps, loss=flat))) == [(severity, "loss-plateau")]


@pytest.mark.parametrize(
    ("loss", "severity", "rule"),
    [(flat, "info", "loss-plateau"), (lambda step: 2.0 + step / 10 + _noise(step), "warning", "loss-divergence")],
)
def test_a_training_that_goes_on_may_be_at_its_end_but_may_not_rise(
    loss: Callable[[int], float], severity: str, rule: str
) -> None:
    begun = history(loss=loss, context=lambda step: {"goes_on": 1.0} if step == 0 else {})
    later = history(loss=loss)
    later.records = [record._replace(step=record.step + 500) for record in later.records]
    for run in (begun, later):
        assert run.is_resumed
        assert run.learning.is_stuck == (severity == "warning")
        (finding,) = check_loss(run)
        assert (finding.severity, finding.rule) == (severity, rule)
        assert ("began earlier" in finding.cause) == (severity == "info")
    assert not history(loss=loss).is_resumed


@pytest.mark.parametrize("loss", [flat, rises])
@pytest.mark.parametrize(("of_ten", "severity"), [(0, "warning"), (5, "warning"), (6, "info"), (10, "info")])
def test_where_optimizers_step_by_turns_no_loss_has_to_fall(loss: Callable[[int], float], of_ten: int, severity: str) -> None:
    run = history(loss=loss, context=lambda step: {"by_turns": 1.0} if step % 10 < of_ten else {})
    expected = [] if loss is flat and of_ten > 5 else [severity]  # losses that rest against each other are no finding
    assert [finding.severity for finding in check_loss(run)] == expected


def test_a_loss_that_nobody_logged_is_unseen() -> None:
    with pytest.raises(NotMeasured, match="log_scalar"):
        check_loss(history(loss=None))


def _ran_out(run: History) -> list[Finding]:
    """What is found of the rate of a run whose updates were not measured."""
    with contextlib.suppress(NotMeasured):
        return check_learning_rate(run)
    return []


@pytest.mark.parametrize(("until", "found"), [(40, True), (68, True), (72, False)])
def test_a_schedule_that_runs_out_early(until: int, found: bool) -> None:
    run = history(loss=lambda step: falls(min(step, until)), context=lambda step: {"lr": [1e-3 if step < until else 1e-7]})
    assert _rules(_ran_out(run)) == [("warning", "learning-rate-low")] * found
    if found:
        assert _ran_out(run)[0].steps[0] == until


@pytest.mark.parametrize(
    ("every", "last", "found"),
    [
        (25, 200, True),
        (25, 20, False),
        (10, 200, False),
        (1, 200, False),
    ],  # ... a warm-up of epochs, one that is quick, and one of steps
)
def test_a_warm_up_of_steps_that_is_stepped_by_epochs(every: int, last: int, found: bool) -> None:
    groups = [{"optimizer": "AdamW", "number": 0, "settings": {"initial_lr": 1e-3}, "parameters": []}]

    def run(loss: Callable[[int], float]) -> History:
        found = history(loss=loss, context=lambda step: {"lr": [1e-3 * (1 + step // every) / last]})
        return replace(found, groups=groups)

    assert _rules(_ran_out(run(flat))) == [("warning", "learning-rate-low")] * found
    assert not _ran_out(run(falls))  # it learns all the same


def test_the_rates_of_all_groups_have_to_run_out() -> None:
    def run(first: float, second: float, **context: float) -> list[int]:
        rates = lambda step: [1.0 if step < 20 else first, 9e-4 if step < 25 else second]  # noqa: E731
        return [found.steps[0] for found in _ran_out(history(loss=flat, context=lambda step: {"lr": rates(step), **context}))]

    assert run(0.0, 9e-4) == []
    assert run(0.0, 9e-8) == [25]
    assert run(0.0, 9e-8, by_turns=1.0) == []  # no loss has to fall


@pytest.mark.parametrize(
    ("rate", "loss", "found"),
    [
        (1e-5, lambda step: 2.0 + _noise(step), True),
        (1e-4, lambda step: 2.0 + _noise(step), False),  # a tenth is usual
        (1e-5, lambda step: 2.0 - step / 200 + _noise(step), False),  # it still falls
        (1e-5, lambda step: 2.0 - step / 2000 + _noise(step) / 10, True),  # by a hair
        (1e-7, lambda step: 2.0 - step / 100 + _noise(step), False),  # the rest is enough
        (1e-5, lambda step: 0.5 + 1.5 * 0.8**step + _noise(step), False),  # it has fallen
    ],
)
def test_a_schedule_that_leaves_little(rate: float, loss: Callable[[int], float], found: bool) -> None:
    run = history(loss=loss, context=lambda step: {"lr": [1e-3 if step < 20 else rate]})
    assert any("below a fiftieth" in finding.cause for finding in _ran_out(run)) == found


def test_a_rate_that_is_still_on_its_way_up_leaves_open_what_comes() -> None:
    assert _rules(check_loss(history(loss=flat, context=lambda step: {"lr": [1e-6 * step]}))) == [("info", "loss-plateau")]
    assert _rules(check_loss(history(loss=flat, context=lambda step: {"lr": [1e-6 * min(step, 40)]}))) == [
        ("warning", "loss-plateau")
    ]


@pytest.mark.parametrize(("chance", "severity"), [(0.0, "warning"), (5.0, "info"), (0.4, "warning")])
def test_a_loss_that_rises_a_little_far_below_chance_has_hardly_forgotten_anything(chance: float, severity: str) -> None:
    run = history(loss=lambda step: 0.1 + 0.0006 * step + 0.001 * math.sin(step))
    run.chance["loss"] = chance
    assert _rules(check_loss(run)) == [(severity, "loss-divergence")]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda step: 0.5 - 0.003 * step**2, True),
        (lambda step: 70.0 - 10.0 ** (step / 10), True),
        (lambda step: 70.0 - 10.0 ** min(step / 8, 7), True),
        (lambda step: 3.0 - 9.0 * (1 - 0.95**step), False),  # a density's logarithm
        (lambda step: -(0.99 - 0.95**step), False),  # a cosine
        (lambda step: math.sin(step) - 0.01, False),  # a policy's gradient
        (lambda step: 20.0 - 0.003 * step**2, False),  # not far yet
    ],
)
def test_a_loss_that_falls_below_zero_without_bound(loss: Callable[[int], float], found: bool) -> None:
    run = history(loss=loss)
    assert any("nothing bounds it" in finding.cause for finding in check_loss(run)) == found


@pytest.mark.parametrize(("fallen", "chance", "severity"), [(0.2, 0.0, "info"), (0.1, 0.0, "warning"), (0.2, 2.0, "warning")])
def test_an_unusual_loss_may_have_a_floor(fallen: float, chance: float, severity: str) -> None:
    """That of a kind which is recognised has the loss of a constant answer to compare with."""
    run = history(loss=lambda step: 1.8 * (1 - fallen * min(step / 6, 1)) + 0.01 * math.sin(step))
    run.chance["loss"] = chance
    assert _rules(check_loss(run)) == [(severity, "loss-plateau")]


@pytest.mark.parametrize(("logged", "is_known"), [(2.0, True), (2.05, True), (128.0, False), (0.5, False)])
def test_chance_is_that_of_the_loss_that_goes_backward(logged: float, is_known: bool) -> None:
    run = history(loss=lambda step: logged - step / 1000)
    run = History(run.records, known_chance={"loss": 1.5, "step": 0.0, "went backward": 2.0})
    assert bool(run.chance) == is_known


@pytest.mark.parametrize(
    ("optimizer", "ratio", "severity"), [("SGD", 50.0, "warning"), ("SGD", 20.0, "info"), ("Adam", 50.0, "info")]
)
def test_a_clip_sets_the_pace_of_plain_sgd(optimizer: str, ratio: float, severity: str) -> None:
    run = history(
        loss=falls,
        values={"grad_norm": lambda step: ratio, "grad_norm_after_clip": lambda step: 1.0, "clip_fraction": lambda step: 1.0},
    )
    run.groups = [{"optimizer": optimizer, "settings": {}, "parameters": []}]
    assert _rules(check_clipping(run)) == [(severity, "always-clipped")]


# --- what a loss at chance, a head without gradients and a loss that begins far above make worse ----------------------------------


def test_a_loss_that_falls_from_far_above_to_chance_has_learnt_nothing() -> None:
    run = history(200, loss=lambda step: 1.1 + 20 * 0.7**step + _noise(step) / 10)
    assert not run.learning.is_stuck
    run.chance["loss"], run.chance["examples"] = 1.1, 500.0
    del run.__dict__["learning"]
    assert run.learning.is_at_chance
    assert run.learning.is_stuck
    assert _rules(check_loss(run)) == [("warning", "loss-at-chance")]
    run.acts = True
    del run.__dict__["learning"]
    assert not run.learning.is_stuck


@pytest.mark.parametrize(("ratio", "found"), [(1e-4, True), (1e-2, False)])
def test_a_rate_is_too_low_for_a_run_that_ends_at_chance_if_all_its_updates_are_small(ratio: float, found: bool) -> None:
    run = history(200, loss=flat, update={"a.weight": ratio}, parameter={"a.weight": 1.0})
    run.chance["loss"] = 2.0
    assert ([f.rule for f in check_learning_rate(run)] == ["learning-rate-low"]) == found


@pytest.mark.parametrize(("loss", "is_so"), [(1.98, True), (2.02, True), (1.9, False), (2.5, False)])
def test_a_loss_is_at_chance_within_a_few_percent(loss: float, is_so: bool) -> None:
    run = history(120, loss=lambda step: loss + 0.01 * math.sin(step), gradient_before_clip={"a.weight": 1.0})
    run.chance["loss"], run.chance["examples"] = 2.0, 500.0
    assert ("loss-at-chance" in [finding.rule for finding in check_loss(run)]) == is_so


@pytest.mark.parametrize(("loss", "is_stuck"), [(0.15, False), (0.3, True)])
def test_a_loss_far_below_chance_was_learnt_at_once(loss: float, is_stuck: bool) -> None:
    run = history(40, loss=lambda step: loss + 0.001 * math.sin(step), gradient_before_clip={"a.weight": 1.0})
    run.chance["loss"], run.chance["examples"] = 2.0, 500.0
    assert run.learning.is_stuck == is_stuck


@pytest.mark.parametrize(("first", "loss", "is_stuck"), [(1.9, 1.3, False), (1.9, 1.4, True), (1.7, 1.3, True)])
def test_a_loss_that_begins_at_chance_and_ends_a_third_below_it_was_learnt(first: float, loss: float, is_stuck: bool) -> None:
    noisy = lambda step: loss * (1 + 0.2 * math.sin(7 * step)) if step else first  # noqa: E731
    run = history(40, loss=noisy, gradient_before_clip={"a.weight": 1.0})
    run.chance["loss"], run.chance["examples"] = 2.0, 500.0
    assert run.learning.is_stuck == is_stuck


def test_a_loss_below_chance_that_still_falls_a_little_is_learning() -> None:
    run = history(120, loss=lambda step: 1.99 - 1e-4 * step + 0.005 * math.sin(step), gradient_before_clip={"a.weight": 1.0})
    run.chance["loss"], run.chance["examples"] = 2.0, 500.0
    assert not run.learning.is_at_chance
    run = history(120, loss=lambda step: 2.03 - 1e-4 * step + 0.005 * math.sin(step), gradient_before_clip={"a.weight": 1.0})
    run.chance["loss"], run.chance["examples"] = 2.0, 500.0
    assert run.learning.is_at_chance


@pytest.mark.parametrize(("loss", "words"), [(0.0, "nothing counts in it"), (1.0, "does not depend on the parameters")])
def test_gradients_of_zero_beside_a_loss_of_zero_may_have_ignored_labels(loss: float, words: str) -> None:
    run = history(60, loss=lambda step: loss, gradient_before_clip={"a.weight": 0.0}, parameter={"a.weight": 1.0})
    (finding,) = check_unused_parameters(run)
    assert (finding.severity, finding.rule) == ("warning", "no-gradient")
    assert words in finding.cause


@pytest.mark.parametrize(("loss", "severity"), [(flat, "warning"), (falls, "info")])
def test_a_small_head_without_gradient_matters_where_nothing_is_learnt(loss: Callable[[int], float], severity: str) -> None:
    body = {f"body.{place}.weight": 1.0 for place in range(20)}
    run = history(loss=loss, gradient_before_clip=body, parameter={**body, "head.weight": 1.0})
    assert _rules(check_unused_parameters(run)) == [(severity, "no-gradient")]
    run.frozen = frozenset({"head.weight"})
    assert check_unused_parameters(run) == []


@pytest.mark.parametrize(
    ("first", "chance", "severity"),
    [(600.0, 0.0, "warning"), (6.0, 0.0, "info"), (600.0, 550.0, "info"), (600.0, 20.0, "warning")],
)
def test_large_weights_are_a_fault_if_the_loss_begins_far_above_its_end_and_chance(
    first: float, chance: float, severity: str
) -> None:
    layers = dict.fromkeys(LAYERS, 1.0)  # with a fan in of 100, a gain of 10
    run = history(loss=lambda step: first * 0.5**step + 0.5 + 0.5 * 0.97**step, gradient_before_clip=layers, parameter=layers)
    run.chance["loss"] = chance
    assert _rules(check_depth(run)) == [(severity, "initialisation-scale")]


@pytest.mark.parametrize(("is_square", "first", "severity"), [(0.0, 8.0, "warning"), (0.0, 3.0, "info"), (1.0, 8.0, "info")])
def test_a_loss_of_logarithms_begins_near_chance(is_square: float, first: float, severity: str) -> None:
    """The mean of the targets is far from that of the first outputs perhaps, which the square of their difference shows."""
    layers = dict.fromkeys(LAYERS, 1.0)
    run = history(loss=lambda step: 1 + (first - 1) * 0.5**step, gradient_before_clip=layers, parameter=layers)
    run.chance.update({"loss": 2.0, "is square": is_square})
    assert _rules(check_depth(run)) == [(severity, "initialisation-scale")]


@pytest.mark.parametrize("worst", [1.0, 8.0])
def test_a_part_whose_first_updates_throw_the_loss_up(worst: float) -> None:
    layers = dict.fromkeys(LAYERS, 1.0)
    run = history(
        loss=lambda step: 1.5 * 0.97**step * (worst if step == 3 else 1.0),
        parameter=layers,
        update={**dict.fromkeys(LAYERS, 0.001), "7.weight": lambda step: 5.0 if step < 3 else 0.01},
    )
    found = check_learning_rate(run)
    assert [(f.severity, f.rule, f.where) for f in found] == [("warning", "update-ratio-high", "7.weight")] * (worst > 3)


@pytest.mark.parametrize(("share", "found"), [(1, True), (10, False)])
def test_a_gradient_that_is_gone_from_the_second_step_on(share: int, found: bool) -> None:
    run = history(
        loss=flat, gradient_before_clip={"a.weight": lambda step: float(step == 0 or (share > 1 and step % share == 0))}
    )
    assert ("gradient-dropped-to-zero" in [f.rule for f in check_unused_parameters(run)]) == found


@pytest.mark.parametrize(
    ("names", "sizes", "found"),
    [
        (("mu", "logvar"), (0.06, 0.004), True),
        (("mu", "logvar"), (0.06, 0.2), False),
        (("mu", "logvar"), (0.004, 0.004), False),
        (("one", "other"), (0.06, 0.004), False),
    ],
)
def test_a_latent_has_collapsed_if_both_of_its_layers_fall_to_zero(
    names: tuple[str, str], sizes: tuple[float, float], found: bool
) -> None:
    layers = ["encoder", *names, "decoder"]

    def usual(step: int) -> float:
        return sizes[0] if step < 10 else sizes[1]

    run = history(
        loss=falls,
        activation={name: usual if name in names else 1.0 for name in layers},
        parameter={f"{name}.weight": 1.0 for name in layers},
        kinds=dict.fromkeys(layers, "Linear"),
    )
    assert _rules(check_latent(run)) == [("warning", "posterior-collapse")] * found
    assert check_latent(history(loss=falls)) == []


@pytest.mark.parametrize(
    ("rate", "turn", "found"),
    [
        (lambda step: 1e-4 * (step + 1), 40, True),
        (lambda step: 1e-4 * (step + 1), 99, False),  # the loss falls to the end
        (lambda step: 1e-4 * min(step + 1, 40), 40, False),  # it is the same for the longer part
        (lambda step: 1e-4 * (step % 50 + 1), 40, False),  # cycles
    ],
)
def test_a_rate_that_rises_on_though_the_loss_has_turned(rate: Callable[[int], float], turn: int, found: bool) -> None:
    run = history(
        loss=lambda step: 2.0 * 0.97 ** min(step, 2 * turn - step) + 0.001 * math.sin(step),
        context=lambda step: {"lr": [rate(step)]},
        parameter={"a.weight": 1.0},
        update={"a.weight": 0.001},
    )
    assert any("the learning rate still rises" in finding.cause for finding in check_loss(run)) == found


@pytest.mark.parametrize(("fan_in", "end", "found"), [(5, 0.004, True), (10, 0.004, False), (5, 0.2, False)])
def test_a_latent_whose_mean_and_variance_are_halves_of_one_output(fan_in: int, end: float, found: bool) -> None:
    run = history(
        loss=falls,
        activation={"encoder": lambda step: 0.3 if step < 10 else end, "decoder": 1.0},
        parameter={"encoder.weight": {"rms": 1.0, "count": 160}, "decoder.weight": {"rms": 1.0, "count": 8 * fan_in}},
        matrices={"encoder.weight": 16, "decoder.weight": fan_in},
        kinds={"encoder": "Linear", "decoder": "Linear"},
    )
    assert _rules(check_latent(run)) == [("warning", "posterior-collapse")] * found


@pytest.mark.parametrize(
    ("at", "after", "leads"),
    [(30.0, 1.9, True), (30.0, 0.11, False), (1.9, 1.9, False)],
    ids=["undone", "recovered", "other data"],
)
def test_a_spike_that_undoes_what_was_learnt_comes_first(at: float, after: float, leads: bool) -> None:
    run = history(
        loss=lambda step: 2.0 * 0.9**step + 0.1 if step < 50 else at if step == 50 else after,
        gradient_before_clip={"a.weight": lambda step: 500.0 if step == 50 else 0.1},
        parameter={"a.weight": 1.0},
        values={"grad_norm": lambda step: 500.0 if step == 50 else 1.0},
    )
    run.events = [SpikeEvent(50, "gradmon/grad_norm", 500.0, 40.0, 8.0, "far above", usual=1.0)]
    (found,) = check_spikes(run)
    assert found.severity == "warning"
    assert (found.weight > 100) == leads
    assert ("It undid what was learnt: the loss, 1.72 at first, was" in found.cause) == leads


@pytest.mark.parametrize(("fall", "leads"), [(0.05, True), (0.0, False)], ids=["a small fall", "only noise"])
def test_a_spike_that_undoes_a_small_but_certain_fall_explains_the_plateau(fall: float, leads: bool) -> None:
    """As of a pretrained model, whose loss falls by far less than a third."""
    draw = random.Random(0)

    def loss(step: int) -> float:
        level = 1.0 - fall * min(step / 40, 1.0) if step < 100 else 1.0
        return 300.0 if step == 100 else level + 0.01 * draw.gauss(0, 1)

    run = history(
        200,
        loss=loss,
        gradient_before_clip={"a.weight": lambda step: 500.0 if step == 100 else 0.1},
        parameter={"a.weight": 1.0},
        update={"a.weight": 0.001},
        values={"grad_norm": lambda step: 500.0 if step == 100 else 1.0},
    )
    run.events = [SpikeEvent(100, "gradmon/grad_norm", 500.0, 40.0, 8.0, "far above", usual=1.0)]
    first, consequences = next(diagnose_history(run).grouped())
    assert (first.rule == "spike" and "loss-plateau" in [each.rule for each in consequences]) == leads


def test_words_that_fit_their_numbers() -> None:
    ratios = {"a.weight": 1e20}
    run = history(loss=flat, update=ratios, parameter={"a.weight": 1.0}, gradient_before_clip={"a.weight": 1.0})
    causes = " ".join(finding.cause for finding in check_learning_rate(run))
    assert "1e+20 times their own size" in causes
    assert "%" not in causes
    run = history(200, loss=lambda step: 2.0 + 60 * (step < 50) + _noise(step))
    assert [f.cause for f in check_loss(run) if "does not fall" in f.cause] == []
    run = history(loss=lambda step: math.nan)
    with pytest.raises(NotMeasured, match="finite in 0 steps of 100"):
        check_loss(run)


def test_zeros_in_gradients_are_no_dead_units_of_a_model_without_relu() -> None:
    rows = {"max": 1.0, "rms": 1.0, "zero_count": 0.9}
    for kind, found in (("GELU", []), ("Tanh", []), ("ReLU", ["dead-units"]), ("Linear", ["dead-units"])):
        run = history(gradient={"qkv.weight": rows, "qkv.bias": rows}, kinds={"qkv": "Linear", "after": kind})
        try:
            assert [finding.rule for finding in check_units(run)] == found
        except NotMeasured:
            assert found == []


@pytest.mark.parametrize(("growth", "found"), [(1.0, False), (2.0, True)])
def test_a_loss_that_ran_away_before_the_first_nan_is_a_matter_of_the_rate(growth: float, found: bool) -> None:
    run = history(
        12,
        loss=lambda step: growth**step if step < 8 else math.nan,
        gradient_before_clip={"a.weight": 1.0},
        parameter={"a.weight": 1.0},
    )
    (finding,) = check_nonfinite(run)
    assert finding.rule == "non-finite-loss"
    assert ("the loss had grown from 1 to 128 before" in finding.cause) == found
    assert finding.advice.startswith("Lower the learning rate first") == found


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("", "Divide the loss by the number of micro-batches"),
        ("transformers", "set trainer.model_accepts_loss_kwargs = False before trainer.train()"),
        ("lightning", "Lightning divides the loss by accumulate_grad_batches itself"),
        (["no", "name"], "Divide the loss by the number of micro-batches"),
    ],
    ids=str,
)
def test_a_loss_scale_has_the_remedy_of_its_trainer(trainer: object, words: str) -> None:
    of_trainer = History([], facts=[LoopFinding("loss-scale", 0, 3, 4)], trainer=trainer)
    (finding,) = diagnose_history(of_trainer).findings
    assert words in finding.advice


@pytest.mark.parametrize(
    ("weight", "bias", "found"),
    [
        (lambda step: 0.97e-4 + 1e-7 * math.sin(step), lambda step: 1e-4, True),
        (lambda step: 0.6e-4, lambda step: 1e-4, False),  # spread below it
        (lambda step: 1.1e-4, lambda step: 1e-4, False),  # above it
        (lambda step: 0.97e-4, lambda step: 1e-4 + 1e-9 * step, False),
        (lambda step: 0.97e-4, lambda step: 1e-4 if step > 95 else 0.9e-4, False),  # the end is too short
    ],
)
def test_weights_that_sit_on_a_bound(weight: Callable[[int], float], bias: Callable[[int], float], found: bool) -> None:
    def began(value: Callable[[int], float], first: float, count: int) -> Callable[[int], Mapping[str, float]]:
        return lambda step: {"rms": value(step) if step >= 10 else first, "count": count}

    rows = {
        "maker.a.weight": 0.1,
        "judge.a.weight": began(weight, 0.1, 64),
        "judge.a.bias": began(bias, 0.03, 8),
        "judge.b.weight": began(weight, 0.2, 8),
        "judge.b.bias": began(bias, 0.02, 1),
    }
    run = history(loss=flat, parameter=rows)
    assert [(each.rule, each.where) for each in check_bounds(run)] == [("weights-at-bound", "judge.a.weight")] * found
