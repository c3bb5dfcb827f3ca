"""Loops in which two optimizers step by turns, and each freezes what the other one trains."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

pytestmark = pytest.mark.thorough


def _model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"maker": nn.Linear(4, 12), "judge": nn.Linear(12, 1), "idle": nn.Linear(2, 2).requires_grad_(False)})


def _norm(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm().item()


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _turn(model: nn.ModuleDict, batch: Tensor, part: str, optimizer: torch.optim.Optimizer, clip: float) -> list[list[Tensor]]:
    """One backward pass and step of ``part``, while the other part is frozen; its gradients before and after clipping."""
    other = {"maker": "judge", "judge": "maker"}[part]
    model[part].requires_grad_(True)
    model[other].requires_grad_(False)
    made = model["maker"](batch[:, :4])
    loss = model["judge"](made).square().mean() if part == "maker" else (model["judge"](batch) - model["judge"](made)).mean()
    loss.backward()
    before = _gradients(model[part])
    nn.utils.clip_grad_norm_(model[part].parameters(), clip)
    after = _gradients(model[part])
    optimizer.step()
    optimizer.zero_grad()
    model[other].requires_grad_(True)
    return [before, after]


def _optimizers(model: nn.ModuleDict) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[part].parameters(), lr=0.1) for part in ("maker", "judge")]


def _batch(step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("every", [1, 3])
def test_what_parts_log_belongs_to_the_step_that_they_begin(every: int) -> None:
    """No hook sees the forward of a model that is called by its parts; in steps that are not monitored none sees its gradients either."""
    model = _model()
    optimizers, logged = _optimizers(model), {}
    monitor = gradmon.watch(model, *optimizers, every=every, on_spike=None)
    for step in range(8):
        logged[step] = 0.0
        for turn, (part, optimizer) in enumerate(zip(("maker", "judge"), optimizers, strict=True)):
            optimizer.zero_grad()
            out = model[part](torch.randn(8, next(model[part].parameters()).shape[1]))
            monitor.log_scalar("number", 10.0 * step + turn)
            logged[step] += (10 * step + turn) / 2
            out.square().mean().backward()
            optimizer.step()
    monitor.detach()
    found = {step: values["number"] for step, values in monitor.get_all_metrics().items()}
    assert found == {step: value for step, value in logged.items() if step % every == 0}


def test_parts_that_train_in_eval_mode_count_after_a_look() -> None:
    """A call in training mode without a backward pass opens the step, and its own calls are in evaluation mode."""
    model = _model().eval()
    optimizers = _optimizers(model)
    monitor = gradmon.ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    monitor.attach(*optimizers)
    for step in range(4):
        outputs: list[Tensor] = []
        if step:
            model.train()
            outputs.append(model["maker"](torch.randn(8, 4)))
            model.eval()
        for part, optimizer in zip(("maker", "judge"), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(model["maker"](torch.randn(8, 4)))
            (outputs[-1] if part == "maker" else model["judge"](outputs[-1])).square().mean().backward()
            optimizer.step()
        norm = torch.cat([out.detach().double().flatten() for out in outputs]).norm().item()
        assert monitor.get_step_metrics()["activation/maker/norm"] == pytest.approx(norm, rel=1e-6), step


@pytest.mark.parametrize("first", ["maker", "judge"])
def test_both_parts_are_measured_before_and_after_clipping(first: str) -> None:
    model = _model()
    optimizers = dict(zip(("maker", "judge"), _optimizers(model), strict=True))
    turns = (first, "judge" if first == "maker" else "maker")
    monitor = gradmon.ModuleMonitor(model, preset="standard")
    monitor.add_gradient_metric("norm")
    monitor.attach(*(optimizers[part] for part in turns))
    for step in range(3):
        start = [p.detach().clone() for part in turns for p in model[part].parameters()]
        seen = [_turn(model, _batch(step), part, optimizers[part], 1e-3) for part in turns]
        updates = [
            p.detach() - before for p, before in zip([p for part in turns for p in model[part].parameters()], start, strict=True)
        ]
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(_norm([g for before, _ in seen for g in before]), rel=1e-6)
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(_norm([g for _, after in seen for g in after]), rel=1e-6)
        assert values["gradmon/param_norm"] == pytest.approx(_norm(start), rel=1e-6), "of both, and not of the idle part"
        if step == 0:
            assert values["gradmon/update_norm"] == pytest.approx(_norm(updates), rel=1e-5)
        for part, each in zip(turns, seen, strict=True):
            for source, gradients in zip(("gradient_before_clip", "gradient"), each, strict=True):
                found = math.hypot(values[f"{source}/{part}.weight/norm"], values[f"{source}/{part}.bias/norm"])
                assert found == pytest.approx(_norm(gradients), rel=1e-6)
    assert not any("idle" in key for key in values)


@pytest.mark.parametrize("full", [False, True])
def test_a_part_that_begins_later_or_rests_costs_no_steps(full: bool) -> None:
    model = _model()
    maker, judge = _optimizers(model)
    with pytest.warns(
        gradmon.GradmonWarning, match=r"optimizer 2 of 2 \(SGD\), whose step ends a monitored one, rests.*optimizer 1 of 2"
    ):
        monitor = gradmon.watch(model, maker, judge, on_spike=None, preset="full" if full else "standard")
        for step in range(40):
            _turn(model, _batch(step), "maker", maker, 1.0)
    assert monitor.last_record.step == 39
    assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0
    monitor.detach()


def test_when_a_part_begins_later_each_iteration_is_one_step_again() -> None:
    model = _model()
    maker, judge = _optimizers(model)
    with pytest.warns(gradmon.GradmonWarning, match="until it steps, optimizer 1 of 2"):
        monitor = gradmon.watch(model, maker, judge, on_spike=None)
        for step in range(20):
            _turn(model, _batch(step), "maker", maker, 1.0)
    for step in range(20, 40):
        norms = [*_turn(model, _batch(step), "maker", maker, 1.0)[:1], *_turn(model, _batch(step), "judge", judge, 1.0)[:1]]
        monitor.log_scalar("iteration", float(step))
        values = monitor.get_step_metrics()
        assert values["iteration"] == step
        if step > 20:  # the first step of the judge ends a step of its own
            assert values["gradmon/grad_norm"] == pytest.approx(_norm([g for part in norms for g in part]), rel=1e-6)


def test_an_optimizer_that_accumulates_over_many_steps_is_awaited() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    often, seldom = (torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model)
    monitor = gradmon.watch(model, often, seldom, on_spike=None)
    monitor.add_gradient_metric("norm")
    for iteration in range(64):
        often.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        often.step()
        if iteration % 16 == 15:
            norm = _norm(_gradients(model[1]))
            seldom.step()
            values = monitor.get_step_metrics()
            assert math.hypot(values["gradient/1.weight/norm"], values["gradient/1.bias/norm"]) == pytest.approx(norm, rel=1e-6)
            seldom.zero_grad()
    assert monitor.last_record.step == 3


@pytest.mark.parametrize("judge_first", [False, True])
@pytest.mark.parametrize("late", [12, 60])
def test_a_late_judge_has_no_part_in_steps_before_it(late: int, judge_first: bool) -> None:
    """Its gradients accumulate until then, from the passes of the maker, and it clears them before its first pass."""
    model = _model()
    maker, judge = (torch.optim.Adam(model[part].parameters(), lr=1e-3) for part in ("maker", "judge"))
    monitor = gradmon.watch(model, *((judge, maker) if judge_first else (maker, judge)), on_spike=None)
    norms, records = [], []
    monitor.add_sink(lambda values, step: records.append(values))

    def turn(part: str, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        loss = model["judge"](model["maker"](batch[:, :4])).square().mean()
        (loss if part == "maker" else loss - model["judge"](batch).mean()).backward()
        before = _gradients(model[part])
        nn.utils.clip_grad_norm_(model[part].parameters(), 0.5 * _norm(before))
        optimizer.step()
        return before

    for step in range(late + 8):
        turns = [("maker", maker), ("judge", judge)][:: -1 if judge_first else 1]
        found = [turn(part, optimizer, _batch(step)) for part, optimizer in turns if step >= late or part == "maker"]
        norms.append(_norm([g for each in found for g in each]))
        monitor.log_scalar("iteration", step)
    monitor.detach()
    assert [values["iteration"] for values in records] == list(range(late + 8))
    assert [values["gradmon/grad_norm"] for values in records] == pytest.approx(norms, rel=1e-5)
    assert [values["gradmon/grad_norm_after_clip"] for values in records] == pytest.approx([norm / 2 for norm in norms], rel=1e-4)


def test_clearing_gradients_of_a_late_judge_keeps_all_records() -> None:
    """The remedy that the warning of joined steps names, in a loop that otherwise clears with set_to_none=False."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    often, late = (torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model)
    monitor = gradmon.watch(model, often, late, on_spike=None)
    for iteration in range(40):
        for optimizer in [often, late][: 1 + (iteration >= 30)]:
            optimizer.zero_grad(set_to_none=iteration == 30)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert monitor.last_record.step == 39


