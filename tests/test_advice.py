"""Advice looks at the run: it recommends nothing that is there, and names nothing that is not. A spike is as grave as it is large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.synthetic_run import history
from torch_gradmon.analysis.diagnosis.diagnose import diagnose_history
from torch_gradmon.analysis.diagnosis.findings import Finding, NotMeasured
from torch_gradmon.analysis.diagnosis.history import History, Precautions
from torch_gradmon.analysis.diagnosis.rules.depth import check_clipping, check_depth, check_spikes
from torch_gradmon.analysis.diagnosis.rules.loss import check_learning_rate, check_loss, check_units
from torch_gradmon.analysis.diagnosis.rules.nonfinite import check_nonfinite, check_precision
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.core.trainers import WITH_LOSS_FUNCTION, advice_for

LAYERS = [f"{place}.weight" for place in range(9)]
Context = Callable[[int], Mapping[str, Any]]


def _flat(step: int) -> float:
    return 2.0 + 0.04 * math.sin(12.9898 * step)


# --- how grave a spike is --------------------------------------------------------------------------------------------------------------


def _run(
    size: float = 50.0,
    at: int = 60,
    level: Callable[[int], float] = lambda step: 1.0,
    together: bool = False,
    clipped: float | None = None,
    applied: bool = True,
    context: Context = lambda step: {},
) -> History:
    """A spike of ``size`` times the usual, of one layer or of all ``together``, and what the clip leaves of it."""

    def gradient(is_spoiled: bool) -> Callable[[int], float]:
        return lambda step: 0.1 * level(step) * (size if step == at and is_spoiled else 1.0)

    rows = {"a.weight": gradient(True), "b.weight": gradient(together), "c.weight": gradient(together)}

    def whole(step: int) -> float:
        return 10 * math.hypot(*(row(step) for row in rows.values()))  # of 100 elements each

    values: dict[str, Callable[[int], float | None]] = {"grad_norm": whole}
    if clipped is not None:
        values["grad_norm_after_clip"] = lambda step: min(whole(step), clipped)
        values["clip_fraction"] = lambda step: 0.01
    run = history(
        loss=_flat, values=values, gradient_before_clip=rows, applied=lambda step: applied or step != at, context=context
    )
    run.events = [SpikeEvent(at, "grad_norm", whole(at), 40.0, 5.5, "high", usual=whole(at - 1))]
    return run


def _spike(run: History) -> Finding:
    (finding,) = check_spikes(run)
    return finding


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("size", "severity"), [(3.0, "info"), (8.0, "info"), (50.0, "warning"), (1000.0, "warning")])
def test_a_spike_is_as_grave_as_it_is_large(size: float, severity: str, together: bool) -> None:
    assert _spike(_run(size, together=together)).severity == severity


@pytest.mark.parametrize(
    ("level", "size"),
    [
        (lambda step: 1.0 if step < 60 else 45.0, 1.0),  # another level, as of a harder task, and no spike
        (
            lambda step: 50 * 0.9**step,
            50.0,
        ),  # next to nothing, as where the loss is near zero: this is less than in the beginning
        (lambda step: 40.0 if step % 4 == 0 else 1.0, 1.0),  # what comes again and again
    ],
)
def test_what_stays_or_comes_again_or_is_small_beside_the_beginning_is_not_grave(
    level: Callable[[int], float], size: float
) -> None:
    run = _run(size, level=level)
    assert run.events[0].value > 20 * run.events[0].usual
    assert _spike(run).severity == "info"


def test_a_clip_takes_care_of_a_loud_batch_and_not_of_one_loud_layer() -> None:
    assert _spike(_run(together=True, clipped=2.0)).severity == "info"
    assert _spike(_run(together=False, clipped=2.0)).severity == "warning"
    assert _spike(_run(together=True, clipped=1e9)).severity == "warning"  # the clip lets it pass


def test_a_step_that_was_not_applied_did_no_harm() -> None:
    finding = _spike(_run(applied=False))
    assert finding.severity == "info"
    assert finding.advice.endswith("The step was not applied, so it changed nothing.")


# --- what it says of the clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clipped", "words"),
    [
        (None, "on_spike='skip' leaves such steps out, and clip_grad_norm_ bounds them."),
        (
            2.0,
            "The clip reduced the norm of this step to 2, which left almost nothing of the layers other than a.weight; on_spike=",
        ),
        (1e9, "The clip let it pass; a lower bound reduces such steps, and on_spike='skip' leaves such steps out."),
    ],
)
def test_a_spike_is_told_what_the_clip_made_of_it(clipped: float | None, words: str) -> None:
    advice = _spike(_run(clipped=clipped)).advice
    assert words in advice
    assert advice.startswith("Look at the batch of this step, and at monitor.why(60)")


def test_a_spike_of_a_run_directory_names_its_command() -> None:
    run = _run(together=True)
    run.place = "runs/first"
    assert _spike(run).advice.startswith(
        "Look at the batch and the loss of this step, and at 'gradmon why runs/first --step 60'; "
    )


def test_where_spikes_are_skipped_already_that_is_no_advice() -> None:
    run = _run(context=lambda step: {"skipped": "a spike", "in_a_row": 1} if step == 30 else {})
    assert "on_spike" not in _spike(run).advice


# --- the other rules -------------------------------------------------------------------------------------------------------------------


def _warmed(step: int) -> Mapping[str, Any]:
    return {"lr": [min(step + 1, 20) * 1e-3]}


def _rates(context: Context, **others: float) -> Finding:
    names = [*LAYERS, *others]
    update = {name: 0.1 * others.get(name, 0.3 if not others else 1e-3) for name in names}
    run = history(
        loss=lambda step: 8.0 if 2 < step < 9 else _flat(step),
        parameter=dict.fromkeys(names, 0.1),
        update=update,
        gradient_before_clip=dict.fromkeys(names, 1e-3),
        context=context,
    )
    return check_learning_rate(run)[0]


def test_a_warm_up_that_is_there_is_not_recommended() -> None:
    assert _rates(lambda step: {"lr": [1.0]}).advice.endswith("; add a warm-up.")
    assert _rates(_warmed).advice.endswith("; the warm-up of 19 steps is too short.")


def test_a_group_that_is_not_there_is_not_named() -> None:
    for rate, word in ((0.5, "Lower"), (1e-9, "Raise")):
        one, two = (_rates(lambda step, lr=lr: {"lr": lr}, **{"odd.weight": rate}).advice for lr in ([1e-3], [1e-3, 1e-4]))
        assert one.startswith(f"{word} the learning rate of this parameter, in a group of its own")
        assert two.startswith(f"{word} the learning rate of this parameter's group")


def _fading(kinds: Mapping[str, str], context: Context = lambda step: {}, first: float = 1e-9) -> str:
    rows = {name: 0.3 ** (8 - place) for place, name in enumerate(LAYERS)}
    fading = {name: (lambda step, rms=rms: rms if step else first * rms ** (1 - first)) for name, rms in rows.items()}
    run = history(loss=_flat, gradient_before_clip=fading, parameter=dict.fromkeys(LAYERS, 0.1), kinds=kinds, context=context)
    (finding,) = check_depth(run)
    assert finding.rule == "vanishing-gradients"
    return finding.advice


def test_activations_and_norms_that_are_there_are_not_recommended() -> None:
    everything = "Use ReLU or GELU in place of sigmoid or tanh, residual connections, a norm in each layer, or an initialisation"
    assert _fading({}).startswith(everything)
    assert _fading({"1": "Tanh"}).startswith(everything)
    assert _fading({"1": "GELU"}).startswith("Use residual connections, a norm in each layer, or an")
    assert _fading({"1": "GELU", "2": "LayerNorm"}) == "Use residual connections, or an initialisation that keeps the scale."
    assert "add a warm-up" in _fading({}, first=1.0)
    assert "the warm-up of 19 steps is too short" in _fading({}, _warmed, first=1.0)


@pytest.mark.parametrize("clips_already", [False, True])
def test_a_clip_that_is_there_is_not_recommended_against_explosions(clips_already: bool) -> None:
    values = {"grad_norm": lambda _: 1e4, **({"grad_norm_after_clip": lambda _: 1.0} if clips_already else {})}
    rows = dict.fromkeys(LAYERS, 100.0)
    (finding,) = check_depth(history(loss=_flat, gradient_before_clip=rows, parameter=dict.fromkeys(LAYERS, 0.1), values=values))
    assert finding.rule == "exploding-gradients"
    assert ("clip the gradient norm" in finding.advice) is not clips_already


def test_a_scaler_that_is_there_is_not_recommended() -> None:
    tiny = {"rms": 1e-8, "min": -(2.0**-24), "max": 2.0**-23, "zero_count": 0.9}
    for context, words in (
        (lambda _: {}, "Scale the loss with torch.amp.GradScaler"),
        (lambda _: {"amp_scale": 8.0}, "GradScaler's scale, 8 "),
    ):
        (finding,) = check_precision(history(gradient_before_clip={"a.weight": tiny}, context=context))
        assert words in finding.advice


def test_a_schedule_is_ended_only_where_it_raises_the_rate() -> None:
    def advice(rate: Callable[[int], float]) -> str:
        (finding,) = check_loss(
            history(loss=lambda step: 2.0 + step / 20 + 0.01 * _flat(step), context=lambda s: {"lr": [rate(s)]})
        )
        assert finding.rule == "loss-divergence"
        return finding.advice

    assert "schedule" not in advice(lambda step: 1e-3)
    assert "schedule" not in advice(lambda step: 1e-3 / (1 + step))
    assert "end the schedule that raises it" in advice(lambda step: 1e-5 * (1 + step))


@pytest.mark.parametrize("skips", [False, True])
def test_skipping_that_is_there_is_not_recommended(skips: bool) -> None:
    rows = {"a.weight": lambda step: {"rms": math.nan, "nonfinite_count": 3} if step == 50 else 1.0}
    context = (lambda step: {"skipped": "a spike"} if step == 30 else {}) if skips else lambda step: {}
    (finding,) = check_nonfinite(history(loss=_flat, gradient_before_clip=rows, context=context))
    assert ("on_spike='skip'" in finding.advice) is not skips


@pytest.mark.parametrize(
    ("after", "adaptive", "advice"),
    [
        (lambda _: 1.0, False, "Raise max_norm until a gradient of the median norm, 50, passes it"),
        (
            lambda step: 1.0 + step / 50,
            False,
            "If it is a clip of single parameters or elements, or one whose bound changes, raise that bound",
        ),
        (
            lambda step: 1.0 + step / 50,
            True,
            "Raise the limit of the adaptive clip until a gradient of the median norm, 50, passes it",
        ),
    ],
)
def test_the_bound_has_the_name_that_the_loop_gives_it(after: Callable[[int], float], adaptive: bool, advice: str) -> None:
    values = {"grad_norm": lambda _: 50.0, "grad_norm_after_clip": after, "clip_fraction": lambda _: 1.0}
    if adaptive:
        values["clip_limit"] = after
    (finding,) = check_clipping(history(loss=_flat, values=values))
    assert finding.advice.startswith(advice)
    assert ("bound" in finding.evidence) is ("max_norm" in advice)


def test_units_that_cannot_be_flat_are_not_taken_for_dead() -> None:
    zeros = {"0.weight": {"rms": 0.1, "zero_count": 0.8}, "0.bias": {"rms": 0.1, "zero_count": 0.8}}
    for kinds in ({}, {"1": "ReLU"}, {"1": "ReLU", "2": "GELU"}):
        (finding,) = check_units(history(loss=_flat, gradient_before_clip=zeros, kinds=kinds))
        assert "LeakyReLU or GELU" in finding.advice
    with pytest.raises(NotMeasured):
        check_units(history(loss=_flat, gradient_before_clip=zeros, kinds={"1": "GELU"}))


def test_what_is_there_is_told_from_records() -> None:
    bare = Precautions(history())
    names = ("clips", "bound", "adaptive", "scale", "warm_up", "raises", "groups", "skips")
    assert vars(bare) == dict(zip(names, (False, None, False, None, 0, False, 1, False), strict=True))
    values = {"grad_norm": lambda step: 3.0, "grad_norm_after_clip": lambda step: 0.5}
    run = Precautions(history(values=values, context=lambda step: {**_warmed(step), "amp_scale": 4.0, "skipped": "x"}))
    assert vars(run) == dict(zip(names, (True, 0.5, False, 4.0, 19, False, 1, True), strict=True))
    assert vars(Precautions(History([]))) == vars(bare)


@pytest.mark.parametrize(
    ("leapt", "words"), [(59, "; the learning rate was 0.3 in step 59, 300 times the usual"), (40, ""), (None, "")]
)
def test_a_learning_rate_that_leapt_before_a_spike_is_named(leapt: int | None, words: str) -> None:
    advice = _spike(_run(context=lambda step: {"lr": [0.3 if step == leapt else 0.001]})).advice
    assert ("the learning rate was" in advice) is bool(words)
    assert words in advice


# --- in the terms of a trainer ------------------------------------------------------------------------------------------------------


def _clipped(trainer: str) -> str:
    run = history(
        loss=lambda step: 2.0,
        values={"grad_norm": lambda step: 50.0, "grad_norm_after_clip": lambda step: 1.0, "clip_fraction": lambda step: 1.0},
    )
    told = History(run.records, trainer=trainer)
    (found,) = (each for each in diagnose_history(told).findings if each.rule == "always-clipped")
    return found.advice


@pytest.mark.parametrize(
    ("trainer", "bound"),
    [
        ("", "max_norm"),
        ("transformers", "max_grad_norm"),
        ("lightning", "gradient_clip_val of the Trainer"),
        ("accelerate", "max_norm"),
    ],
)
def test_a_remedy_names_the_arguments_of_the_trainer(trainer: str, bound: str) -> None:
    assert _clipped(trainer).startswith(f"Raise {bound} until")


def test_of_terms_that_overlap_the_longer_one_counts() -> None:
    told = advice_for("transformers").in_terms("Raise the learning rate of this group, and clip_grad_norm_ bounds them.")
    assert told == (
        "Give the Trainer optimizers=(optimizer, scheduler), with a higher learning rate for this group, and max_grad_norm bounds them."
    )
    assert advice_for("").in_terms(told) == told


def test_a_loss_function_of_the_trainer_divides_by_itself() -> None:
    with_function, without = (advice_for(name).remedies["loss-scale"] for name in (WITH_LOSS_FUNCTION, "transformers"))
    assert "reduction='sum' divided by num_items_in_batch" in with_function
    assert "model_accepts_loss_kwargs" not in with_function
    assert "model_accepts_loss_kwargs = False" in without
    assert advice_for(WITH_LOSS_FUNCTION).terms == advice_for("transformers").terms


def test_no_bound_is_recommended_where_no_norm_stands_out() -> None:
    norms = {"grad_norm": lambda step: 0.3, "grad_norm_after_clip": lambda step: 0.3, "clip_fraction": lambda step: 0.0}
    (found,) = (each for each in diagnose_history(history(values=norms)).findings if each.rule == "never-clipped")
    assert "median" not in found.advice
