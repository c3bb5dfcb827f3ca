"""The two stages of a gradient, before the clip and as the optimizer uses it, and what the loop makes of one on the way to the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.synthetic_run import history
from torch_gradmon import ModuleMonitor
from torch_gradmon.analysis.diagnosis.history import Precautions
from torch_gradmon.analysis.diagnosis.rules.depth import check_depth
from torch_gradmon.analysis.diagnosis.series import GradientEdit, Series
from torch_gradmon.core.errors import GradmonWarning

BAD = 12
Edit = Callable[[nn.Module, int], None]


def trained(
    edit: Edit, steps: int = 30, backward: Callable[[nn.Module, Tensor], None] | None = None
) -> tuple[ModuleMonitor, list[str]]:
    """A sound training with an edit of its gradients between backward and step; what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GradmonWarning)
        monitor = gradmon.watch(model, optimizer)
        for step in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().sum()
            if backward is None:
                loss.backward()
            else:
                backward(model, x)
            edit(model, step)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach() / 16)
    return monitor, [str(warning.message) for warning in said]


def _divide(model: nn.Module, by: float) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(by)


# --- NaN and Inf ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
def test_nan_made_after_backward_is_of_its_step(clips: bool) -> None:
    def edit(model: nn.Module, step: int) -> None:
        _divide(model, 0 if step == BAD else 16)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    monitor, said = trained(edit)
    (finding,) = [found for found in monitor.diagnose().findings if found.severity == "error"]
    assert (finding.rule, finding.where, finding.steps) == ("non-finite-gradient", "", (BAD, 29))
    assert "finite when backward() ended, and NaN or infinite when the optimizer used them" in finding.cause
    alarms = [text for text in said if "grad_norm" in text and "after the spike" not in text]
    assert len(alarms) == 1  # what follows is no other spike
    assert f"step {BAD}: grad_norm_after_clip is" in alarms[0]
    assert "the loop made those of all parameters NaN or infinite before the optimizer's step" in alarms[0]
    assert "all gradients were finite when backward() ended" in str(monitor.why(BAD))


def test_nan_made_in_one_gradient_after_backward_is_named() -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == BAD:
            model[2].weight.grad[0, 0] = torch.nan  # type: ignore[index]

    monitor, said = trained(edit)
    (finding,) = [found for found in monitor.diagnose().findings if found.severity == "error"]
    assert (finding.rule, finding.where, finding.steps[0]) == ("non-finite-gradient", "2.weight", BAD)
    assert f"step {BAD}: grad_norm_after_clip is nan" in said[0]
    assert "made that of 2.weight NaN" in said[0]


# --- gradients that the loop sets -------------------------------------------------------------------------------------------------


def _both_tasks(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of two tasks, each of a backward pass of its own; those of the second are left in place."""
    found = []
    for task in range(2):
        model.zero_grad()
        (model(x)[:, task] - x[:, task]).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def _set(model: nn.Module, x: Tensor, in_place: bool) -> None:
    whole, place = sum(_both_tasks(model, x)), 0
    for parameter in model.parameters():
        part = whole[place : place + parameter.numel()].view_as(parameter)  # type: ignore[index]
        place += parameter.numel()
        if in_place:
            parameter.grad.copy_(part)
        else:
            parameter.grad = part.clone()


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_set_by_hand_have_no_norm_of_the_last_pass(in_place: bool) -> None:
    used = []

    def edit(model: nn.Module, step: int) -> None:
        used.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())

    monitor, said = trained(edit, backward=lambda model, x: _set(model, x, in_place))
    values = monitor.get_step_metrics()
    assert "gradmon/grad_norm" not in values
    assert values["gradmon/grad_norm_after_clip"] == pytest.approx(used[-1], rel=1e-5)
    assert "the loop has set them itself" in monitor.missing()["gradmon/grad_norm"]
    assert any("monitor.monitor_gradients(before_clip=True)" in text for text in said)


def test_gradients_set_by_hand_are_measured_when_asked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer)
    for _ in range(5):
        _set(model, torch.randn(16, 8), in_place=False)
        monitor.monitor_gradients(before_clip=True)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-5)


def _norm(model: nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()


def _add_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.05)


@pytest.mark.filterwarnings("ignore:torch_gradmon. the spike detector of grad_norm has nothing to judge")
@pytest.mark.parametrize("sets", [False, True])
def test_a_closure_called_again_drops_no_gradients(sets: bool) -> None:
    """The optimizer has used them. What the closure does to its own gradients is judged as in any loop."""
    torch.manual_seed(0)
    model, norms = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = gradmon.watch(model, optimizer)
    for _ in range(4):
        x = torch.randn(16, 8)

        def closure(x: Tensor = x) -> Tensor:
            if sets:
                _set(model, x, in_place=True)
            else:
                model.zero_grad()
                (model(x) - x[:, :2]).square().mean().backward()
                norms.append(_norm(model))
                _add_noise(model)
            return (model(x) - x[:, :2]).square().mean().detach()

        optimizer.step(closure)
        values = monitor.get_step_metrics()
        if sets:
            assert "the loop has set them itself" in monitor.missing()["gradmon/grad_norm"]
        else:
            assert values["gradmon/grad_norm"] == pytest.approx(norms[-1], rel=1e-6)


def test_noise_after_a_dropped_batch_is_no_gradient_set_by_hand() -> None:
    norms: list[float] = []

    def backward(model: nn.Module, x: Tensor) -> None:
        for _ in range(2 if len(norms) in (5, 9) else 1):  # the first batch is thrown away
            model.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
        norms.append(_norm(model))

    monitor, _ = trained(lambda model, step: _add_noise(model), steps=12, backward=backward)
    found = [values["gradmon/grad_norm"] for values in monitor.get_all_metrics().values()]
    assert found == pytest.approx(norms, rel=1e-6)


@pytest.mark.filterwarnings("ignore:torch_gradmon. the spike detector of grad_norm has nothing to judge")
@pytest.mark.parametrize("sets", [False, True])
def test_a_turn_of_another_optimizer_drops_no_gradients(sets: bool) -> None:
    """Noise on the gradients of the second turn; ``sets``: that turn has two passes, and uses their sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    players = [torch.optim.SGD(model[place].parameters(), 1e-2) for place in (0, 2)]
    monitor = gradmon.watch(model, *players)
    for _ in range(4):
        found = []
        for turn, player in enumerate(players):
            x = torch.randn(16, 8)
            if sets and turn:
                _set(model, x, in_place=True)
            else:
                model.zero_grad()
                (model(x) - x[:, :2]).square().mean().backward()
                found += [p.grad.flatten().double() for p in model[2 * turn].parameters()]
                _add_noise(model)
            player.step()
        values = monitor.get_step_metrics()
        if sets:
            assert "the loop has set them itself" in monitor.missing()["gradmon/grad_norm"]
        else:
            assert values["gradmon/grad_norm"] == pytest.approx(torch.cat(found).norm().item(), rel=1e-6)


def _new_tensors(model: nn.Module, step: int) -> None:
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * min(1.0, 0.5 / norm.item())


def _new_elements(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clamp(-0.1, 0.1)


def _new_multiples(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 3


@pytest.mark.parametrize("edit", [_new_tensors, _new_elements, _new_multiples])
def test_clips_and_multiples_in_new_tensors_keep_the_norm_before(edit: Edit) -> None:
    norms: list[float] = []

    def measured(model: nn.Module, step: int) -> None:
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item())
        edit(model, step)

    monitor, _ = trained(measured)
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norms[-1], rel=1e-5)


def test_a_pass_that_was_dropped_leaves_the_norm_of_the_last_one() -> None:
    """As with sharpness-aware minimisation: the optimizer uses the gradient of the second pass."""
    norms: list[float] = []

    def edit(model: nn.Module, step: int) -> None:
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    monitor, _ = trained(edit, backward=lambda model, x: _both_tasks(model, x) and None)
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norms[-1], rel=1e-5)


