"""Loops whose optimizer is not the one that is attached: it is said within ten steps, and no value is stale."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

from . import wrapping
from .loops import differences

RULE = "unattached-optimizer"
Update = Callable[[], object]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def whole(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def parts(model: nn.Module, x: Tensor) -> Tensor:
    return model[2](model[1](model[0](x)))


def train(model: nn.Module, update: Update, step: int, call: Any = whole, micro_batches: int = 1) -> None:
    model.zero_grad()
    for _ in range(micro_batches):
        call(model, batch(step)).square().mean().backward()
    update()


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data -= 0.1 * p.grad.data


def fused(model: nn.Module) -> Update:
    return Adam(model.parameters(), lr=0.01, fused=True).step


#: What trains the model in place of the attached optimizer.
OTHERS: dict[str, Callable[[nn.Module], Update]] = {
    "another optimizer": lambda model: SGD(model.parameters(), lr=0.1).step,
    "a fused one": fused,
    "updates by hand": lambda model: lambda: by_hand(model),
    "updates by .data": lambda model: lambda: by_data(model),
}


def check_said(monitor: ModuleMonitor, last: int | None) -> None:
    """That nothing is known any more is said everywhere, and nothing old is given for new."""
    assert monitor.get_step_metrics() == {}
    record = monitor.last_record
    assert (record is None) == (last is None)
    assert record is None or (record.top_gradients(), record.spikes, record.step) == ([], (), last)
    reasons = monitor.missing()
    assert {"gradmon/grad_norm", "gradient/0.weight/norm", "gradmon/param_norm"} <= reasons.keys()
    assert all("monitor.attach()" in reason for reason in reasons.values())
    (finding,) = [finding for finding in monitor.diagnose().findings if finding.rule == RULE]
    assert finding.severity == "error"
    assert "monitor.attach()" in finding.advice


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("call", [whole, parts])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("before", [0, 3])
def test_it_is_said_within_ten_steps(before: int, other: str, call: Any, every: int) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # which holds the old optimizer
    monitor = gradmon.watch(model, optimizer, every=every, on_spike=None)
    monitor.add_gradient_metric("norm")
    for step in range(before):
        train(model, optimizer.step, step, call)
        scheduler.step()
    update = OTHERS[other](model)
    with pytest.warns(GradmonWarning, match="does not step") as caught:
        for step in range(before, before + 10):
            train(model, update, step, call)
            if step > before:
                assert monitor.get_step_metrics() == {}
    assert len(caught) == 1
    check_said(monitor, before - 1 if before else None)
    monitor.detach()
    # what is remembered is what was recorded
    assert list(monitor.get_all_metrics()) == list(range(before))[::every]
    assert monitor.get_step_counts().attempted == before


def test_the_remedy_helps_and_steps_go_on(tmp_path: Path) -> None:
    model = net()
    old = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, old, run_dir=tmp_path, on_spike=None)
    for step in range(3):
        train(model, old.step, step)
    new = Adam(model.parameters(), lr=0.01)
    with pytest.warns(GradmonWarning, match=r"monitor\.attach"):
        for step in range(3, 13):
            train(model, new.step, step)
    assert [f.rule for f in gradmon.load_run(tmp_path).diagnose().findings if f.severity == "error"] == [RULE]
    monitor.detach()
    monitor.attach(new)
    for step in range(3, 6):
        train(model, new.step, step)
        expected = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)
        assert monitor.last_record.step == step
    assert RULE not in [finding.rule for finding in monitor.diagnose().findings]
    monitor.detach()
    assert gradmon.load_run(tmp_path).steps == list(range(6))


def test_after_a_long_clean_run_that_is_looked_at_now_and_then_only() -> None:
    model = net()
    old = SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, old, every=10**6, on_spike=None)
    for step in range(310):
        train(model, old.step, step)
    assert monitor._runtime.built_in.audit._rest.is_on
    new = SGD(model.parameters(), lr=1e-4)
    with pytest.warns(GradmonWarning, match="does not step"):
        for step in range(10):
            train(model, new.step, step)


def test_an_optimizer_made_anew_in_each_epoch() -> None:
    model = net()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_gradient_metric("norm")
    train(model, optimizer.step, 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(GradmonWarning, match="optimizers are gone"):
        train(model, optimizer.step, 1)
    check_said(monitor, 0)


def test_one_of_two_that_was_replaced() -> None:
    model = net()
    first, last = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    monitor = gradmon.watch(model, first, last, on_spike=None)
    monitor.add_gradient_metric("norm")
    for step in range(3):
        train(model, lambda: [first.step(), last.step()], step)
    new = SGD(model[2].parameters(), lr=0.1)
    with pytest.warns(GradmonWarning, match="does not step"):
        for step in range(3, 13):
            train(model, lambda: [first.step(), new.step()], step)
    check_said(monitor, 2)


def test_a_probe_that_is_never_used_hides_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.used = nn.Parameter(torch.zeros(1)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    model = Net()
    old, new = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    gradmon.watch(model, old, on_spike=None)
    with pytest.warns(GradmonWarning, match="does not step"):
        for step in range(10):
            train(model, new.step, step)


# --- loops that are right -----------------------------------------------------------------------------------------------------------


def _accumulation(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    train(model, optimizer.step, step, micro_batches=40)


def _longer_and_longer(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    train(model, optimizer.step, step, micro_batches=1 + 8 * step)


def _clamped(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    train(model, optimizer.step, step, micro_batches=3)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)


def _clamped_within(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model.zero_grad()
    for _ in range(12):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-9, 9)  # which writes, and changes nothing
        model(batch(step)).square().mean().backward()
    optimizer.step()


def _gradients_alone(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for _ in range(12):  # as for a saliency map
        model.zero_grad()
        model(batch(step)).square().mean().backward()
    optimizer.step()


def _inner_steps(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """As in first-order meta-learning: a few steps of an optimizer of its own, and one of the attached one from where they began."""
    before = [p.detach().clone() for p in model.parameters()]
    inner = SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        train(model, inner.step, step)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    optimizer.step()


def _perturbed(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model.zero_grad()
    for sign in (1, -1, -1, 1):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(sign * 0.01)
        model(batch(step)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "body",
    [_accumulation, _longer_and_longer, _clamped, _clamped_within, _gradients_alone, _inner_steps, _perturbed],
)
def test_a_loop_that_is_right_hears_nothing(body: Callable[[nn.Module, Optimizer, int], None]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            body(model, optimizer, step)
            assert monitor.get_step_metrics().keys() >= {"gradmon/param_norm"}
            assert monitor.last_record.step == step
    assert RULE not in [fact.rule for fact in monitor._runtime.built_in.audit.facts()]
    monitor.detach()


def test_values_of_the_last_step_stay_while_a_batch_is_dropped() -> None:
    """Its gradients are gone, and nothing has changed the parameters."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    before = monitor.get_step_metrics()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.zero_grad()
    assert before
    assert monitor.get_step_metrics() == before
    assert not any("have changed" in reason for reason in monitor.missing().values())
    monitor.detach()


