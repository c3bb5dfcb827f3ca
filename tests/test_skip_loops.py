"""Skipping in the loops that people write: schedulers, buffers, several optimizers, caps, cadences, resume, and what is said of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, Rollback, Skip, SpikeDetector, SpikeError
from torch_gradmon.analysis.spike_report import explain
from torch_gradmon.plugins.clipping import AdaGC, ZClip
from torch_gradmon.spikes import Threshold
from torch_gradmon.step.buffer import PendingReadback

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")]
#: Gradient norms of good steps are far below it, and of bad ones far above.
LIMIT = 1e4
BAD = 1e6


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _batch(step: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def _watched(model: nn.Module, *optimizers: Any, skip: Any = "skip", **more: Any) -> ModuleMonitor:
    monitor = ModuleMonitor(model, on_spike=skip, **more)
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    return monitor.attach(*optimizers)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], bad: Iterable[int] = (), by: float = BAD
) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(_batch(step)).square().mean() * (by if step in bad else 1.0)).backward()
        optimizer.step()


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_the_loop_holds_back_its_scheduler() -> None:
    results = []
    for bad in ((), (3, 4)):
        model = _model()
        optimizer = _adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        monitor = _watched(model, optimizer)
        for step in range(8):
            if bad or step not in (3, 4):
                _train(model, optimizer, [step], bad)
                assert monitor.step_was_skipped == (step in bad)
                if not monitor.step_was_skipped:
                    scheduler.step()
        results.append((model, optimizer.state_dict(), scheduler.state_dict()))
    (one, state, schedule), (other, other_state, other_schedule) = results
    assert _same(one, other)
    assert str(state) == str(other_state)
    assert schedule == other_schedule


class _Averages(nn.Module):
    """Changes one buffer in place and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.moved.mul_(0.9).add_(0.1 * x.detach().mean())
            self.replaced = 0.9 * self.replaced + 0.1 * x.detach().mean()
        return x * self.mask


@pytest.mark.parametrize("first_bad", [0, 1, 5])
@pytest.mark.parametrize("by", [math.nan, BAD])
def test_buffers_forget_the_batch(by: float, first_bad: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        norms = nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)
        return nn.Sequential(_Averages(), nn.Linear(4, 8), norms[0], nn.Unflatten(0, (4, 4)), nn.Flatten(0, 1), nn.Linear(8, 1))

    one, other = model(), model()
    optimizer, reference = _adam(one), _adam(other)
    monitor = _watched(one, optimizer)
    mask = one[0].mask
    for step in range(8):
        poisoned = step in (first_bad, first_bad + 1)
        batch = _batch(step) * (by if poisoned else 1.0)
        for each, stepper in ((one, optimizer), (other, reference)):
            if each is one or not poisoned:
                stepper.zero_grad()
                (each(batch).square().mean() * (by if poisoned else 1.0)).backward()
                stepper.step()
        assert monitor.step_was_skipped == poisoned
        assert _same(one, other)
    assert one[0].mask is mask


