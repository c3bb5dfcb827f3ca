"""Loops that look like a mistake and are none, each beside the mistake that it looks like."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

pytestmark = pytest.mark.thorough

STEPS = 40
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, **options)


def rules(monitor: ModuleMonitor) -> list[str]:
    return sorted(fact.rule for fact in monitor._runtime.built_in.audit.facts())


def watched(model: nn.Module, *optimizers: Any, **options: Any) -> ModuleMonitor:
    if options.get("preset", "") is None:  # which would miss gradients that no backward pass has made
        return ModuleMonitor(model).attach(*optimizers)
    return gradmon.watch(model, *optimizers, **{"preset": "minimal", "on_spike": None, **options})


def run(body: Callable[[nn.Module, Any], None], steps: int = STEPS, **options: Any) -> list[str]:
    """What is seen where ``body`` is all that a step does."""
    model = net()
    optimizer = sgd(model, momentum=0.9)
    monitor = watched(model, optimizer, **options)
    for _ in range(steps):
        body(model, optimizer)
    found = rules(monitor)
    monitor.detach()
    assert monitor.warning_counts() == {}
    return found


# --- gradients that are kept from step to step


@pytest.mark.parametrize("every", [1, 7])
def test_gradients_that_nobody_clears_are_a_mistake_on_every_cadence(every: int) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, every=every)
    with pytest.warns(gradmon.GradmonWarning, match=r"not cleared between two steps.*optimizer\.zero_grad\(\)") as told:
        for _ in range(STEPS):
            loss_of(model).backward()
            optimizer.step()
    assert len(told) == 1
    (fact,) = monitor._runtime.built_in.audit.facts()
    assert (fact.rule, fact.first, fact.last, fact.count) == ("missing-zero-grad", 1, STEPS - 1, STEPS - 1)
    assert fact.where == ()  # all parameters of the only optimizer


def test_a_mistake_with_one_of_several_optimizers_shows_one_of_its_parameters() -> None:
    model = net()
    forgotten, cleared = torch.optim.SGD(model[0].parameters(), lr=1e-3), torch.optim.SGD(model[2].parameters(), lr=1e-3)
    monitor = gradmon.watch(model, forgotten, cleared)
    with pytest.warns(gradmon.GradmonWarning, match="not cleared between two steps"):
        for _ in range(STEPS):
            cleared.zero_grad()
            loss_of(model).backward()
            forgotten.step()
            cleared.step()
    (fact,) = monitor._runtime.built_in.audit.facts()
    assert (fact.rule, fact.where) == ("missing-zero-grad", ("0.bias",))
    monitor.detach()


def test_gradients_that_are_cleared_by_way_of_data_are_cleared() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()  # which no version counter shows
        loss_of(model).backward()
        optimizer.step()

    assert run(body) == []


@pytest.mark.parametrize("is_new", [True, False])
def test_gradients_that_are_written_by_way_of_data_are_new_ones(is_new: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    monitor = watched(model, optimizer, preset=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            for parameter in model.parameters():  # as of an evolution strategy, or from a worker
                assert parameter.grad is not None
                parameter.grad.data.fill_(step if is_new else 1)
            optimizer.step()
    assert rules(monitor) == ([] if is_new else ["stepped-twice"])


def test_a_share_of_the_gradient_that_is_carried_over_is_meant() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        loss_of(model).backward()
        optimizer.step()

    assert run(body) == []


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before forward", "before backward", "after step"])
def test_gradients_may_be_cleared_anywhere(when: str, to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        if when == "before forward":
            optimizer.zero_grad(to_none)
        loss = loss_of(model)
        if when == "before backward":
            optimizer.zero_grad(to_none)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if when == "after step":
            model.zero_grad(to_none)

    assert run(body) == []


# --- several backward passes in a step


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attack_on_the_inputs_clears_the_gradients_that_it_does_not_need(when: str, to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        moved = torch.zeros_like(X, requires_grad=True)
        for _ in range(4):
            if when == "before":
                optimizer.zero_grad(to_none)
            loss_of(model, X + moved).backward()
            if when == "after":
                model.zero_grad(to_none)
            moved = (moved + 0.1 * moved.grad.sign()).detach().requires_grad_()
        optimizer.zero_grad(to_none)
        loss_of(model, X + moved.detach()).backward()
        optimizer.step()

    assert run(body) == []


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("ascents", [1, 3])
def test_ascents_of_sharpness_aware_minimisation_are_cleared_on_purpose(ascents: int, to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        old = [p.detach().clone() for p in model.parameters()]
        for _ in range(ascents):
            optimizer.zero_grad(to_none)
            loss_of(model).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * p.grad)
        optimizer.zero_grad(to_none)
        loss_of(model).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), old, strict=True):
                p.copy_(value)
        optimizer.step()

    assert run(body) == []


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_are_no_mistake(micro: int, to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad(to_none)
        for x in X.chunk(micro):
            loss_of(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    assert run(body) == []


@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_that_are_cleared_are_one(to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for x in X.chunk(4):
            optimizer.zero_grad(to_none)
            loss_of(model, x).backward()
        optimizer.step()

    assert run(body) == ["micro-batch-discarded"]


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_clip_at_each_micro_batch_is_told_apart_from_clearing(clip: Any) -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        for x in X.chunk(4):
            loss_of(model, x).backward()
            clip(model.parameters(), 0.01)
        optimizer.step()

    assert run(body) == ["clip-per-micro-batch"]


def test_a_running_mean_of_micro_batches_is_no_clip() -> None:
    """It multiplies by 1/2, 2/3, 3/4."""

    def body(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        for count, x in enumerate(X.chunk(4)):
            if count:
                for p in model.parameters():
                    p.grad.mul_(count / (count + 1))
            (loss_of(model, x) / (count + 1)).backward()
        optimizer.step()

    assert run(body) == []


def test_gradients_of_gradients() -> None:
    def penalised(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of(model)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()
        optimizer.step()

    assert run(penalised) == []


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_of_gradients_makes_new_ones_each_time() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for x in X.chunk(4):
            loss_of(model, x).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    assert run(body) == []


def test_probing_with_autograd_grad_is_not_seen() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        for x in X.chunk(4):
            torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        loss_of(model).backward()
        optimizer.step()

    assert run(body) == []


def test_a_gradient_that_is_looked_at_and_cleared_once_in_a_step_may_be_meant() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        loss_of(model, X[:4]).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert run(body) == []


@pytest.mark.filterwarnings("ignore:torch_gradmon.*the spike detector of grad_norm has nothing to judge")
def test_gradients_that_are_put_together_by_hand_are_no_discarded_ones() -> None:
    """As in the surgery of conflicting gradients of several tasks."""

    def body(model: nn.Module, optimizer: Any) -> None:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x in X.chunk(4):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            for old, p in zip(total, model.parameters(), strict=True):
                old.add_(p.grad)
        for new, p in zip(total, model.parameters(), strict=True):
            p.grad = new
        optimizer.step()

    model = net()
    optimizer = sgd(model, momentum=0.9)
    monitor = watched(model, optimizer)
    for _ in range(STEPS):
        body(model, optimizer)
    assert rules(monitor) == []
    assert monitor.warning_counts() == {"signal:grad_norm": 1}  # their norm before a clip is unknown
    monitor.detach()


def test_a_move_between_two_passes_is_sharpness_aware() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        moves = []
        for _ in range(3):  # several times uphill
            optimizer.zero_grad()
            loss_of(model).backward()
            with torch.no_grad():
                moves.append([p.grad * 0.1 for p in model.parameters()])
                for p, move in zip(model.parameters(), moves[-1], strict=True):
                    p.add_(move)
        optimizer.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for each in moves:
                for p, move in zip(model.parameters(), each, strict=True):
                    p.sub_(move)
        optimizer.step()

    assert run(body) == []


# --- steps


def test_a_step_with_nothing_to_use() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    with pytest.warns(gradmon.GradmonWarning, match=r"all gradients are None.*zero_grad\(\) before it"):
        for _ in range(4):
            loss_of(model).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert rules(monitor) == ["step-without-gradients"]


def test_a_loss_that_is_a_new_tensor_reaches_no_parameter() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, preset=None)
    with pytest.warns(gradmon.GradmonWarning, match="all gradients are None.*not on a copy or a new tensor"):
        for _ in range(14):
            optimizer.zero_grad()
            torch.tensor(loss_of(model).item(), requires_grad=True).backward()
            optimizer.step()
    assert rules(monitor) == ["step-without-gradients"]


@pytest.mark.parametrize("kind", ["one of two optimizers waits", "an optimizer of one's own"])
def test_steps_without_gradients_that_may_be_meant(kind: str) -> None:
    class Perturbed(torch.optim.SGD):
        """Takes no gradients."""

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1e-3 * torch.randn_like(parameter))

    model = net()
    parts = [list(child.parameters()) for child in model if list(child.parameters())]
    optimizers = [torch.optim.SGD(part, 0.1) for part in parts]
    if kind == "an optimizer of one's own":
        optimizers = [Perturbed(model.parameters(), 0.1)]
    monitor = watched(model, *optimizers, preset=None)
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if len(optimizers) > 1:
            grads = torch.autograd.grad(loss_of(model), parts[-1])
            for parameter, gradient in zip(parts[-1], grads, strict=True):
                parameter.grad = gradient
        else:
            loss_of(model)
        for optimizer in optimizers:
            optimizer.step()
    assert rules(monitor) == []


@pytest.mark.parametrize(
    "kind", ["twice", "scaled", "again in a sum", "mean", "weighted", "checkpointed", "running", "shared", "stale"]
)
def test_a_graph_that_goes_backward_again(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2)) if kind in ("stale", "running", "shared") else net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, preset=None)
    loss = model(X).mean()
    once = model(X)
    with pytest.warns(gradmon.GradmonWarning, match="goes backward more than once"):
        for step in range(20):
            optimizer.zero_grad()
            if kind == "twice":
                loss = loss_of(model, X + step)
                loss.backward(retain_graph=True)
            elif kind == "scaled":
                loss = loss_of(model, X + step)
                (2 * loss).backward(retain_graph=True)
            elif kind == "again in a sum":
                out = model(X + step)
                loss = out.square().mean()
                loss.backward(retain_graph=True)
                loss = out.mean() / 2 + loss
            elif kind == "mean":
                each = model(X + step).square()
                each.mean().backward(retain_graph=True)
                loss = each.mean()
            elif kind == "weighted":
                loss = loss_of(model, X + step)
                loss.backward(torch.ones_like(loss), retain_graph=True)
            elif kind == "shared":  # computed once, as an embedding that is propagated before the loop
                loss = (once - step).square().mean()
            elif kind == "running":
                loss = loss + 1e-3 * loss_of(model, X + step)
            elif kind == "checkpointed":
                loss = torch.utils.checkpoint.checkpoint(model, X + step, use_reentrant=False).square().mean()
                loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            optimizer.step()
    assert rules(monitor) == ["backward-twice"]


@pytest.mark.parametrize(
    "kind",
    ["two absolute errors", "forward()", "functional", "no model", "inputs", "rows", "cleared", "shared", "advantages", "edge"],
)
def test_equal_gradients_are_no_proof_of_a_second_backward_pass(kind: str) -> None:
    """Those of absolute errors and linear losses are equal for many targets, parts of parameters have their own passes, and so do the
    outputs of a loss that is no number."""
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = sgd(model)
    monitor = watched(model, optimizer, preset=None)
    for _ in range(40):
        optimizer.zero_grad()
        if kind in ("forward()", "functional"):
            out = model.forward(X) if kind == "forward()" else nn.functional.linear(X, model[0].weight, model[0].bias)
            (out - 50).abs().mean().backward()
        elif kind == "no model":
            model[0].bias.sum().backward()
            (model[0].weight.sum() + 3 * model[0].bias.sum()).backward()
        else:
            out = model(X)
            loss = (out - 50).abs().mean()
            if kind == "two absolute errors":
                loss.backward(retain_graph=True)
                (out - 60).abs().mean().backward()
            elif kind == "inputs":
                loss.backward(inputs=[model[0].bias], retain_graph=True)
                loss.backward(inputs=[model[0].weight])
            elif kind == "shared":
                penalty = out.square().mean()
                ((loss + penalty) / 2).backward(retain_graph=True)
                (((out - 60).abs().mean() + penalty) / 2).backward()
            elif kind == "advantages":
                (out * torch.rand(out.shape)).sum().backward(retain_graph=True)
                (out * torch.rand(out.shape)).sum().backward()
            elif kind == "edge":
                loss.backward(retain_graph=True)
                # in a list, since torch takes one alone only from 2.7 on
                torch.autograd.backward([torch.autograd.graph.get_gradient_edge((out - 60).abs().mean())])
            elif kind == "rows":
                rows = out.mean(0)
                rows.backward(torch.tensor([1.0, 0.0]), retain_graph=True)
                rows.backward(torch.tensor([0.0, 2.0]))
            else:
                loss.backward(retain_graph=True)
                optimizer.zero_grad()
                loss.backward()
        optimizer.step()
    assert rules(monitor) == []


def test_looking_for_the_loss_keeps_nothing_alive() -> None:
    """Frames of Python refer to all that a caller holds, and to themselves if they are kept."""
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, preset=None)
    kept: list[weakref.ref[Tensor]] = []

    def one(step: int) -> None:
        x = X + step
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.square().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.extend((weakref.ref(x), weakref.ref(loss)))

    gc.collect()
    gc.disable()
    try:
        for step in range(20):
            one(step)
        assert [each for each in kept if each() is not None] == []
    finally:
        gc.enable()
    monitor.detach()


@pytest.mark.parametrize("kind", ["two losses", "accumulation", "weights alone", "no gradient"])
def test_several_backward_passes_that_are_meant(kind: str) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer, preset=None)
    model(X)
    for step in range(30):
        optimizer.zero_grad()
        if kind == "two losses":
            out = model(X)
            out.square().mean().backward(retain_graph=True)
            out.mean().backward()
        elif kind == "accumulation":
            for part in (X, 2 * X, X + step):
                loss_of(model, part).backward()
        elif kind == "weights alone":
            (
                model[0].weight.square().sum() + model[0].bias.sin().sum() + model[2].weight.sum() + model[2].bias.square().sum()
            ).backward()
        else:
            out = model(X) * 0
            out.mean().backward(retain_graph=True)
            out.square().mean().backward()
        optimizer.step()
    assert rules(monitor) == []


def test_a_batch_that_is_left_out_now_and_then_is_no_mistake() -> None:
    state = {"step": 0}

    def body(model: nn.Module, optimizer: Any) -> None:
        state["step"] += 1
        optimizer.zero_grad()
        loss_of(model).backward()
        if state["step"] % 4 in (2, 3):  # a spike: two steps in a row
            optimizer.zero_grad()
        if state["step"] % 8 != 7:
            optimizer.step()

    assert run(body) == []


def test_a_closure_is_followed_no_further_than_it_can_be() -> None:
    for kind in (torch.optim.LBFGS, torch.optim.SGD):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        monitor = watched(model, optimizer)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
        assert rules(monitor) == []
        monitor.detach()


class _Loop:
    """A loop whose step calls a closure, as that of Lightning is."""

    clears, clips, gives = True, False, True

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def closure(self) -> Tensor:
        loss = loss_of(self.model)
        if self.clears:
            self.optimizer.zero_grad()
        if self.gives:
            loss.backward()
        return loss.detach()

    def train(self, micro: int = 1) -> list[str]:
        monitor = watched(self.model, self.optimizer)
        for _ in range(STEPS):
            for _ in range(micro - 1):
                loss_of(self.model).backward()
            self.optimizer.step(self.closure)
            if self.clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            if micro > 1:
                self.optimizer.zero_grad()
        return rules(monitor)


@pytest.mark.parametrize(
    ("settings", "micro", "expected"),
    [
        ({}, 1, []),
        ({"clears": False}, 3, []),  # between the micro-batches
        ({"clears": False}, 1, ["missing-zero-grad"]),
        ({"clips": True}, 1, ["clip-after-step"]),
        ({"gives": False}, 1, ["step-without-gradients"]),
    ],
)
@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_mistakes_around_a_step_with_a_closure(settings: dict[str, bool], micro: int, expected: list[str]) -> None:
    loop = _Loop()
    for name, value in settings.items():
        setattr(loop, name, value)
    assert loop.train(micro) == expected


def test_a_second_step_needs_a_forward_in_between() -> None:
    """Gradients may be made by hand, and written where no version counter sees it."""

    def body(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            loss_of(model)
        loss_of(model)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.data.copy_(torch.ones_like(p))
        optimizer.step()

    assert run(body, preset=None) == []


def test_two_steps_are_a_mistake_only_of_the_optimizer_that_takes_both() -> None:
    def both(twice: bool) -> list[str]:
        model = net()
        first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
        monitor = watched(model, first, second)
        for _ in range(6):
            model.zero_grad()
            loss_of(model).backward()
            first.step()
            second.step()
            if twice:
                second.step()
        return rules(monitor)

    assert both(twice=False) == []
    with pytest.warns(gradmon.GradmonWarning, match="steps twice on the same gradient"):
        assert both(twice=True) == ["stepped-twice"]


@pytest.mark.parametrize("watches", ["both", "critic"])
def test_a_game_of_two_leaves_gradients_behind_that_are_cleared_later(watches: str) -> None:
    """The generator's backward goes through the critic, whose gradients are cleared when it is its turn."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), net()
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    first, second = sgd(critic), sgd(generator)
    monitor = watched(models, first, second) if watches == "both" else watched(critic, first)
    for _ in range(STEPS):
        noise = torch.randn(16, 3)
        first.zero_grad()
        (loss_of(critic) - loss_of(critic, generator(noise).detach())).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        first.step()
        second.zero_grad()
        loss_of(critic, generator(noise)).backward()
        second.step()
    assert rules(monitor) == []