def test_the_player_that_waits_for_its_turn_is_not_taken_for_unattached() -> None:
    players = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    optimizers = [SGD(player.parameters(), lr=0.1) for player in players]
    monitor = gradmon.watch(players, *optimizers, on_spike=None)
    players[0](torch.randn(4, 3)).sum().backward()
    assert monitor.missing() == {}
    for optimizer in optimizers:
        optimizer.step()
    monitor.detach()


def test_two_optimizers_of_the_same_parameters_of_which_one_rests() -> None:
    model = net()
    warm, main = Adam(model.parameters(), lr=0.01), SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, main, warm, on_spike=None)
    for step in range(30):
        train(model, (warm if step < 20 else main).step, step)
    assert RULE not in [fact.rule for fact in monitor._runtime.built_in.audit.facts()]
    assert f"audit:{RULE}" not in monitor.warning_counts()


def test_a_game_of_two_of_which_one_is_watched() -> None:
    generator, judge = nn.Linear(3, 4), nn.Linear(4, 1)
    mine, other = SGD(generator.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    monitor = gradmon.watch(generator, mine, on_spike=None)
    for _ in range(3):
        for _ in range(12):
            judge.zero_grad()
            judge(generator(torch.randn(5, 3))).mean().backward()  # also through the generator
            other.step()
        generator.zero_grad()
        judge(generator(torch.randn(5, 3))).mean().backward()
        mine.step()
    assert monitor._runtime.built_in.audit.facts() == []
    assert monitor.warning_counts() == {}


def test_nothing_is_compared_within_the_usual_count_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_gradmon.plugins import loop_checks

    looks: list[int] = []
    monkeypatch.setattr(loop_checks._Sample, "_now", lambda sample: looks.append(1))
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    gradmon.watch(model, optimizer, on_spike=None)
    train(model, optimizer.step, 0)
    assert not looks
    train(model, optimizer.step, 1, micro_batches=4)
    first = len(looks)
    assert first > 0
    for step in range(20):
        train(model, optimizer.step, step, micro_batches=4 - step % 2)
    assert len(looks) == first


def test_what_is_no_optimizer_of_torch_and_wraps_none_is_refused_with_the_remedy() -> None:
    class Own:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

        def step(self) -> None:
            pass

    model = net()
    with pytest.raises(TypeError, match=r"begin_step\(\) and end_step\(\)"):
        gradmon.watch(model, Own(model.parameters()))


@pytest.mark.parametrize("other", OTHERS)
def test_training_is_the_same_with_and_without_the_monitor(other: str) -> None:
    found = []
    for watches in (False, True):
        model = net()
        attached = wrapping.SAM(model.parameters(), SGD, lr=0.1)
        if watches:
            monitor = gradmon.watch(model, attached, preset="full", on_spike=None)
        update = OTHERS[other](model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradmonWarning)
            for step in range(9):
                train(model, update, step)
            if watches:
                monitor.detach()
        found.append((dict(model.named_parameters()), torch.get_rng_state()))
    assert differences(*found) == []