def test_two_optimizers_of_one_model_are_skipped_together() -> None:
    one, other = _model(), _model()
    ours = [torch.optim.SGD(one[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(one[2].parameters(), lr=0.1)]
    theirs = [torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(other[2].parameters(), lr=0.1)]
    monitor = _watched(one, *ours)
    for step in range(6):
        for model, optimizers in ((one, ours), (other, theirs)):
            if model is one or step != 3:
                (model(_batch(step)).square().mean() * (BAD if step == 3 else 1.0)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert monitor.step_was_skipped == (step == 3)
    assert _same(one, other)
    assert str([o.state_dict() for o in ours]) == str([o.state_dict() for o in theirs])


def test_an_optimizer_that_had_stepped_before_the_spike_was_known_is_named() -> None:
    model = _model()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)
    monitor = _watched(model, first, second)
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        model(_batch(step)).square().mean().backward(inputs=list(model[0].parameters()))
        first.step()
        (model(_batch(step)).square().mean() * (BAD if step == 2 else 1.0)).backward(inputs=list(model[2].parameters()))
        before = copy.deepcopy(model[2].state_dict())
        second.step()
    assert monitor.step_was_skipped
    assert all(torch.equal(before[name], value) for name, value in model[2].state_dict().items())
    assert "skipped, but SGD had stepped before" in monitor.why()


def test_gradients_are_there_again_after_the_step() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = _watched(model, optimizer)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append([p.grad is not None for p in model.parameters()]))
    _train(model, optimizer, range(2))
    (model(_batch(0)).square().mean() * BAD).backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    assert monitor.step_was_skipped
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert seen == [[True] * 4] * 3


@pytest.mark.parametrize("make", [ZClip, AdaGC])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_adaptive_clip_forgets_the_batch(make: Any, by_name: bool) -> None:
    states = []
    for batches in (range(12), [*range(8), *range(10, 12)]):
        model = _model()
        optimizer = _adam(model)
        monitor = _watched(model, optimizer, spike_capture=gradmon.SpikeCapture(after=0))
        own = make(warmup=5)
        for step in batches:
            optimizer.zero_grad()
            (model(_batch(step)).square().mean() * (BAD if step in (8, 9) else 1.0)).backward()
            monitor.clip_grad_norm_(make.__name__.lower() if by_name else own)
            optimizer.step()
        assert monitor.get_step_counts().skipped == (2 if len(batches) == 12 else 0)
        states.append(monitor.state_dict()["clipping"] if by_name else own.state_dict())
    assert states[0] == states[1]
    assert states[0]


# --- the cap ---------------------------------------------------------------------------------------------------------------------


def _skipped(monitor: ModuleMonitor, model: nn.Module, optimizer: torch.optim.Optimizer, bad: float, steps: int) -> list[bool]:
    found = []
    for step in range(steps):
        _train(model, optimizer, [step], [step], bad)
        found.append(monitor.step_was_skipped)
    return found


def test_by_default_the_fourth_spike_in_a_row_is_accepted() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    monitor = _watched(model, optimizer)
    assert _skipped(monitor, model, optimizer, BAD, 9) == [True, True, True, False, True, True, True, False, True]
    assert monitor.get_step_counts().skipped == 7
    assert monitor.get_step_counts().applied == 2


def test_a_good_step_between_begins_another_row() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    monitor = _watched(model, optimizer, skip=Skip(limit=2))
    assert _skipped(monitor, model, optimizer, BAD, 2) == [True, True]
    _train(model, optimizer, [0])
    assert _skipped(monitor, model, optimizer, BAD, 3) == [True, True, False]


def test_or_it_stops_before_anything_is_changed() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = _watched(model, optimizer, skip=Skip(limit=2, on_limit="stop"))
    _train(model, optimizer, range(3))
    before, state = copy.deepcopy(model), str(optimizer.state_dict())
    assert _skipped(monitor, model, optimizer, BAD, 2) == [True, True]
    with pytest.raises(
        SpikeError, match=r"step 5: grad_norm = .*this is the 3rd spike in a row, and Skip\(limit=2, on_limit='stop'\)"
    ):
        _train(model, optimizer, [0], [0])
    assert _same(model, before)
    assert str(optimizer.state_dict()) == state
    assert monitor.get_all_metrics()[5]["spike_score/grad_norm"] > LIMIT  # the record is not lost
    assert monitor.get_step_counts().attempted == 6
    _train(model, optimizer, range(2))  # whoever catches it can go on
    assert monitor.get_step_counts().applied == 5
    assert monitor.current_step == 7


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_nan_is_never_accepted_and_that_is_said() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = _watched(model, optimizer, spike_capture=gradmon.SpikeCapture(after=0))
    _train(model, optimizer, range(3))
    before = copy.deepcopy(model)
    with pytest.warns(gradmon.GradmonWarning) as told:
        assert _skipped(monitor, model, optimizer, math.nan, 40) == [True] * 40
    assert _same(model, before)
    words = "in a row; a step with NaN or Inf is never accepted"  # warned of rarely, after a while
    assert [str(w.message).rpartition("; skipped, ")[2] for w in told if words in str(w.message)] == [
        f"{n} {words}" for n in (4, 10, 30)
    ]
    assert monitor.get_step_counts().nonfinite == monitor.get_step_counts().skipped == 40


# --- what is judged --------------------------------------------------------------------------------------------------------------


def test_without_any_detector_nan_and_inf_are_skipped() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = ModuleMonitor(model, on_spike="skip").attach(optimizer)
    _train(model, optimizer, range(3), [1], BAD)
    assert monitor.get_step_counts().skipped == 0
    _train(model, optimizer, range(3), [1], math.inf)
    assert monitor.get_step_counts().skipped == 1
    assert "elements of the gradients are NaN or infinite" in monitor.why(4)


def test_a_loss_that_is_logged_in_time_can_skip_the_step() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(Threshold(5.0), signal="loss"))
    monitor.attach(optimizer)
    for step, loss in enumerate((1.0, 9.0, 1.0)):
        model(_batch(step)).square().mean().backward()
        monitor.log_scalar("loss", loss)
        optimizer.step()
        assert monitor.step_was_skipped == (loss > 5)
    monitor.detach()
    assert monitor.get_all_metrics()[1]["spike_score/loss"] == 9.0


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_a_loss_that_comes_too_late_cannot_and_that_is_said_once() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(Threshold(5.0), signal="loss"))
    monitor.attach(optimizer)
    with pytest.warns(gradmon.GradmonWarning) as told:
        for step in range(3):
            _train(model, optimizer, [step])
            assert not monitor.step_was_skipped
            monitor.log_scalar("loss", 9.0)
        monitor.detach()
    late = [str(w.message) for w in told if "became known only when the optimizer had stepped" in str(w.message)]
    assert len(late) == 1
    assert "has to be logged before optimizer.step()" in late[0]
    assert monitor.get_step_counts().skipped == 0