def test_never_stepped_is_said_only_as_long_as_it_is_true() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
    (fact,) = monitor._runtime.built_in.audit.facts()
    assert (fact.rule, fact.evidence) == ("never-stepped", {"backward passes": STEPS})
    assert "Call optimizer.step()" in str(monitor.diagnose())
    optimizer.step()
    assert rules(monitor) == []


@pytest.mark.parametrize(("clears", "passes", "is_so"), [(True, 120, True), (False, 120, False), (False, 500, True)])
def test_sums_that_are_cleared_before_the_step_that_never_comes(clears: bool, passes: int, is_so: bool) -> None:
    """A window of accumulation that is longer than an epoch; one long window may be a large batch, but not of hundreds of passes."""
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(passes):
        if clears and step % 40 == 0:
            optimizer.zero_grad()
        loss_of(model).backward()
    assert rules(monitor) == ["never-stepped"] * is_so
    assert ("never-stepped" in str(monitor.diagnose())) == is_so


def test_a_training_by_hand_steps_without_the_attached_optimizer_and_is_not_idle() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    with pytest.warns(gradmon.GradmonWarning, match="the attached optimizer does not step"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            for p in model.parameters():
                p.data = p.data - 0.01 * p.grad
    assert rules(monitor) == ["unattached-optimizer"]


def test_a_very_large_batch_is_no_training_without_steps() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for _ in range(200):
            loss_of(model, X[:1]).backward()

    assert run(body, steps=1) == []


# --- what is written behind a step


def test_gradients_that_are_changed_behind_a_step_and_used_are_no_late_clip() -> None:
    def late(model: nn.Module, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.zero_grad()

    def cleared_twice(model: nn.Module, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.zero_grad()

    def clipped_and_squared(model: nn.Module, optimizer: Any) -> None:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        for p in model.parameters():
            p.grad.square_()  # as an estimate of something
        optimizer.zero_grad()

    def worked_on(model: nn.Module, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        for p in model.parameters():
            for _ in range(5):  # more often than a clip or two do
                p.grad.mul_(0.9)
        optimizer.zero_grad()

    assert run(cleared_twice) == run(clipped_and_squared) == run(worked_on) == []
    with pytest.warns(gradmon.GradmonWarning, match="a clip there has no effect"):
        model = net()
        optimizer = sgd(model)
        monitor = watched(model, optimizer)
        for _ in range(6):
            late(model, optimizer)
    assert rules(monitor) == ["clip-after-step"]


# --- under a scaler


def _scaled(body: Callable[..., None], steps: int = STEPS, named: bool = True, fused: bool = False, **options: Any) -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", **options)
    monitor = watched(model, optimizer, scaler=scaler if named else None)
    for step in range(steps):
        optimizer.zero_grad()
        body(model, optimizer, scaler, step)
        scaler.step(optimizer)
        scaler.update()
    found = rules(monitor)
    monitor.detach()
    return found


def _clips(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_clip_of_scaled_gradients(named: bool, fused: bool) -> None:
    warned = "clipped while they are still multiplied" if named else "clipped while|GradScaler was noticed"
    with pytest.warns(gradmon.GradmonWarning, match=warned):
        assert _scaled(_clips, named=named, fused=fused) == ["clipped-while-scaled"]


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_may_be_divided_and_unscaled_ones_clipped(fused: bool) -> None:
    def divides(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        scaler.scale(loss_of(model, X[step % 8 :])).backward()
        for p in model.parameters():
            p.grad.div_(4)

    def unscales(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    assert _scaled(divides, fused=fused) == _scaled(unscales, fused=fused) == []


def test_steps_that_overflow_are_no_mistake() -> None:
    """Neither discarded micro-batches nor steps that never come; and the scale falls by half each time."""

    def overflows(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        loss = loss_of(model)
        scaler.scale(loss * (float("inf") if step < 36 else 1.0)).backward()

    assert _scaled(overflows) == []


def test_a_second_loss_behind_unscale_may_be_unscaled() -> None:
    def right(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        (0.1 * sum(p.square().sum() for p in model.parameters())).backward()

    def wrong(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.scale(0.1 * sum(p.square().sum() for p in model.parameters())).backward()

    def wrong_for_a_part(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.scale(0.1 * model[0].weight.square().sum()).backward()

    assert _scaled(right) == []
    for each in (wrong, wrong_for_a_part):
        with pytest.warns(gradmon.GradmonWarning, match=r"after scaler\.unscale_\(\)"):
            assert _scaled(each) == ["backward-after-unscale"]


# --- whose parameters


def test_a_frozen_trunk_is_no_mistake() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    monitor = watched(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        optimizer.step()
    assert rules(monitor) == []


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}], ids=["plain", "momentum", "decay"])
def test_what_is_frozen_with_zeros_is_told_of_where_it_moves(options: dict[str, float]) -> None:
    model = net()
    optimizer = sgd(model, **options)
    monitor = watched(model, optimizer, every=10)

    def train() -> None:
        for step in range(60):
            if step == 5:
                model[0].requires_grad_(False)
            optimizer.zero_grad(set_to_none=False)
            loss_of(model).backward()
            optimizer.step()

    if options:
        with pytest.warns(gradmon.GradmonWarning, match="requires_grad=False still move"):
            train()
    else:
        train()
    assert rules(monitor) == ["frozen-but-moving"] * bool(options)


def test_parameters_of_an_optimizer_that_nobody_named_are_not_nobodys() -> None:
    model = net()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    monitor = watched(model, first)
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model).backward()
        first.step()
        second.step()
    assert rules(monitor) == []


def test_parameters_that_nobody_has_are_told_of_until_somebody_has_them() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    monitor = watched(model, optimizer)

    def train() -> None:
        for _ in range(STEPS):
            model.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    train()
    (finding,) = [f for f in monitor.diagnose().findings if f.rule == "not-in-optimizer"]
    assert (finding.severity, finding.where, finding.evidence["parameters"]) == ("warning", "0.weight", 2.0)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train()
    assert rules(monitor) == []


def test_gradients_that_an_earlier_phase_has_left_are_no_mistake() -> None:
    model = net()
    loss_of(model).backward()  # of a pretraining, whose optimizer has stepped and is gone
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    monitor = watched(model, optimizer)

    def train(frozen: nn.Module) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(nn.Sequential(frozen, *list(model)[1:])).backward()
            optimizer.step()

    train(copy.deepcopy(model[0]))
    assert rules(monitor) == []
    train(model[0])  # what is added to them now is lost
    assert rules(monitor) == ["not-in-optimizer"]


def test_a_head_that_is_exchanged_and_given_to_the_optimizer_is_no_mistake() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(STEPS):
        if step == 10:
            model[2] = nn.Linear(6, 2)
            optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert rules(monitor) == []


# --- what is no training


def test_what_happens_under_no_monitor_is_not_judged() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with monitor.no_monitor():
            for _ in range(3):
                loss_of(model).backward()
                model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert rules(monitor) == []


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("cleared", [False, True])
def test_steps_without_gradients_before_the_training_are_forgotten(cleared: bool) -> None:
    """As while a replay buffer fills, or while a loop clears the gradients of one part at the beginning."""
    model = net()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model)
        if step >= 15 or cleared:
            loss.backward()
        if step < 15 and cleared:
            optimizer.zero_grad()
        optimizer.step()
        if step == 16:
            assert rules(monitor) == ["step-without-gradients"]
    assert rules(monitor) == []


@pytest.mark.filterwarnings("ignore:torch_gradmon.*(after the spike|step)")
def test_a_skipped_step_is_no_step_without_gradients() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.9)
    monitor = watched(model, optimizer, on_spike="skip")
    for step in range(120):
        optimizer.zero_grad()
        (loss_of(model, X + torch.randn_like(X)) * (1e6 if step in (100, 101, 102) else 1.0)).backward()
        optimizer.step()
    assert monitor.get_step_counts().skipped >= 3
    assert rules(monitor) == []
    monitor.detach()


def test_steps_by_hand_are_audited_too() -> None:
    model = net()
    optimizer = sgd(model)
    monitor = ModuleMonitor(model).attach(optimizer)
    with pytest.warns(gradmon.GradmonWarning, match="not cleared"):
        for step in range(6):
            monitor.begin_step(step)
            loss_of(model).backward()
            optimizer.step()
            monitor.end_step()
    assert rules(monitor) == ["missing-zero-grad"]


@pytest.mark.parametrize("late", [None, 60])
def test_an_optimizer_that_never_steps_is_told_by_its_module(late: int | None) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))})
    maker, judge = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in model.values())
    told = pytest.warns(gradmon.GradmonWarning, match=r"never stepped in more than 100 steps .*judge\)")
    with told if late is None else contextlib.nullcontext():
        monitor = gradmon.watch(model, judge, maker, on_spike=None)
        for step in range(140):
            maker.zero_grad()
            model["judge"](model["maker"](torch.randn(8, 4))).square().mean().backward()
            if late is not None and step >= late:
                judge.step()
                judge.zero_grad()
            maker.step()
    found = {finding.rule: finding.where for finding in monitor.diagnose().findings}
    assert found.get("optimizer-never-steps") == (None if late else "judge")
    assert "no-gradient" not in found


# --- networks of a game


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_a_probe_that_is_replaced_sees_its_own_gradients_only() -> None:
    parts = nn.ModuleDict({"maker": nn.Linear(4, 2, bias=False), "judge": nn.Linear(2, 1)})
    parts["maker"].gain = nn.Parameter(torch.ones(1))  # the smallest, and first of all without a gradient
    of_judge = torch.optim.SGD([parts["maker"].gain, *parts["judge"].parameters()], 0.01)  # the former by mistake
    of_maker = sgd(parts["maker"])
    monitor = watched(parts, of_judge, of_maker)
    for _ in range(20):
        of_judge.zero_grad()
        made = parts["maker"](X) * parts["maker"].gain
        parts["judge"](made.detach()).square().mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        parts["judge"](made).mean().backward()
        of_maker.step()
    assert rules(monitor) == []


def test_a_graph_of_another_network_may_have_two_losses() -> None:
    maker, judge = net(), nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    of_maker, of_judge = sgd(maker), sgd(judge)
    monitor = watched(judge, of_judge)
    for step in range(20):
        of_judge.zero_grad()
        made = maker(X + step)
        judge(made).square().mean().backward(retain_graph=True)
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()
    assert rules(monitor) == []


def test_an_optimizer_of_a_frozen_copy_instead_is_named() -> None:
    parts = nn.ModuleDict({"net": net(), "copy": net().requires_grad_(False)})
    optimizer = sgd(parts["copy"])
    monitor = watched(parts, optimizer)
    for _ in range(60):
        optimizer.zero_grad()
        parts["net"].zero_grad()
        loss_of(parts["net"]).backward()
        optimizer.step()
    (finding,) = [each for each in monitor.diagnose().findings if each.rule == "not-in-optimizer"]
    assert finding.cause.endswith("; instead an optimizer has only frozen ones, of copy.0, copy.2.")
    assert finding.advice.startswith("Make that optimizer of the parameters that are to train")