def test_nothing_changes_and_nothing_is_left_behind() -> None:
    ends = []
    for watched in (False, True):
        model = _model()
        optimizers = _optimizers(model)
        monitor = gradmon.ModuleMonitor(model, preset="full")
        if watched:
            monitor.attach(*optimizers)
        for step in range(4):
            for part, optimizer in zip(("maker", "judge"), optimizers, strict=True):
                _turn(model, _batch(step), part, optimizer, 0.5)
                assert all(p.requires_grad for p in [*model["maker"].parameters(), *model["judge"].parameters()])
                assert not any(p.requires_grad for p in model["idle"].parameters())
        monitor.detach()
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_part_that_is_frozen_for_good_counts_no_more() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which has the frozen ones too
    monitor = gradmon.watch(model, optimizer, every=1)
    for step in range(3):
        if step == 1:
            model["maker"].requires_grad_(False)
        trained = [p for part in ("maker", "judge") for p in model[part].parameters() if p.requires_grad]
        expected = _norm([p.detach() for p in trained])
        optimizer.zero_grad()
        model["judge"](model["maker"](_batch(step)[:, :4])).square().mean().backward()
        gradients = _norm([p.grad for p in trained if p.grad is not None])
        optimizer.step()
        values = monitor.get_step_metrics()
        assert values["gradmon/param_norm"] == pytest.approx(expected, rel=1e-6)
        assert values["gradmon/grad_norm"] == pytest.approx(gradients, rel=1e-6)