def test_a_pattern_over_layers_can_skip_the_step() -> None:
    import re

    model = _model()
    optimizer = _adam(model)
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(Threshold(LIMIT), signal=re.compile("^gradient_before_clip/.*/norm$")))
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    _train(model, optimizer, range(4), [2])
    assert monitor.get_step_counts().skipped == 1


def test_a_rule_is_asked_once_for_each_value() -> None:
    model = _model()
    optimizer = _adam(model)
    asked: list[float] = []
    monitor = ModuleMonitor(model, on_spike="skip")
    monitor.add_detector(SpikeDetector(lambda value: asked.append(value) or value > LIMIT))
    monitor.attach(optimizer)
    _train(model, optimizer, range(6), [3])
    assert len(asked) == 6
    assert monitor.get_step_counts().skipped == 1


@pytest.mark.parametrize("every", [1, 4])
def test_every_step_is_judged_whatever_the_cadence(every: int) -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = gradmon.watch(model, optimizer, on_spike="skip", every=every)
    flags = []
    for step in range(60):
        _train(model, optimizer, [step], [30, 31, 45], 1e3)
        flags.append(monitor.step_was_skipped)
    assert [step for step, flag in enumerate(flags) if flag] == [30, 31, 45]
    rows = monitor.get_all_metrics()
    assert rows[30]["gradmon/steps_skipped"] == 1
    assert rows[45]["gradmon/steps_skipped"] == 3
    assert "skipped, 2 in a row" in monitor.why(31)


def test_what_the_detectors_learn_does_not_depend_on_the_cadence() -> None:
    states = []
    for every in (1, 7):
        model = _model()
        optimizer = _adam(model)
        monitor = ModuleMonitor(model, on_spike="skip", every=every, spike_capture=gradmon.SpikeCapture(after=0))
        monitor.add_detector(SpikeDetector())
        monitor.attach(optimizer)
        _train(model, optimizer, range(40), [20], 1e3)
        assert monitor.get_step_counts().skipped == 1
        states.append(monitor.state_dict()["detectors"])
    assert states[0] == states[1]


def test_a_decision_is_one_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[PendingReadback] = []
    monkeypatch.setattr(PendingReadback, "land", lambda self, land=PendingReadback.land: arrivals.append(self) or land(self))
    counts = []
    for skip in (None, "skip"):
        model = _model()
        optimizer = _adam(model)
        monitor = ModuleMonitor(model, on_spike=skip)
        monitor.add_detector(SpikeDetector())
        monitor.attach(optimizer)
        _train(model, optimizer, range(3))
        before = len(arrivals)
        _train(model, optimizer, [3])
        counts.append(len(arrivals) - before)
    assert counts == [1, 2]


