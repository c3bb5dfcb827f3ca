"""What becomes of what the audit sees: facts, the run directory, one warning, and a diagnosis; and what the audit leaves alone."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.analysis.diagnosis import Diagnosis
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.rules.loss import check_loop, check_loss
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.keys import Key
from torch_gradmon.core.loop_mistakes import MISTAKES, LoopFinding
from torch_gradmon.core.records import StepRecord, is_loss, is_loss_of_network, is_whole_loss
from torch_gradmon.plugins.tallies import Tallies

from . import loops
from .reads import HostReads
from .synthetic_run import history
from .test_audit_alarms import loss_of, net, rules, sgd, watched

NOT_CLEARED = r"not cleared between two steps"


class Noted:
    """A run with a step, whose notes are kept."""

    def __init__(self) -> None:
        self.step = 0
        self.notes: list[list[dict[str, Any]]] = []
        self.complaints = WarningLog()
        self.part, self.context = "audit", self
        self.tallies = Tallies(self)  # type: ignore[arg-type]

    def warn(self, key: str, message: str, error: Exception | None = None) -> None:
        self.complaints.add(key, message, error)

    def annotate_run(self, audit: list[dict[str, Any]]) -> None:
        self.notes.append(audit)

    def see(self, times: int, rule: str = "clip-per-micro-batch", key: object = None, **evidence: float) -> None:
        for _ in range(times):
            self.tallies.seen(rule, key, ("w",), evidence)
            self.step += 1


# --- tallies


def test_a_fact_takes_repeats_with_nothing_in_between() -> None:
    noted = Noted()
    for _ in range(5):
        noted.see(2)
        noted.tallies.missed("clip-per-micro-batch")
    assert noted.tallies.facts() == []
    noted.see(3, times_in_a_step=4.0)
    assert noted.tallies.facts() == [LoopFinding("clip-per-micro-batch", 10, 12, 3, ("w",), {"times_in_a_step": 4.0})]
    noted.tallies.missed("clip-per-micro-batch")
    noted.see(1)
    assert noted.tallies.facts()[0].count == 4


def test_the_run_directory_hears_of_a_fact_when_it_is_new_and_as_it_grows() -> None:
    noted = Noted()
    noted.see(150)
    assert [audit[0]["count"] for audit in noted.notes] == [3, 10, 30, 100]
    noted.tallies.write_facts()
    noted.tallies.write_facts()
    assert [audit[0]["count"] for audit in noted.notes] == [3, 10, 30, 100, 150]
    assert [LoopFinding.of_dict(json.loads(json.dumps(fact))) for fact in noted.notes[-1]] == noted.tallies.facts()


def test_two_optimizers_make_one_fact() -> None:
    noted = Noted()
    noted.see(3, key=1)
    noted.see(5, key=2)
    noted.see(2, key=3)
    assert noted.tallies.facts() == [LoopFinding("clip-per-micro-batch", 0, 7, 5, ("w",), {})]


def test_what_is_certain_warns_once_and_the_rest_never() -> None:
    for rule, mistake in MISTAKES.items():
        noted = Noted()
        if mistake.warns:
            with pytest.warns(gradmon.GradmonWarning) as told:
                noted.see(mistake.repeats + 9, rule)
            assert len(told) == 1
            assert mistake.advice in str(told[0].message)
            assert "of steps" not in str(told[0].message)
        else:
            noted.see(mistake.repeats + 9, rule)
        assert noted.complaints.counts == ({f"audit:{rule}": 1} if mistake.warns else {})


def test_each_mistake_says_what_it_is_and_what_to_do() -> None:
    for rule, mistake in MISTAKES.items():
        (finding,) = check_loop(History([], facts=[LoopFinding(rule, 3, 9, 4, ("a.weight", "b"), {"parameters": 2.0})]))
        assert (finding.rule, finding.severity, finding.where, finding.steps) == (rule, mistake.severity, "a.weight", (3, 9))
        assert finding.evidence == {"times seen": 4.0, "parameters": 2.0}
        assert finding.cause.endswith(".")
        assert finding.advice.endswith(".")
        assert finding.weight >= 90
    assert check_loop(History([], facts=[LoopFinding("of a later version", 0, 0, 1)])) == []


@pytest.mark.parametrize(("of_ten", "severity"), [(5, "warning"), (6, "info")])
def test_a_loss_that_need_not_fall_makes_no_mistake_matter(of_ten: int, severity: str) -> None:
    run = history(loss=lambda step: 2.0 + step / 50, context=lambda step: {"by_turns": 1.0} if step % 10 < of_ten else {})
    run.facts = [LoopFinding("loss-scale", 3, 9, 4)]
    (finding,) = check_loop(run)
    assert (finding.rule, finding.severity) == ("loss-scale", severity)


# --- the run directory


def test_a_run_that_never_stepped_can_be_diagnose_history(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, run_dir=tmp_path)
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(model).backward()
    monitor.detach()
    diagnosis = gradmon.load_run(tmp_path).diagnose()
    assert [finding.rule for finding in diagnosis.findings] == ["never-stepped"]
    assert diagnosis.exit_code == 1
    assert "ERROR   never-stepped" in str(diagnosis)
    assert [f.rule for f in monitor.diagnose().findings] == ["never-stepped"]


def test_no_step_and_nothing_found_is_nothing_to_diagnose() -> None:
    assert str(Diagnosis((), None)) == "Nothing to diagnose: no monitored step yet."
    (finding,) = check_loop(History([], facts=[LoopFinding("never-stepped", 0, 0, 1)]))
    assert str(Diagnosis((finding,), None)).splitlines()[0] == "1 error in a run without a monitored step"


@pytest.mark.filterwarnings("ignore:torch_gradmon.*Gradients are not cleared")
def test_a_run_that_goes_on_with_the_mistake_mended_is_not_told_of_it_for_ever(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    for clears in (False, True):
        monitor = watched(model, optimizer, run_dir=tmp_path, start_step=6 * clears)
        for _ in range(6):
            loss_of(model).backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
        monitor.detach()
        optimizer.zero_grad()
        assert bool(gradmon.load_run(tmp_path)._reader.meta["audit"]) is not clears


def test_a_fact_of_a_later_version_can_be_read() -> None:
    fact = LoopFinding("clip-after-step", 1, 2, 3, ("w",), {"times": 3.0})
    assert LoopFinding.of_dict({**fact.to_dict(), "colour": "red"}) == LoopFinding.of_dict(fact.to_dict()) == fact


def test_facts_are_in_the_run_directory_while_the_run_goes_on(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, run_dir=tmp_path, every=50)
    with pytest.warns(gradmon.GradmonWarning, match=NOT_CLEARED):
        for _ in range(5):
            loss_of(model).backward()
            optimizer.step()
    (fact,) = gradmon.load_run(tmp_path)._reader.meta["audit"]
    assert (fact["rule"], fact["first"], fact["count"]) == ("missing-zero-grad", 1, 3)
    monitor.detach()
    assert gradmon.load_run(tmp_path)._reader.meta["audit"][0]["count"] == 4
    assert gradmon.load_run(tmp_path).diagnose().findings[0].rule == "missing-zero-grad"


def test_facts_stay_when_the_monitor_is_detached_and_go_on_when_it_is_attached_again() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    with pytest.warns(gradmon.GradmonWarning, match=NOT_CLEARED):
        for _ in range(5):
            loss_of(model).backward()
            optimizer.step()
    monitor.detach()
    assert rules(monitor) == ["missing-zero-grad"]
    monitor.attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert rules(monitor) == ["missing-zero-grad"]
    monitor.detach()


# --- what it leaves alone


def _hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def test_a_step_that_is_not_monitored_has_one_hook_on_a_parameter_and_reads_nothing() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.9)
    bare = HostReads()
    with bare:
        for _ in range(40):
            _step(model, optimizer)
    monitor = watched(model, optimizer, every=1000)
    _step(model, optimizer)
    seen = HostReads()
    with seen:
        for _ in range(40):
            _step(model, optimizer)
            assert _hooks(model) == 1
    assert seen.counts == bare.counts
    monitor.detach()
    assert _hooks(model) == 0


@pytest.mark.parametrize("mistake", ["clip", "mean", "clear", "late"])
def test_a_suspicion_reads_a_few_values_and_then_no_more(mistake: str) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, every=1000)
    parameters = list(model.parameters())

    def one() -> None:
        for count in range(1, 4):
            if mistake == "clear":
                optimizer.zero_grad(set_to_none=False)
            loss_of(model).backward()
            if mistake == "clip":
                norm = nn.utils.get_total_norm([p.grad for p in parameters])
                for p in parameters:
                    p.grad.mul_(0.01 / norm)
            elif mistake == "mean":  # which is none
                for p in parameters:
                    p.grad.mul_(count / (count + 1))
        optimizer.step()
        if mistake == "late":
            for p in parameters:
                p.grad.mul_(0.5)
        optimizer.zero_grad(set_to_none=mistake != "clear")

    counts = []
    with pytest.warns(gradmon.GradmonWarning) if mistake == "late" else _nothing():
        for _ in range(40):
            with HostReads() as reads:
                one()
            counts.append(reads.counts["scalar"])
    assert 1 <= sum(counts[1:]) <= 12
    assert not any(counts[10:])
    found = {"clip": ["clip-per-micro-batch"], "mean": [], "clear": ["micro-batch-discarded"], "late": ["clip-after-step"]}
    assert rules(monitor) == found[mistake]
    assert _hooks(model) == 1


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "options", [{}, {"clip": "norm", "micro_batches": 4}, {"scaler": True, "clip": "norm"}, {"optimizer_name": "lbfgs"}]
)
def test_training_is_the_same_bit_for_bit_on_steps_that_are_not_monitored(options: dict[str, Any]) -> None:
    plain = loops.train(**options)

    def watch(model: nn.Module, optimizer: Any, scaler: Any) -> ModuleMonitor:
        return ModuleMonitor(model, every=1000).attach(optimizer, scaler=scaler)

    assert loops.differences(plain, loops.train(**options, monitored=watch)) == []


def test_a_loop_full_of_mistakes_is_the_same_bit_for_bit() -> None:
    def train(is_watched: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = sgd(model, momentum=0.9)
        monitor = watched(model, optimizer) if is_watched else None
        for step in range(60):
            for _ in range(3):
                loss_of(model).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if step % 2:
                optimizer.step()
            if step > 30:
                optimizer.zero_grad(set_to_none=step % 3 == 0)
            if step == 40:
                model[0].requires_grad_(False)
        if monitor is not None:
            assert len(rules(monitor)) >= 2
            monitor.detach()
        return [p.detach().clone() for p in model.parameters()]

    with pytest.warns(gradmon.GradmonWarning):
        seen = train(True)
    assert all(torch.equal(a, b) for a, b in zip(train(False), seen, strict=True))


def test_the_model_and_its_gradients_are_let_go() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for _ in range(3):
        _step(model, optimizer)
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model).backward()
    assert [ref() is None for ref in gradients] == [True] * 4, "also of the probe, when the next one has come"
    gone = [weakref.ref(p.grad) for p in model.parameters()]
    monitor.detach()
    optimizer.zero_grad()
    assert [ref() is None for ref in gone] == [True] * 4
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [ref() is None for ref in parameters] == [True] * 4
    assert monitor.diagnose() is not None


def test_a_copy_and_a_pickle_have_no_hook() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    _step(model, optimizer)
    copied, loaded = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    for other, its in (copied, loaded):
        assert _hooks(other) == 0
        for _ in range(5):
            loss_of(other).backward()
            its.step()
    assert rules(monitor) == []
    monitor.detach()


def test_a_failure_of_the_audit_ends_it_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)

    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("torch_gradmon.plugins.loop_checks.Probe.look", fails)
    with pytest.warns(gradmon.GradmonWarning, match="the plugin 'loop_audit' failed, it is off") as told:
        for _ in range(4):
            _step(model, optimizer)
    assert len(told) == 1
    assert "gradmon/grad_norm" in monitor.get_step_metrics()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_audited_and_compiles_no_more_often(backend: str) -> None:
    def frames(is_watched: bool) -> tuple[int, list[str]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = net()
        compiled = torch.compile(model, backend=backend)
        optimizer = sgd(model)
        monitor = watched(compiled, optimizer, every=3) if is_watched else None
        for _ in range(8):
            loss_of(compiled).backward()
            optimizer.step()
        found = [] if monitor is None else rules(monitor)
        if monitor is not None:
            monitor.detach()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], found

    plain, _ = frames(False)
    with pytest.warns(gradmon.GradmonWarning, match=NOT_CLEARED):
        assert frames(True) == (plain, ["missing-zero-grad"])


def test_checkpointed_parts_that_are_recomputed_are_accumulated_once() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = net()
        optimizer = sgd(model)
        monitor = watched(model, optimizer)
        for _ in range(10):
            optimizer.zero_grad()
            x = torch.ones(3, 4, requires_grad=True)
            hidden = checkpoint(model[0], x, use_reentrant=reentrant)
            model(x).sum().add(checkpoint(model[2], model[1](hidden), use_reentrant=reentrant).sum().mul(2)).backward()
            optimizer.step()
        assert rules(monitor) == []
        monitor.detach()


# --- what the loop tells of itself, which is no mistake -----------------------------------------------------------------------


def _share(body: Callable[[Any, Any, Any], None]) -> float:
    """In which share of five steps two optimizers, of the last and of the first layer, are taken for players."""
    model = net()
    critic, maker = torch.optim.AdamW(model[2].parameters(), lr=1e-3), sgd(model[0])
    monitor = watched(model, critic, maker)
    for _ in range(5):
        body(model, critic, maker)
    records = monitor._runtime.pipeline.history.sampled()
    assert len(records) == 5
    return sum("by_turns" in record.context for record in records) / 5


@pytest.mark.parametrize("passes", [1, 3])
def test_two_optimizers_of_one_loss_do_not_step_by_turns(passes: int) -> None:
    def body(model: Any, critic: Any, maker: Any) -> None:
        for _ in range(passes):
            loss_of(model).backward()
        for optimizer in (critic, maker):
            optimizer.step()
            optimizer.zero_grad()

    assert _share(body) == 0


@pytest.mark.parametrize("detached", [True, False])
def test_players_step_by_turns(detached: bool) -> None:
    def body(model: Any, critic: Any, maker: Any) -> None:
        made = model[1](model[0](torch.ones(3, 4)))
        critic.zero_grad()
        model[2](made.detach() if detached else made).sum().backward()
        critic.step()
        maker.zero_grad()
        (-model(torch.ones(3, 4))).sum().backward()
        maker.step()

    assert _share(body) == 1


def test_players_that_step_together_have_gradients_from_different_passes() -> None:
    def body(model: Any, critic: Any, maker: Any) -> None:
        made = model[1](model[0](torch.ones(3, 4)))
        model[2](made.detach()).sum().backward()
        (-model[2](made)).sum().backward()
        for optimizer in (critic, maker):
            optimizer.step()
            optimizer.zero_grad()

    assert _share(body) == 1


def test_a_step_that_a_scaler_refuses_to_one_of_two_optimizers_makes_no_players() -> None:
    model = net()
    first, second = sgd(model[0]), sgd(model[2])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = watched(model, first, second, scaler=scaler)
    for step in range(6):
        scaler.scale(loss_of(model)).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = torch.inf
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert not any("by_turns" in record.context for record in monitor._runtime.pipeline.history.sampled())


@pytest.mark.parametrize(("kind", "told"), [(torch.optim.Adam, True), (torch.optim.Adagrad, True), (torch.optim.SGD, False)])
def test_a_training_that_goes_on_is_known_by_the_state_of_its_optimizer(kind: Any, told: bool) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3)

    def train() -> ModuleMonitor:
        monitor = watched(model, optimizer)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.detach()
        return monitor

    for monitor, expected in ((train(), False), (train(), told)):
        records = monitor._runtime.pipeline.history.sampled()
        assert ["goes_on" in record.context for record in records] == [expected, False, False]


@pytest.mark.parametrize(("of_ten", "is_told"), [(5, True), (6, False)])
def test_a_loss_at_rest_is_no_plateau_where_optimizers_alternate(of_ten: int, is_told: bool) -> None:
    run = history(loss=lambda step: 2.0 + 0.01 * (step % 3), context=lambda step: {"by_turns": 1.0} if step % 10 < of_ten else {})
    assert any(finding.rule == "loss-plateau" for finding in check_loss(run)) == is_told


@pytest.mark.parametrize(("name", "expected"), [("loss_d", True), ("loss/G", True), ("d_loss", True), ("loss_scale", False)])
def test_losses_of_a_gan_are_losses(name: str, expected: bool) -> None:
    key = Key("", name, "")
    assert (is_loss(key), is_whole_loss(key)) == (expected, False)


@pytest.mark.parametrize("name", ["loss_d", "train/loss_g", "loss"])
def test_a_loss_of_one_network_need_not_fall(name: str) -> None:
    key = Key("", name, "")
    assert is_loss_of_network(key) == (name != "loss")
    assert History([_with_loss(step, key) for step in range(3)]).need_not_fall == (name != "loss")


def _with_loss(step: int, key: Key) -> StepRecord:
    return StepRecord(step, 0.0, True, {key: 1.0}, {})