# --- scalings and clips -------------------------------------------------------------------------------------------------------------


def _norms(count: int = 40) -> list[float]:
    return [100.0 + 7 * (step % 11) + step for step in range(count)]


def _edit(after: Callable[[int, float], float]) -> GradientEdit:
    norms, steps = _norms(), tuple(range(40))
    used = [after(step, norm) for step, norm in enumerate(norms)]
    return GradientEdit.of(Series(steps, tuple(norms)), Series(steps, tuple(used)), None)


def test_a_common_factor_is_a_scaling_and_a_common_norm_a_clip() -> None:
    assert _edit(lambda _, norm: norm) == GradientEdit()
    assert _edit(lambda _, norm: min(norm, 120.0)) == GradientEdit(120.0)
    assert _edit(lambda _, norm: 0.5) == GradientEdit(0.5, dict.fromkeys(range(40), 1.0))
    divided = _edit(lambda _, norm: norm / 64)
    assert (divided.bound, set(divided.scales.values())) == (None, {1 / 64})
    both = _edit(lambda _, norm: min(norm / 64, 2.0))
    assert both.bound == 2.0
    assert both.scales[39] == pytest.approx(1 / 64)
    tokens = _edit(lambda step, norm: norm / (50 + 3 * step))
    assert (tokens.bound, tokens.scales[10]) == (None, pytest.approx(1 / 80))
    bounded = _edit(lambda step, norm: min(norm / (50 + 3 * step), 1.5))
    assert bounded.bound == 1.5


@pytest.mark.parametrize("by", [lambda step: 512.0, lambda step: 400.0 + step], ids=["constant", "tokens"])
def test_a_summed_loss_that_is_divided_later_does_not_explode(by: Callable[[int], float]) -> None:
    wave = lambda step: 60.0 + step % 7  # noqa: E731
    before = {"a.weight": wave, "b.weight": wave}
    after = {name: lambda step: wave(step) / by(step) for name in before}
    values = {"grad_norm": lambda step: 20 * wave(step), "grad_norm_after_clip": lambda step: 20 * wave(step) / by(step)}
    run = history(
        loss=lambda _: 1.0, values=values, gradient_before_clip=before, gradient=after, parameter=dict.fromkeys(before, 0.1)
    )
    assert check_depth(run) == []
    alone = history(loss=lambda _: 1.0, gradient_before_clip=before, parameter=dict.fromkeys(before, 0.1))
    assert [found.rule for found in check_depth(alone)] == ["exploding-gradients"]


@pytest.mark.parametrize("touch", ["infinite", "one"])
def test_what_never_clips_is_not_advised_to_clip_less(touch: str) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if touch == "infinite":
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        else:
            _divide(model, 1)

    monitor, _ = trained(edit, steps=60)
    (finding,) = [found for found in monitor.diagnose().findings if found.rule == "never-clipped"]
    assert finding.severity == "info"
    assert "Nothing has to be done" in finding.advice
    assert "ower" not in finding.advice


def test_an_edit_that_reduces_nothing_is_no_clip() -> None:
    values = {"grad_norm": lambda step: 1.0 + step % 5, "grad_norm_after_clip": lambda step: 1.0 + step % 5}
    assert not Precautions(history(values={**values, "clip_fraction": lambda _: 0.0})).clips
    clipped = {**values, "grad_norm_after_clip": lambda step: min(1.0 + step % 5, 3.0), "clip_fraction": lambda _: 0.4}
    assert (Precautions(history(values=clipped)).clips, Precautions(history(values=clipped)).bound) == (True, 3.0)