# --- with a scaler ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_what_the_scaler_refuses_is_no_skip_and_moves_its_scale(fused: bool) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=False if not fused else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    monitor = ModuleMonitor(model, on_spike=Skip(limit=None))
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    monitor.attach(optimizer, scaler=scaler)
    scales, skipped = [], []
    for by in (1.0, 1.0, math.inf, BAD, 1.0, BAD, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(_batch(0)).square().mean() * by).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        skipped.append(monitor.step_was_skipped)
    assert skipped == [False, False, False, True, False, True, False, False]
    assert scales == [64, 64, 32, 32, 32, 32, 32, 64]  # as if the skipped steps had not been
    counts = monitor.get_step_counts()
    assert (counts.attempted, counts.applied, counts.skipped, counts.overflowed, counts.nonfinite) == (8, 5, 2, 1, 1)


def test_a_scale_that_the_loop_sets_stands() -> None:
    model = _model()
    optimizer = _adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    monitor = _watched(model, optimizer)
    monitor.detach()
    monitor.attach(optimizer, scaler=scaler)
    scaler.scale(model(_batch(0)).square().mean() * BAD).backward()
    scaler.step(optimizer)
    scaler.update(8.0)
    assert monitor.step_was_skipped
    assert scaler.get_scale() == 8.0


# --- resume ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [4, 5, 6, 7, 8])
def test_a_run_resumed_amid_skips_goes_on_as_if_it_had_not_been_broken(at: int) -> None:
    bad = [5, 6, 7, 8, 9]

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, ModuleMonitor]:
        model = _model()
        optimizer = _adam(model)
        monitor = ModuleMonitor(model, on_spike=Skip(limit=3), spike_capture=gradmon.SpikeCapture(after=0))
        monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
        monitor.add_detector(SpikeDetector(signal="grad_max"))
        return model, optimizer, monitor.attach(optimizer)

    model, optimizer, monitor = begun()
    _train(model, optimizer, range(12), bad, 1e5)
    first, first_optimizer, first_monitor = begun()
    _train(first, first_optimizer, range(at), bad, 1e5)
    saved = copy.deepcopy((first.state_dict(), first_optimizer.state_dict(), first_monitor.state_dict()))
    import json

    again, again_optimizer, again_monitor = begun()
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    again_monitor.load_state_dict(json.loads(json.dumps(saved[2])))
    _train(again, again_optimizer, range(at, 12), bad, 1e5)
    assert _same(model, again)
    assert again_monitor.state_dict() == monitor.state_dict()
    assert again_monitor.get_step_counts() == monitor.get_step_counts()
    assert monitor.get_step_counts().skipped == 4
    assert again_monitor.current_step == 11


def test_a_state_of_a_run_that_did_not_act_can_be_loaded() -> None:
    model = _model()
    plain = ModuleMonitor(model)
    plain.add_detector(SpikeDetector())
    state = plain.state_dict()
    monitor = ModuleMonitor(_model(), on_spike="skip")
    monitor.add_detector(SpikeDetector())
    monitor.load_state_dict(state)
    plain.load_state_dict(monitor.state_dict())
    assert monitor.get_step_counts().skipped == 0


# --- what else may happen ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_fails_in_a_skipped_step_leaves_nothing_of_it() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if all(p.grad is None for group in self.param_groups for p in group["params"]):
                raise RuntimeError("nothing to do")
            return super().step(closure)

    model = _model()
    optimizer = Fails(model.parameters(), lr=0.1)
    monitor = _watched(model, optimizer)
    _train(model, optimizer, range(2))
    loss = model(_batch(0)).square().mean() * BAD
    optimizer.zero_grad()
    loss.backward()
    with pytest.raises(RuntimeError, match="nothing to do"):
        optimizer.step()
    optimizer.zero_grad()  # which finds no gradients any more, and none may come back later
    model(_batch(1)).square().mean().backward()
    optimizer.step()
    assert not monitor.step_was_skipped
    assert monitor.get_step_counts().attempted == 4
    assert monitor.get_step_counts().overflowed == 0


def test_what_an_optimizer_counts_in_its_groups_is_put_back() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            return super().step(closure)

    model = _model()
    optimizer = Counts(model.parameters(), lr=1e-9)
    _watched(model, optimizer)
    _train(model, optimizer, range(5), [0, 3])
    assert optimizer.param_groups[0]["calls"] == 3


