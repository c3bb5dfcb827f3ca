"""Where a skip is easily not what it says: odd buffers, odd optimizers, interleaved loops, what fails on the way."""

from __future__ import annotations

import copy
import gc
import math
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, Rollback, Skip, SpikeDetector, SpikeError
from torch_gradmon.plugins.reactions import RollbackResult
from torch_gradmon.spikes import Threshold

pytestmark = pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
LIMIT, BAD = 1e4, 1e7


def _watched(model: nn.Module, *optimizers: Any, skip: Any = "skip", **more: Any) -> ModuleMonitor:
    monitor = ModuleMonitor(model, on_spike=skip, spike_capture=gradmon.SpikeCapture(after=0))
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    return monitor.attach(*optimizers, **more)


def _batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _net(first: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Identity(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, by: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(_batch(number)).square().mean() * by).backward()
    optimizer.step()


# --- buffers ---------------------------------------------------------------------------------------------------------------------


class _Buffered(nn.Module):
    """Keeps a running mean, in one of the ways in which people do that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.register_buffer("mean", None if how == "none" else torch.zeros(4))
        self.register_buffer("mask", torch.ones(1).expand(4))  # which nothing can be written to
        with torch.inference_mode():
            self.register_buffer("made_elsewhere", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().mean(dim=0)
        self.calls += 1
        if self.how == "none" and self.mean is None:
            self.mean = new.clone()
        elif self.how == "data":
            self.mean.data.mul_(0.9).add_(new)
        elif self.how == "seldom" and self.calls % 4 == 0:
            self.mean.mul_(0.9).add_(new)
        return x * self.mask * self.made_elsewhere.clone()


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", ["none", "data", "seldom"])
def test_whatever_way_a_buffer_is_kept_it_forgets_the_batch(how: str, bad: int) -> None:
    model, reference = _net(_Buffered(how)), _net(_Buffered(how))
    optimizer, other = _sgd(model), _sgd(reference)
    monitor = _watched(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(_batch(step) * (math.nan if step == bad else 1)).square().mean().backward()
        optimizer.step()
        assert monitor.step_was_skipped == (step == bad)
        if step == bad:
            reference[0].calls += 1
        else:
            _step(reference, other, step)
    assert _same(model, reference)
    assert monitor.warning_counts() == {}


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_a_large_buffer_that_moves_for_the_first_time_in_a_skipped_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.plugins.spike_policy.COPIED", 0)
    model = _net(_Buffered("seldom"))
    optimizer = _sgd(model)
    _watched(model, optimizer)
    for step in range(3):
        _step(model, optimizer, step)
    with pytest.warns(gradmon.GradmonWarning, match=r"buffers of the model \(mean\) could not be made what they were"):
        _step(model, optimizer, 3, BAD)


def _parts(model: nn.Module, x: Tensor) -> Tensor:
    return model[4](model[3](model[2](model[1](x))))


def _after_a_look_ahead(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return model(x) + 0 * target


def _from_outside(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)


def test_statistics_of_norms_are_copied_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.plugins.spike_policy.COPIED", 0)
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    _step(model, optimizer, 0, math.nan)
    assert monitor.step_was_skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert monitor.warning_counts() == {}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("how", ["metric on some steps", "closer look", "tuned"])
def test_statistics_go_back_by_one_step_where_hooks_on_modules_come_and_go(how: str, micro_batches: int) -> None:
    bad = [42] if how != "closer look" else [41, 42, 43]
    model, other = _net(), _net()
    optimizer, same = _sgd(model), _sgd(other)
    monitor = ModuleMonitor(
        model,
        on_spike="skip",
        spike_capture=gradmon.SpikeCapture(after=3 if how == "closer look" else 0),
        every=1 if how == "tuned" else 7,
    )
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    if how == "metric on some steps":
        monitor.add_activation_metric("rms", metric_regex="^1$")
    monitor.attach(optimizer)
    if how == "tuned":
        monitor.set_detail(preset="full", steps=5, first=42)
    for number in range(60):
        by = BAD if number in bad else 1.0
        optimizer.zero_grad()
        for _ in range(micro_batches):
            (model(_batch(number)).square().mean() * by).backward()
        optimizer.step()
        if number not in bad:
            same.zero_grad()
            for _ in range(micro_batches):
                (other(_batch(number)).square().mean() * by).backward()
            same.step()
        assert _same(model, other), number
    assert monitor.get_step_counts().skipped == len(bad)


@pytest.mark.parametrize("call", [_parts, _after_a_look_ahead, _from_outside])
def test_statistics_are_put_back_however_the_model_is_called(call: Any) -> None:
    model, reference = _net(), _net()
    optimizer, other = _sgd(model), _sgd(reference)
    monitor = _watched(model, optimizer)
    for step in range(6):
        for each, stepper in ((model, optimizer), (reference, other)):
            if each is model or step != 4:
                stepper.zero_grad()
                x = _batch(step).requires_grad_()
                (call(each, x).square().mean() * (BAD if step == 4 else 1)).backward()
                stepper.step()
        assert monitor.step_was_skipped == (step == 4)
    assert _same(model, reference)


# --- several optimizers ----------------------------------------------------------------------------------------------------------


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def _play(
    model: _Gan, optimizers: list[torch.optim.Optimizer], step: int, critic: float = 1.0, generator: float = 1.0
) -> list[bool]:
    of_critic, of_generator = optimizers
    of_critic.zero_grad()
    (model.critic(model.generator(_batch(step)).detach()).square().mean() * critic).backward()
    of_critic.step()
    of_generator.zero_grad()
    (model(_batch(step)).square().mean() * generator).backward()
    of_generator.step()
    return []


def _of_gan(model: _Gan) -> list[torch.optim.Optimizer]:
    return [_sgd(model.critic), _sgd(model.generator)]


@pytest.mark.parametrize("by", [BAD, math.nan])
def test_a_spike_of_the_one_is_not_one_of_the_other_in_the_next_step(by: float) -> None:
    model = _Gan()
    optimizers = _of_gan(model)
    monitor = _watched(model, *optimizers, skip=Skip(limit=1, on_limit="stop"))
    skipped = []
    for step in range(9):
        _play(model, optimizers, step, generator=by if step in (4, 7) else 1.0)
        if monitor.step_was_skipped:
            skipped.append(step)
    assert skipped == [4, 7]


def test_a_spike_that_is_accepted_is_so_for_all_optimizers_of_the_step() -> None:
    model = _net()
    ours = [torch.optim.SGD(model[1].parameters(), lr=1e-12), torch.optim.SGD(model[4].parameters(), lr=1e-12)]
    monitor = _watched(model, *ours, skip=Skip(limit=1))
    skipped = []
    for step in range(6):
        (model(_batch(step)).square().mean() * BAD).backward()
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(monitor.step_was_skipped)
    assert skipped == [True, False] * 3
    assert monitor.get_step_counts().skipped == monitor.get_step_counts().applied == 3
    assert "the 2nd spike in a row" in monitor.why(5)


def test_what_a_forward_after_the_decision_did_is_undone_too() -> None:
    """The critic's step is skipped; the generator's forward comes after that, and its step is skipped with it."""
    model, reference = _Gan(), _Gan()
    ours, theirs = _of_gan(model), _of_gan(reference)
    monitor = _watched(model, *ours)
    for step in range(6):
        _play(model, ours, step, critic=BAD if step == 3 else 1.0)
        assert monitor.step_was_skipped == (step == 3)
        if step != 3:
            _play(reference, theirs, step)
    assert _same(model, reference)


def test_an_optimizer_that_was_named_in_the_wrong_order_is_skipped_with_the_other() -> None:
    model = _net()
    first, second = _sgd(model[1]), _sgd(model[4])
    monitor = _watched(model, first, second)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        (model(_batch(step)).square().mean() * (math.nan if step == 0 else 1)).backward()
        second.step()
        first.step()
        if step == 0:
            assert monitor.step_was_skipped
            assert all(map(torch.equal, before, model.parameters()))
        model.zero_grad()
    assert not any(p.isnan().any() for p in model.parameters())


def test_a_step_that_one_optimizer_was_refused_moves_the_scale_though_another_one_has_a_spike() -> None:
    model = _net()
    ours = [torch.optim.SGD(model[1].parameters(), lr=0.01), torch.optim.SGD(model[4].parameters(), lr=0.01)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(Threshold(5.0), signal="loss"))
    monitor.attach(*ours, scaler=scaler)
    for loss, scale in ((1.0, 32.0), (9.0, 16.0)):
        before = copy.deepcopy(model[4].state_dict())
        model.zero_grad()
        scaler.scale(model(_batch(0)).square().mean()).backward()
        model[1].weight.grad[0, 0] = math.inf
        monitor.log_scalar("loss", loss)
        for optimizer in ours:
            scaler.step(optimizer)
        scaler.update()
        # infinite gradients of the one, which was refused, are no spike of the other
        assert monitor.step_was_skipped == (loss > 5)
        assert monitor.step_was_skipped == all(torch.equal(before[name], value) for name, value in model[4].state_dict().items())
        assert scaler.get_scale() == scale


def test_infinite_gradients_lower_the_scale_also_in_a_step_that_is_skipped_for_its_loss() -> None:
    """A fused optimizer looks for them itself, so that the scaler's finding is on the device only."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(Threshold(5.0), signal="loss"))
    monitor.attach(optimizer, scaler=scaler)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler.scale(model(_batch(0)).square().mean()).backward()
    other.param_groups[0]["params"][0].grad = torch.tensor([math.inf])
    monitor.log_scalar("loss", 9.0)
    scaler.step(other)  # which nobody watches, under the same scaler
    scaler.step(optimizer)
    scaler.update()
    assert monitor.step_was_skipped
    assert scaler.get_scale() == 32.0


def test_the_same_gradients_are_not_applied_by_a_second_step() -> None:
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer)
    _step(model, optimizer, 0)
    before = copy.deepcopy(model.state_dict())
    _step(model, optimizer, 1, BAD)
    optimizer.step()
    assert monitor.step_was_skipped
    assert "not zeroed since" in monitor.why(2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    _step(model, optimizer, 2)
    assert not monitor.step_was_skipped


def test_gradients_that_were_zeroed_in_place_are_new_ones() -> None:
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer)
    for step in range(4):
        (model(_batch(step)).square().mean() * (BAD if step == 1 else 1)).backward()
        optimizer.step()
        assert monitor.step_was_skipped == (step == 1)
        optimizer.zero_grad(set_to_none=False)


