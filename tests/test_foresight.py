"""Signs of a divergence before the loss shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon
from examples.plugins.foresight import AcceleratedGrowth, Foresight, Growth, RecordHigh, _WarmUp, steps_until
from examples.plugins.headroom import Headroom
from tests.ranks import on_ranks
from torch_gradmon.analysis.diagnosis.rules.unused_parameters import _has_risen
from torch_gradmon.analysis.diagnosis.series import Series

pytestmark = pytest.mark.thorough

STEPS, CHANGE = 320, 200


def logs_of(seed: int = 0, steps: int = 400) -> Tensor:
    """Logarithms of two quantities that wander, ``[steps, 2]``."""
    return torch.randn(steps, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).cumsum(0)


@pytest.mark.parametrize("every", [1, 5])
def test_accelerated_growth_by_its_definition(every: int) -> None:
    logs, watch, names = logs_of(), AcceleratedGrowth(over=20, past=120), ("a", "b")
    compared = 0
    for step in range(0, 400, every):
        found = watch.update(step, names, logs[step])
        rates = {t: logs[t] - logs[t - 20] for t in range(20, step + 1, every)}
        past = [rate for t, rate in rates.items() if step - 140 <= t <= step - 20]
        if not past:
            assert found is None
            continue
        excess = [float(rates[step][i]) - max(0.0, *(float(rate[i]) for rate in past)) for i in range(2)]
        assert isinstance(found, Growth)
        assert found.excess == pytest.approx(max(excess))
        assert found.name == names[excess.index(max(excess))]
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("every", [1, 5])
def test_a_record_high_by_its_definition(every: int) -> None:
    logs, watch, names = logs_of(1), RecordHigh(values=5, gap=20, past=120), ("a", "b")
    medians: dict[int, Tensor] = {}
    compared = 0
    for step in range(0, 400, every):
        found = watch.update(step, names, logs[step])
        if step >= 4 * every:
            medians[step] = logs[step - 4 * every : step + 1 : every].median(0).values
        past = [m for t, m in medians.items() if step - 140 <= t <= step - 20]
        if not past:
            assert found is None
            continue
        highest = torch.stack(past).amax(0)
        assert found is not None
        assert found.excess == pytest.approx(float((medians[step] - highest).max()))
        compared += 1
    assert compared > 60


def test_a_tensor_that_is_new_begins_a_new_past() -> None:
    watch = AcceleratedGrowth(over=2, past=4)
    for step in range(10):
        assert (watch.update(step, ("a",), torch.full((1,), 0.1 * step)) is not None) == (step >= 4)
    assert watch.update(10, ("a", "b"), torch.zeros(2)) is None
    assert watch.update(3, ("a", "b"), torch.zeros(2)) is None  # the run went back


def test_what_rested_is_left_out() -> None:
    watch = AcceleratedGrowth(over=2, past=4)
    for step in range(30):
        moving, unfrozen = 0.01 * step, 0.0 if step < 15 else 0.5 * (step - 14)
        found = watch.update(step, ("moving", "unfrozen"), torch.tensor([moving, unfrozen], dtype=torch.float64))
        assert found is None or found.name == "moving" or step > 20
        assert found is None or found.excess < 1e-9


def test_what_is_not_finite_is_no_growth() -> None:
    watch = AcceleratedGrowth(over=1, past=4)
    for step, value in enumerate([-math.inf, -math.inf, 0.0, 0.0, math.nan, math.inf, 0.0]):
        assert watch.update(step, ("a",), torch.tensor([value], dtype=torch.float64)) in (None, ("a", 0.0, 0.0))


@pytest.mark.parametrize("seed", range(5))
def test_a_trend_reaches_its_level(seed: int) -> None:
    noise = 0.02 * torch.randn(8, generator=torch.Generator().manual_seed(seed))
    values = [0.2 * math.exp(0.01 * 50 * i + float(noise[i])) for i in range(8)]
    expected = (math.log(1.0) - math.log(0.2)) / 0.01 - 350
    assert steps_until([50 * i for i in range(8)], values, 1.0) == pytest.approx(max(expected, 0), abs=6)


def test_no_trend_without_a_rise() -> None:
    assert steps_until(range(8), [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5], 2.0) is None
    assert steps_until(range(4), [1.0, 2.0, 3.0, 4.0], 9.0) is None
    assert steps_until(range(6), [math.nan, 0.0, -1.0, 1.0, 2.0, 3.0], 9.0) is None


def train(
    rate: Callable[[int], float] = lambda step: 1.0,
    louder: Callable[[int], float] = lambda step: 1.0,
    steps: int = STEPS,
    watched: bool = True,
    every: int = 5,
    add: Callable[[gradmon.ModuleMonitor], None] = lambda monitor: None,
    **options: Any,
) -> tuple[nn.Module, Foresight, gradmon.ModuleMonitor | None, list[float]]:
    """A small classifier under SGD, whose learning rate and inputs can change on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    foresight, losses = Foresight(every), list[float]()
    monitor = gradmon.watch(model, optimizer, plugins=[foresight], **options) if watched else None
    if monitor is not None:
        add(monitor)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(64, 8, generator=generator)
        y = x[:, :4].argmax(1)
        loss = F.cross_entropy(model(louder(step) * x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if monitor is not None:
            monitor.log_scalar("loss", losses[-1])
    if monitor is not None:
        monitor.detach()
    return model, foresight, monitor, losses


def rising(step: int) -> float:
    """Three percent a step from a point on."""
    return 1.03 ** max(0, step - CHANGE)


def test_a_rate_that_rises_is_seen_before_the_loss_does() -> None:
    with pytest.warns(gradmon.GradmonWarning, match=r"a divergence may be near: .*weight leads \(growth in 20 steps") as caught:
        _, foresight, _, losses = train(rising, on_spike=None)
    assert len([w for w in caught if "near" in str(w.message)]) == 1
    first, name = foresight.signs[0]
    normal = max(losses[100:CHANGE])
    leaves = next(step for step in range(CHANGE, STEPS) if min(losses[step : step + 10]) > normal)
    assert CHANGE < first <= leaves - 10
    assert name.endswith("weight")


def test_a_sound_training_has_no_sign() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (lambda step: 1.0, lambda step: max(0.0, 1 - step / STEPS), lambda step: min(1.0, step / 150)):
            assert not train(rate)[1].signs


def test_outputs_that_grow_are_a_sign() -> None:
    with pytest.warns(gradmon.GradmonWarning, match=r"\[root module\] leads \(growth over its highest"):
        _, foresight, _, _ = train(lambda step: 1e-3 if step > CHANGE else 1.0, lambda step: 1.02 ** max(0, step - CHANGE))
    assert foresight.signs[0][1] == "[root module]"


def test_the_finding_tells_the_layer_the_step_and_what_to_do(tmp_path: Path) -> None:
    with pytest.warns(gradmon.GradmonWarning):
        _, foresight, monitor, _ = train(rising, steps=CHANGE + 75, run_dir=tmp_path, on_spike=None)
    assert monitor is not None
    for diagnosis in (monitor.diagnose(), gradmon.load_run(tmp_path).diagnose()):
        finding = next(each for each in diagnosis.findings if each.rule == "about-to-diverge")
        assert finding.severity == "warning"
        assert finding.steps == (foresight.signs[0][0], foresight.signs[-1][0])
        assert finding.where == foresight.signs[0][1]
        assert finding.evidence["signs"] == len(foresight.signs)
        assert "Lower the learning rate" in finding.advice


def test_a_sign_that_passes_is_information() -> None:
    def bump(step: int) -> float:
        return 8.0 if CHANGE <= step < CHANGE + 12 else 0.2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, foresight, monitor, _ = train(bump, steps=CHANGE + 240)
    assert monitor is not None
    assert foresight.signs
    finding = next(each for each in monitor.diagnose().findings if each.rule == "about-to-diverge")
    assert finding.severity == "info"
    assert "has stayed normal" in finding.cause


def test_the_warm_up_is_no_sign() -> None:
    def slow(step: int) -> float:
        return 1.015 ** min(step, 280) / 8

    assert not train(slow, steps=300)[1].signs


def test_the_training_keeps_its_bits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched, foresight, _, _ = train(rising)
    alone = train(rising, watched=False)[0]
    assert foresight.signs
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in watched.state_dict().items())


def test_only_its_steps_are_measured() -> None:
    _, _, monitor, _ = train(steps=41, every=10, preset="minimal")
    assert monitor is not None
    records = [record for record in monitor._runtime.pipeline.history.sampled() if "parameter" in record.tables]
    assert [record.step for record in records] == [0, 10, 20, 30, 40]
    assert all(record.tables["activation"].names == ("[root module]",) for record in records)


def test_head_room_is_part_of_what_it_says() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, 8), nn.Linear(8, 4)
    headroom = Headroom(lambda: F.cross_entropy(model(x), x[:, :4].argmax(1)), every=20)
    with pytest.warns(gradmon.GradmonWarning, match="learning rate over the critical one"):
        foresight = Foresight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        monitor = gradmon.watch(model, optimizer, plugins=[headroom, foresight])
        for step in range(300):
            optimizer.param_groups[0]["lr"] = 0.05 * 1.05 ** max(0, step - CHANGE)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        monitor.get_step_metrics()
    monitor.detach()