def test_steps_by_hand_are_skipped_where_the_optimizer_is_attached() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = _watched(model, optimizer)
    for step in range(4):
        monitor.begin_step(step)
        before = copy.deepcopy(model)
        _train(model, optimizer, [step], [2])
        assert monitor.step_was_skipped == (step == 2) == _same(model, before)
        monitor.end_step()
    assert monitor.get_step_counts().skipped == 1


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_steps_by_hand_without_an_optimizer_cannot_and_that_is_said() -> None:
    monitor = ModuleMonitor(_model(), on_spike="skip")
    with pytest.warns(gradmon.GradmonWarning, match=r"the optimizers are not known: call attach\(\)"):
        monitor.begin_step(0)


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_each_skip_is_said_with_its_reason_and_recorded(tmp_path: Any) -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = gradmon.watch(model, optimizer, on_spike="skip", run_dir=tmp_path / "run")
    with pytest.warns(gradmon.GradmonWarning) as told:
        _train(model, optimizer, range(40), [30, 31], 1e3)
        monitor.detach()
    skips = [str(w.message) for w in told if "skipped" in str(w.message)]
    assert [text.split(": ")[2] for text in skips] == ["step 30", "step 31"]
    assert all("times the usual" in text for text in skips)
    assert "layers rose together" in skips[0]
    run = gradmon.load_run(tmp_path / "run")
    assert [(event.step, event.action) for event in run.spikes] == [(30, "skipped"), (31, "skipped, 2 in a row")]
    assert "skipped, 2 in a row" in explain(run._reader, 31)
    assert "0.weight" in explain(run._reader, 30)


def test_a_step_without_a_spike_is_what_it_was() -> None:
    """Bit for bit, with clipping, accumulation and all."""
    results = []
    for skip in (None, "skip", Rollback(every=5)):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if skip is not None:
            gradmon.watch(model, optimizer, on_spike=skip)
        for step in range(20):
            optimizer.zero_grad()
            for micro in range(2):
                model(_batch(2 * step + micro)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        results.append(model)
    assert _same(results[0], results[1])
    assert _same(results[0], results[2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in torch.compile
def test_a_compiled_step_is_skipped() -> None:
    model = _model()
    optimizer = _adam(model)
    monitor = _watched(model, optimizer)
    step_compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        optimizer.zero_grad()
        (model(_batch(step)).square().mean() * (BAD if step == 2 else 1)).backward()
        before = copy.deepcopy(model)
        step_compiled()
        assert _same(model, before) == monitor.step_was_skipped == (step == 2)


def test_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = _model()
    optimizer = _adam(model)
    monitor = gradmon.watch(model, optimizer, on_spike="skip")
    before = copy.deepcopy(model)
    _train(model, optimizer, range(3), [2], math.nan)
    assert not monitor.step_was_skipped
    assert not _same(model, before)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            lambda: ModuleMonitor(on_spike="skipp"),
            ValueError,
            "on_spike='skipp' is not one of 'warn', 'skip', 'raise'; did you mean skip",
        ),
        (lambda: ModuleMonitor(on_spike=Skip), TypeError, r"Skip\(\), got the class"),
        (lambda: Skip(limit=0), ValueError, "limit=0 must be a positive int, or None for no limit"),
        (lambda: Skip(on_limit="halt"), ValueError, "on_limit='halt' is not one of 'accept', 'stop'"),
        (lambda: Rollback(keep=0), ValueError, "keep=0 must be a positive int"),
        (lambda: Rollback(every=0.5), ValueError, "every=0.5 must be a positive int"),  # type: ignore[arg-type]
        (lambda: Rollback(extra_state=(1,)), TypeError, r"state_dict\(\) and load_state_dict\(\), got 1 of type int"),
        (lambda: Rollback(margin=-1), ValueError, "margin=-1 must not be negative"),
        (lambda: Rollback(directory=3), TypeError, "directory must be a path"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_at_once(wrong: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wrong()


def test_the_default_detector_skips_a_loud_batch_in_a_short_training_and_no_other_one() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = gradmon.watch(model, optimizer, on_spike="skip")
        skipped = []
        for step in range(40):
            x = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)) * (1000 if step == 30 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if monitor.step_was_skipped:
                skipped.append(step)
        monitor.detach()
        assert skipped == [30], seed