def test_integers_that_an_optimizer_has_are_left_alone() -> None:
    model = _model()
    model["idle"].register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    model["judge"](model["maker"](_batch(0)[:, :4])).square().mean().backward()
    optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0


def test_what_comes_in_the_turn_of_another_is_not_before_the_clip() -> None:
    """A hook of the loop's own behind the accumulation is where an optimizer might step in the backward pass, and none does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    monitor = gradmon.ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.attach(*optimizers)
    for step in range(2):
        for optimizer, batch, target in zip(optimizers, _batch(step).split(4), (1.0, -1.0), strict=False):
            model.zero_grad()
            (model(batch[:, :4]) - target).square().mean().backward()  # which brings gradients to both parts
            optimizer.step()
        values = monitor.get_step_metrics()
        for name, _ in model.named_parameters():
            assert values[f"gradient_before_clip/{name}/norm"] == values[f"gradient/{name}/norm"], f"{name} in step {step}"


def _phases(
    phases: str, watched: str = "ab", *, shares: bool = False, log_first: bool = False, every: int = 1, **options: object
) -> gradmon.ModuleMonitor:
    """One iteration for each letter: its optimizer steps, with all that a loop does. Returns the monitor, detached."""
    torch.manual_seed(0)
    model = nn.ModuleDict({part: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for part in "abc"})
    optimizers = {part: torch.optim.SGD((model if shares else model[part]).parameters(), lr=0.1) for part in "abc"}
    monitor = gradmon.watch(model, *(optimizers[part] for part in watched), on_spike=None, every=every, preset="full", **options)
    monitor.add_gradient_metric("middle", lambda g: g.median(), stages=("before_clip", "after_clip"))
    monitor.add_parameter_metric("middle", lambda p: p.median())
    monitor.add_update_metric("norm")
    monitor.add_activation_metric("std")
    for number, part in enumerate(phases):
        if log_first:
            monitor.log_scalar("number", float(number))
        loss = sum((model[each](_batch(number)[:, :4]).square().mean() for each in ("abc" if shares else part)), torch.zeros(()))
        optimizers[part].zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        nn.utils.clip_grad_norm_([p for group in optimizers[part].param_groups for p in group["params"]], 0.5)
        optimizers[part].step()
        if not log_first:
            monitor.log_scalar("number", float(number))
            monitor.log_context(part=part)
    monitor.detach()
    return monitor


def _values(monitor: gradmon.ModuleMonitor) -> list[tuple[int, dict[str, float]]]:
    """Those of each step, without what depends on the clock and on the number of optimizers."""
    return [
        (step, {key: value for key, value in values.items() if "overhead" not in key and "group_" not in key})
        for step, values in monitor.get_all_metrics().items()
    ]


@pytest.mark.parametrize("log_first", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("steps", [3, 10, 15])
def test_steps_while_the_last_optimizer_rests_are_whole(steps: int, shares: bool, log_first: bool) -> None:
    """As if the other one were not there."""
    alone = _values(_phases("a" * steps, "a", shares=shares, log_first=log_first))
    if not shares and steps > 10:
        with pytest.warns(gradmon.GradmonWarning, match="rests while others step"):
            both = _values(_phases("a" * steps, "ab", shares=shares, log_first=log_first))
    else:
        both = _values(_phases("a" * steps, "ab", shares=shares, log_first=log_first))
    assert [step for step, _ in both] == [step for step, _ in alone] == list(range(steps))
    for (step, here), (_, there) in zip(both, alone, strict=True):
        missing = {key for key in there if key not in here}
        assert not missing, f"step {step} has no {sorted(missing)[:5]}"
        if shares:
            assert here == pytest.approx(there, nan_ok=True), f"step {step}"


@pytest.mark.parametrize(
    ("phases", "watched", "shares", "steps"),
    [
        ("a" * 60 + "b" * 30, "ab", True, 90),  # of one model, as in physics-informed training
        ("a" * 20 + "b" * 2 + "a" * 20, "ab", True, 42),  # polished now and then
        ("b" * 15 + "a" * 15, "ab", True, 30),  # as after a resume
        (("a" * 20 + "b" * 20) * 2, "ab", False, 80),
        (("a" * 12 + "b" * 12 + "c" * 12) * 2, "abc", False, 72),
        ("a" * 15 + "ab" * 5, "ab", False, 21),  # it begins later: its first step is one of its own
        ("ab" * 5 + "a" * 15, "ab", False, 19),  # the first round without it is known by its second half
        ("aaaaab" * 4, "ab", False, 4),  # of a GAN
        ("aab" * 4 + "aaab" * 2, "ab", False, 6),
    ],
)
@pytest.mark.filterwarnings("ignore:.*rests while others step")
def test_each_step_has_a_record_in_phases_and_rounds(phases: str, watched: str, shares: bool, steps: int) -> None:
    monitor = _phases(phases, watched, shares=shares)
    history = monitor.get_all_metrics()
    assert [*history] == list(range(steps))
    assert monitor.last_record.step == steps - 1
    if steps == len(phases):
        assert [values["number"] for values in history.values()] == list(range(steps))


def test_a_step_set_aside_keeps_the_cadence_of_its_number() -> None:
    monitor = _phases("a" * 20, "ab", shares=True, every=3)
    assert [*monitor.get_all_metrics()] == [0, 3, 6, 9, 12, 15, 18]


def test_a_run_that_is_saved_while_the_last_optimizer_rests_goes_on_at_its_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    monitor = gradmon.watch(model, *optimizers, on_spike=None)
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizers[0].step()
        model.zero_grad()
    saved = monitor.state_dict()
    monitor.detach()
    assert monitor.last_record.step == 4
    again = gradmon.watch(model, *optimizers, on_spike=None)
    again.load_state_dict(saved)
    model(torch.randn(8, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert again.last_record.step == 5
    again.detach()


@pytest.mark.parametrize("frozen", [True, False])
def test_the_gradients_of_a_part_that_begins_late_are_no_spike(frozen: bool) -> None:
    model = _model()
    optimizers = _optimizers(model)
    monitor = gradmon.watch(model, *optimizers, on_spike="warn")
    model["judge"].requires_grad_(not frozen)  # or it has gradients, and nothing steps it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(rests while others step|counts so|of the time of this loop)")
        for step in range(80):
            if step == 60:
                model["judge"].requires_grad_(True)
            made = model["maker"](_batch(step)[:, :4])
            for optimizer in optimizers:
                optimizer.zero_grad()
            (made.square().mean() + 100 * model["judge"](made.detach()).mean() * (step >= 60)).backward()
            for optimizer in optimizers[: 1 + (step >= 60)]:
                optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] > 10
    monitor.detach()


def test_a_step_that_waits_for_an_optimizer_is_told() -> None:
    model = _model()
    optimizers = _optimizers(model)
    monitor = gradmon.watch(model, *optimizers, on_spike=None)
    for step in range(3):
        model["maker"](_batch(step)[:, :4]).sum().backward()
        optimizers[0].step()
    why = monitor.diagnose().unseen["everything"]
    assert "step 0 is open until all attached optimizers have stepped; one of them has stepped 3 times so far" in why
    monitor.detach()