@pytest.mark.parametrize("by_stairs", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_warm_up_ends_when_no_rate_is_new_for_a_hundred_steps(by_stairs: bool, groups: int) -> None:
    warm_up = _WarmUp()
    over = []
    for step in range(500):
        rate = min(step // 50 * 50 if by_stairs else step, 200) / 200
        warm_up.update(step, [1.0, rate][2 - groups :] if groups == 2 else [rate])
        over.append(warm_up.is_over)
    assert over.index(True) == 300


def test_a_metric_of_the_script_with_the_same_name_leaves_it_the_rest() -> None:
    def add(monitor: gradmon.ModuleMonitor) -> None:
        monitor.add_parameter_metric("norm", metric_regex="^4", every=50)
        monitor.add_activation_metric("rms", metric_regex="^0$")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(rising, add=add)[1].signs == train(rising)[1].signs


def test_attaching_again_begins_a_new_past() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(64, 8)
    optimizer, foresight = torch.optim.SGD(model.parameters(), lr=0.05), Foresight()
    for factor in (1.0, 50.0):
        monitor = gradmon.watch(model, optimizer, plugins=[foresight])
        with torch.no_grad():
            model.weight *= factor
        for _ in range(170):
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        monitor.get_step_metrics()
        monitor.detach()
    assert not foresight.signs


def test_a_rewind_forgets_signs_of_the_other_branch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, foresight, _, _ = train(rising)
    assert foresight.state_dict() is not None
    foresight.context = type("Context", (), {"annotate_run": staticmethod(lambda **facts: None)})()  # type: ignore[assignment]
    kept = foresight.state_dict()
    foresight.on_rewind(100)
    assert foresight.state_dict() is None
    foresight.load_state_dict(kept)
    assert foresight.state_dict() == kept


@pytest.mark.parametrize("shift", [0.0, -5.0, 1000.0])
def test_the_loss_has_risen_by_its_own_normal(shift: float) -> None:
    noise = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.02
    for rise in (0.0, 1.0):
        values = [shift + 0.5 + float(noise[step]) + rise * (step > 250) for step in range(300)]
        assert _has_risen(Series.of(enumerate(values)), 240) == (rise > 0)
    assert not _has_risen(Series(), 240)


@pytest.mark.parametrize("every", [0, 11, -1])
def test_bad_arguments(every: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 10.*{every}"):
        Foresight(every)


def of_two_ranks(rank: int) -> list[tuple[int, str]]:
    """The signs that a rank sees, of a model that is sharded over both."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    foresight = Foresight()
    monitor = gradmon.watch(model, optimizer, plugins=[foresight])
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(260):
            optimizer.param_groups[0]["lr"] = 0.05 * 1.05 ** max(0, step - CHANGE)
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        monitor.get_step_metrics()
    monitor.detach()
    return list(foresight.signs)


@pytest.mark.ranks
def test_ranks_see_the_same_weights() -> None:
    first, second = on_ranks(2, of_two_ranks)
    weights = [[sign for sign in signs if sign[1].endswith("weight")] for signs in (first, second)]
    assert weights[0]
    assert weights[0] == weights[1]
