"""The share of clipped steps: clips by norm and by value count, a scaling by one factor does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.step.summary import WINDOW, ClipWindow

Edit = Callable[[Sequence[nn.Parameter], int], object]


def _scaled(factor: float) -> Edit:
    def edit(parameters: Sequence[nn.Parameter], step: int) -> None:
        for p in parameters:
            p.grad.mul_(factor)

    return edit


def _clipped(limit: float) -> Edit:
    return lambda parameters, step: torch.nn.utils.clip_grad_norm_(parameters, limit)


def _run(
    *edits: Edit, steps: int = 12, dtype: torch.dtype = torch.float32
) -> tuple[list[dict[str, float]], list[dict[str, str]], list[float]]:
    """Values and reasons of each step, and the norms before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    values, reasons, norms = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 4).to(dtype)) - 1).square().mean().backward()
        norms.append(float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()))
        for edit in edits:
            edit(list(model.parameters()), step)
        optimizer.step()
        values.append(monitor.get_step_metrics())
        reasons.append(monitor.missing())
    monitor.detach()
    return values, reasons, norms


@pytest.mark.parametrize("factor", [1 / 2, 1 / 3, 1 / 8])
def test_a_division_is_no_clip_from_the_first_step_on(factor: float) -> None:
    values, reasons, norms = _run(_scaled(factor))
    for value, reason, norm in zip(values, reasons, norms, strict=True):
        assert "gradmon/clip_fraction" not in value
        assert f"multiplied by {factor:.4g} after backward" in reason["gradmon/clip_fraction"]
        assert value["gradmon/grad_norm_after_clip"] == pytest.approx(norm * factor, rel=1e-6)


def test_any_factor_is_known_from_the_second_step_on() -> None:
    values, reasons, _ = _run(_scaled(0.7))
    assert [step for step, value in enumerate(values) if "gradmon/clip_fraction" in value] == [0]
    assert "multiplied by 0.7 after backward" in reasons[-1]["gradmon/clip_fraction"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_is_known_by_gradients_that_it_rounds(dtype: torch.dtype) -> None:
    values, reasons, _ = _run(_scaled(1 / 3), steps=40, dtype=dtype)
    assert all("gradmon/clip_fraction" not in value for value in values[3:])
    assert "multiplied by 0.33" in reasons[-1]["gradmon/clip_fraction"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [1e-3, 0.3])
def test_a_clip_of_gradients_that_it_rounds_counts(dtype: torch.dtype, limit: float) -> None:
    values, _, norms = _run(_clipped(limit), steps=100, dtype=dtype)
    clipped = [norm > limit for norm in norms]
    assert values[-1]["gradmon/clip_fraction"] == sum(clipped) / len(values) > 0.1


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1.0, 1e3])
@pytest.mark.parametrize("factor", [None, 1 / 4, 0.7])
def test_clips_are_counted_also_beside_a_scaling(limit: float, factor: float | None) -> None:
    edits = [_clipped(limit)] if factor is None else [_scaled(factor), _clipped(limit)]
    values, _, norms = _run(*edits)
    clipped = [norm * (factor or 1) > limit for norm in norms]
    for step in range(3, len(values)):
        if factor and step + 1 - sum(clipped[: step + 1]) == 1:
            continue  # one step alone that is only scaled looks like one that is clipped
        expected = None if factor and not any(clipped[: step + 1]) else sum(clipped[: step + 1]) / (step + 1)
        assert values[step].get("gradmon/clip_fraction") == expected, step


def test_a_clip_by_value_counts() -> None:
    values, _, _ = _run(lambda parameters, step: torch.nn.utils.clip_grad_value_(parameters, 1e-3))
    assert [value["gradmon/clip_fraction"] for value in values] == [1.0] * len(values)


@pytest.mark.parametrize("clamps", [False, True])
def test_a_clamp_of_narrow_gradients_shows_when_unscaled(clamps: bool) -> None:
    """Through ``.data`` it moves no version counter, nor does what unscales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=3.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale((model(torch.randn(8, 4).bfloat16()) - 1).square().mean()).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            if clamps:
                parameter.grad.data.clamp_(-0.01, 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert monitor.get_step_metrics().get("gradmon/clip_fraction") == (1.0 if clamps else None)
    assert clamps or "nothing clipped in 6 steps" in monitor.missing()["gradmon/clip_fraction"]


def test_after_a_closure_that_raised_the_clip_is_unknown() -> None:
    model, is_failing = nn.Linear(4, 1), False
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if is_failing:
            raise RuntimeError
        return loss

    optimizer.step(closure)
    is_failing = True
    with pytest.raises(RuntimeError):
        optimizer.step(closure)
    is_failing = False
    model(torch.randn(8, 4))
    monitor.detach()
    for name in ("grad_norm_after_clip", "clip_fraction"):
        assert monitor.missing()[f"gradmon/{name}"].startswith("the step was not applied: ")


def test_one_batch_over_and_over_is_clipped_by_one_factor() -> None:
    """Where norms are equal a clip has one factor, too."""
    window = ClipWindow()
    for _ in range(20):
        window.add(True, 3.0, 1.4)
    assert window.share() == (1.0, None)


@pytest.mark.parametrize("rounding", [0.0, 2.0**-8])
def test_norms_clipped_to_one_limit_are_never_taken_for_scaled_ones(rounding: float) -> None:
    for seed in range(200):
        random.seed(seed)
        window, limit = ClipWindow(), random.uniform(0.1, 3)
        for _ in range(WINDOW):
            norm = random.lognormvariate(1, random.choice([1e-7, 1e-5, 1e-3, 0.1, 1]))
            factor = min(1, limit / (norm + 1e-6))
            window.add(True, norm, norm * (factor if factor == 1 else factor * (1 - random.random() * rounding)), rounding)
        share, factor = window.share()
        assert factor is None
        assert share is not None
        assert share == sum(s.factor < 1 - 1e-5 for s in window._steps) / WINDOW


@pytest.mark.parametrize("rounding", [0.0, 2.0**-8])
def test_factors_of_a_run_are_found_wherever_they_lie(rounding: float) -> None:
    """A window has a scaling by one factor among clips of all factors, as few or as many."""
    for seed in range(100):
        random.seed(seed)
        window, scaled = ClipWindow(), random.randint(10, WINDOW)
        kinds = [True] * scaled + [False] * (WINDOW - scaled)
        random.shuffle(kinds)
        for number, is_scaled in enumerate(kinds):
            window.add(True, 1.0 + number, (1.0 + number) * (0.5 if is_scaled else 0.1 + 0.003 * number), rounding)
        share, factor = window.share()
        if scaled == WINDOW:
            assert (share, factor) == (None, 0.5)
        else:
            assert share == (WINDOW - scaled) / WINDOW


def test_a_state_goes_on() -> None:
    one, other = ClipWindow(), ClipWindow()
    for norm in (1.0, 2.0, 3.0):
        one.add(True, norm, norm / 2)
    other.load(one.state())
    assert other.share() == one.share() == (None, 0.5)
    assert other.state() == one.state()


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (float("inf"), 1.0), (float("nan"), float("nan"))])
def test_norms_that_tell_nothing_are_no_clip(before: float, after: float) -> None:
    window = ClipWindow()
    window.add(True, before, after)
    assert window.share() == (0.0, None)