# --- odd optimizers --------------------------------------------------------------------------------------------------------------


class _Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: it climbs, asks for gradients there, and steps from where it was."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.hidden, self.param_groups = [base], base.param_groups  # in a list it is not found, and followed

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=0.01)
        loss = torch.enable_grad()(closure)()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                if p.grad is not None:  # as those do that are in use
                    p.copy_(old)
        self.hidden[0].step()
        return loss


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_an_optimizer_that_moves_the_parameters_first_is_not_skipped_and_that_is_said() -> None:
    model, reference = _net(), _net()
    sam, other = _Sam(_sgd(model)), _Sam(_sgd(reference))
    monitor = _watched(model, sam)

    def trained(each: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = each(_batch(step)).square().mean() * (BAD if step == 2 else 1)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    with pytest.warns(gradmon.GradmonWarning, match="_Sam writes to the parameters before its closure is called"):
        for step in range(4):
            trained(model, sam, step)
            trained(reference, other, step)
            assert not monitor.step_was_skipped
    assert _same(model, reference)


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_an_optimizer_that_moves_parameters_without_gradients_is_named() -> None:
    class Decays(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.mul_(0.9)
            return super().step(closure)

    model = _net()
    optimizer = Decays(model.parameters(), lr=0.01)
    _watched(model, optimizer)
    with pytest.warns(gradmon.GradmonWarning, match="Decays changed parameters in a skipped step"):
        _step(model, optimizer, 0, BAD)


def test_options_that_are_changed_in_place_are_put_back() -> None:
    class Remembers(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group.setdefault("steps", []).append(1)
                group.setdefault("tensor", torch.zeros(())).add_(1)
            return super().step(closure)

    model = _net()
    optimizer = Remembers(model.parameters(), lr=0.01)
    _watched(model, optimizer)
    for step in range(5):
        _step(model, optimizer, step, BAD if step in (1, 3) else 1)
    assert optimizer.param_groups[0]["steps"] == [1] * 3
    assert optimizer.param_groups[0]["tensor"] == 3


def test_a_closure_that_is_called_again_leaves_its_last_gradients() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure = torch.enable_grad()(closure)
            closure()
            return super().step(closure)

    model = _net()
    optimizer = Twice(model.parameters(), lr=0.01)
    monitor = _watched(model, optimizer)
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(BAD * (len(calls) + 1))
        loss = model(_batch(0)).square().mean() * calls[-1]
        loss.backward()
        return loss

    before = copy.deepcopy(model[1].weight)
    optimizer.step(closure)
    assert monitor.step_was_skipped
    assert torch.equal(model[1].weight, before)
    found = model[1].weight.grad.clone()
    optimizer.zero_grad()
    closure()
    assert torch.allclose(found / calls[1], model[1].weight.grad / calls[2], rtol=1e-4)


@pytest.mark.parametrize("attached_first", [False, True])
def test_hooks_of_others_find_the_gradients(attached_first: bool) -> None:
    model = _net()
    optimizer = _sgd(model)
    if attached_first:
        monitor = _watched(model, optimizer)
    seen: Counter[str] = Counter()
    optimizer.register_step_pre_hook(lambda *_: seen.update(before=sum(p.grad is not None for p in model.parameters())))
    optimizer.register_step_post_hook(lambda *_: seen.update(after=sum(p.grad is not None for p in model.parameters())))
    if not attached_first:
        monitor = _watched(model, optimizer)
    for step in range(3):
        _step(model, optimizer, step, BAD if step == 2 else 1)
    assert monitor.step_was_skipped
    assert seen == {"before": 18, "after": 18}


# --- what fails on the way -------------------------------------------------------------------------------------------------------


def test_a_rule_that_fails_does_not_switch_off_the_others() -> None:
    def fails(value: float) -> bool:
        raise ValueError("bad")

    for by in (math.nan, BAD):
        model = _net()
        optimizer = _sgd(model)
        monitor = ModuleMonitor(model, on_spike="skip")
        monitor.add_detector(SpikeDetector(fails, signal="loss"))
        monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
        monitor.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            (model(_batch(step)).square().mean() * (by if step == 2 else 1)).backward()
            monitor.log_scalar("loss", 1.0)
            optimizer.step()
        assert monitor.step_was_skipped
        assert monitor.warning_counts() == {"detector:loss": 1}


def test_nan_that_the_loop_cleans_is_accepted_after_a_while() -> None:
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer, skip=Skip(limit=2))
    skipped = []
    for step in range(6):
        optimizer.zero_grad()
        (model(_batch(step)).square().mean() * math.nan).backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)
        optimizer.step()
        skipped.append(monitor.step_was_skipped)
    assert skipped == [True, True, False, True, True, False]


def test_counts_of_a_step_by_hand_that_was_stopped() -> None:
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer, skip=Skip(limit=1, on_limit="stop"))
    for step in range(4):
        monitor.begin_step(step)
        if step < 3:
            _step(model, optimizer, step, BAD if step == 2 else 1)
        else:
            with pytest.raises(SpikeError):
                _step(model, optimizer, step, BAD)
        monitor.end_step()
    counts = monitor.get_step_counts()
    assert (counts.attempted, counts.applied, counts.skipped, counts.overflowed) == (4, 2, 2, 0)


# --- rolling back ----------------------------------------------------------------------------------------------------------------


class _Fails:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not today")


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_what_cannot_go_back_is_said_and_all_else_has_gone() -> None:
    model = _net()
    optimizer = _sgd(model, momentum=0.9)
    other = _Fails()
    monitor = _watched(model, optimizer, skip=Rollback(every=2, margin=0, extra_state=(other,)))
    kept: list[Any] = []
    for step in range(4):
        _step(model, optimizer, step)
        kept.append(copy.deepcopy(model.state_dict()))
    with pytest.warns(gradmon.GradmonWarning, match=r"not all of the model went back to step 2, .*not today"):
        _step(model, optimizer, 4, BAD)
    assert monitor.last_record.rollback == RollbackResult(4, 2, 2, 0)
    assert all(torch.equal(kept[2][name], value) for name, value in model.state_dict().items())
    assert monitor.get_step_counts().overflowed == 0


def test_what_else_goes_back_is_not_kept_alive() -> None:
    model = _net()
    optimizer = _sgd(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    monitor = _watched(model, optimizer, skip=Rollback(every=2, extra_state=(scheduler,)))
    for step in range(4):
        _step(model, optimizer, step)
    weight = weakref.ref(model[1].weight)
    monitor.detach()
    del model, optimizer, scheduler
    gc.collect()
    assert weight() is None
    assert monitor.current_step == 3


def test_two_runs_may_be_given_one_directory(tmp_path: Path) -> None:
    runs = []
    for seed in range(2):
        model = _net()
        nn.init.constant_(model[4].bias, seed)
        optimizer = _sgd(model)
        runs.append((model, optimizer, _watched(model, optimizer, skip=Rollback(every=2, margin=0, directory=tmp_path))))
    kept: list[Any] = []
    for step in range(4):
        for model, optimizer, _ in runs:
            _step(model, optimizer, step)
        if step == 2:
            kept = [copy.deepcopy(model.state_dict()) for model, _, _ in runs]
    for (model, optimizer, _), before in zip(runs, kept, strict=True):
        _step(model, optimizer, 4, BAD)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    opened = len(os.listdir("/dev/fd"))
    del runs, model, optimizer, _
    gc.collect()
    assert len(os.listdir("/dev/fd")) == opened - 4  # two snapshots of each, also where nobody has called detach()
    assert list(tmp_path.iterdir()) == []


def test_after_a_state_was_loaded_there_is_nothing_to_go_back_to() -> None:
    model = _net()
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer, skip=Rollback(every=3, margin=0))
    early = None
    for step in range(8):
        _step(model, optimizer, step)
        if step == 1:
            early = copy.deepcopy((model.state_dict(), monitor.state_dict()))
    model.load_state_dict(early[0])
    monitor.load_state_dict(early[1])
    _step(model, optimizer, 2, BAD)
    assert monitor.step_was_skipped
    assert monitor.last_record.rollback is None
    for step in range(3, 6):
        _step(model, optimizer, step)
    _step(model, optimizer, 6, BAD)
    assert monitor.last_record.rollback == RollbackResult(6, 3, 3, 0)


def test_a_disk_that_is_full_is_not_tried_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    def full(*args: Any) -> None:
        tries.append(args)
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    model = _net()
    optimizer = _sgd(model)
    _watched(model, optimizer, skip=Rollback(every=10, directory=tmp_path))
    for step in range(30):
        _step(model, optimizer, step)
    assert len(tries) == 3


def test_buffers_that_nothing_can_be_written_to_are_no_obstacle() -> None:
    model = _net(_Buffered("data"))
    optimizer = _sgd(model)
    monitor = _watched(model, optimizer, skip=Rollback(every=2, margin=0))
    for step in range(4):
        _step(model, optimizer, step)
    _step(model, optimizer, 4, BAD)
    assert monitor.last_record.rollback == RollbackResult(4, 2, 2, 0)
    assert monitor.warning_counts() == {}


def test_the_word_rollback_is_answered_with_the_class() -> None:
    with pytest.raises(ValueError, match=r"give a torch_gradmon.Rollback\(\)"):
        ModuleMonitor(on_spike="rollback")
    with pytest.raises(TypeError, match="extra_state takes objects"):
        Rollback(extra_state=(nn.Linear,))
