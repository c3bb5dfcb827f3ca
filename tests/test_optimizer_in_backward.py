"""Optimizers that step within the backward pass: one step is the whole pass, in whatever order they are named."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

from . import oracle
from .loops import differences


class Net(nn.Module):
    """Of five layers, one of them tied, and one that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm, self.rare = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        y = self.norm(torch.tanh(self.tied(torch.tanh(self.first(x)))))
        return self.last(self.rare(y) if rare else y)


class Recorder:
    """Gradients as they are behind their accumulation, and as the optimizer gets them; hung before anything else."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}
        self.start = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.before.__setitem__(name, p.grad.clone()))

    def begin(self) -> None:
        self.before.clear()
        self.used.clear()
        self.start = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def take(self, parameters: Any) -> None:
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.used.update({names[id(p)]: p.grad.clone() for p in parameters if p.grad is not None})

    def check(self, values: dict[str, float]) -> None:
        """Everything, against float64."""
        change = {n: p.detach().double() - self.start[n].double() for n, p in self.model.named_parameters() if n in self.used}
        assert values["gradmon/grad_norm"] == pytest.approx(norm(self.before), rel=1e-6)
        assert values["gradmon/param_norm"] == pytest.approx(norm(self.start), rel=1e-6)
        for name in self.used:
            assert values[f"gradient_before_clip/{name}/norm"] == pytest.approx(norm({0: self.before[name]}), rel=1e-6)
            assert values[f"gradient/{name}/norm"] == pytest.approx(norm({0: self.used[name]}), rel=1e-6)
            assert values[f"update/{name}/norm"] == pytest.approx(norm({0: change[name]}), rel=1e-5)
        if "gradmon/update_norm" in values:
            assert values["gradmon/update_norm"] == pytest.approx(norm(change), rel=1e-5)
        if not all(torch.equal(self.before[name], self.used[name]) for name in self.used):
            assert values["gradmon/grad_norm_after_clip"] == pytest.approx(norm(self.used), rel=1e-6)


def norm(tensors: dict[Any, Tensor]) -> float:
    return oracle.values(list(tensors.values()))["norm"]


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def watch(model: nn.Module, optimizers: list[Optimizer], **options: Any) -> ModuleMonitor:
    monitor = gradmon.watch(model, *optimizers, **{"on_spike": None, **options})
    monitor.add_gradient_metric("norm")
    monitor.add_update_metric("norm")
    return monitor


def ordered(optimizers: list[Optimizer], order: str) -> list[Optimizer]:
    if order == "shuffled":
        return random.Random(0).sample(optimizers, len(optimizers))
    return optimizers if order == "as defined" else optimizers[::-1]


def tutorial(model: nn.Module, recorder: Recorder | None, clip: float = 0.0, clears: bool = True) -> list[Optimizer]:
    """As in PyTorch's tutorial."""
    optimizers = {p: Adam([p], lr=0.01, foreach=False) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        if clip:
            nn.utils.clip_grad_norm_([parameter], clip)
        if recorder is not None:
            recorder.take([parameter])
        optimizers[parameter].step()
        if clears:
            optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values())


def helper(model: nn.Module, recorder: Recorder | None) -> list[Optimizer]:
    """torch's own, which nobody can look into: what an optimizer gets is what was accumulated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script
        from torch.distributed import optim

    optim._apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    return optim._get_in_backward_optimizers(model)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("order", ["as defined", "reversed", "shuffled"])
def test_every_value_is_right_from_the_first_step_on(order: str, clip: float, every: int, tmp_path: Path) -> None:
    model = Net()
    recorder = Recorder(model)
    monitor = watch(model, ordered(tutorial(model, recorder, clip), order), every=every, run_dir=tmp_path)
    for step in range(7):
        recorder.begin()
        model(batch(step), rare=step % 2 == 1).square().mean().backward()
        monitor.log_scalar("after", step)
        assert monitor.last_record.step == step
        values = monitor.get_step_metrics()
        if step % every == 0:
            recorder.check(values)
            assert values["after"] == step
        else:
            assert values == {}
    monitor.detach()
    assert gradmon.load_run(tmp_path).steps == list(range(0, 7, every))
    assert monitor.get_step_counts().attempted == 7
    assert monitor.warning_counts() == {}
    assert monitor._runtime.built_in.audit.facts() == []
    assert not any("by_turns" in record.context for record in monitor._runtime.pipeline.history.sampled())


def test_hooks_may_be_hung_after_the_monitor() -> None:
    model = Net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    monitor = watch(model, list(optimizers.values()))
    recorder = Recorder(model)

    def hook(parameter: Tensor) -> None:
        recorder.take([parameter])
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        recorder.begin()
        model(batch(step)).square().mean().backward()
        recorder.check(monitor.get_step_metrics())


@pytest.mark.parametrize("order", ["as defined", "reversed"])
def test_the_helper_of_torch(order: str) -> None:
    model = Net()
    recorder = Recorder(model)
    monitor = watch(model, ordered(helper(model, recorder), order))
    for step in range(4):
        recorder.begin()
        model(batch(step), rare=step == 2).square().mean().backward()
        recorder.used = dict(recorder.before)
        assert monitor.last_record.step == step
        recorder.check(monitor.get_step_metrics())
    assert monitor.warning_counts() == {}


def test_where_it_cannot_be_foreseen_the_first_step_lacks_its_gradients_before_clipping_and_says_so() -> None:
    model = Net()
    recorder = Recorder(model)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    kept = []
    # hooks on the nodes of the graph, which no attribute of the parameters tells of
    parameters = list(model.parameters())
    handles, nodes = [], []
    for parameter in parameters:
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        nodes.append(node)

        def stepped(*_: Any, parameter: Tensor = parameter) -> None:
            recorder.take([parameter])
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles.append(node.register_hook(stepped))
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks.clear()  # the recorder's, which would be a sign of it
        parameter.register_hook(lambda gradient, parameter=parameter: kept.append(parameter))
    monitor = watch(model, list(optimizers.values()))
    for step in range(3):
        recorder.begin()
        model(batch(step)).square().mean().backward()
        recorder.before = dict(recorder.used)
        values = monitor.get_step_metrics()
        assert monitor.last_record.step == step
        if step:
            recorder.check(values)
            continue
        assert "gradmon/grad_norm" not in values
        assert "stepped within the backward pass" in monitor.missing()["gradmon/grad_norm"]
        assert values["gradmon/param_norm"] == pytest.approx(norm(recorder.start), rel=1e-6)
        change = {n: p.detach().double() - recorder.start[n].double() for n, p in model.named_parameters()}
        assert values["gradmon/update_norm"] == pytest.approx(norm(change), rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("order", ["as defined", "reversed"])
def test_some_within_the_pass_and_the_rest_behind_it(order: str, clip: float) -> None:
    model = Net()
    recorder = Recorder(model)
    inside = [*model.first.parameters(), *model.rare.parameters()]
    rest = [*model.norm.parameters(), *model.last.parameters()]
    optimizers = {p: SGD([p], lr=0.1) for p in inside}
    plain = Adam(rest, lr=0.01)

    def hook(parameter: Tensor) -> None:
        recorder.take([parameter])
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in inside:
        parameter.register_post_accumulate_grad_hook(hook)
    monitor = watch(model, ordered([*optimizers.values(), plain], order))
    for step in range(5):
        recorder.begin()
        plain.zero_grad()
        model(batch(step), rare=step == 3).square().mean().backward()
        assert monitor._runtime.state.ended == (step - 1 if step else None)  # it goes on
        if clip:
            nn.utils.clip_grad_norm_(rest, clip)
        recorder.take(rest)
        plain.step()
        assert monitor.last_record.step == step
        recorder.check(monitor.get_step_metrics())
    monitor.detach()
    assert monitor.warning_counts() == {}
    assert monitor._runtime.built_in.audit.facts() == []


def test_a_plain_one_without_gradients_steps_all_the_same() -> None:
    model = Net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters() if p is not model.rare.weight}
    plain = SGD([model.rare.weight], lr=0.1)
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step() or o.zero_grad())
    monitor = watch(model, [*optimizers.values(), plain])
    for step in range(5):
        plain.zero_grad()
        model(batch(step), rare=step != 2).square().mean().backward()
        plain.step()
        assert monitor.last_record.step == step
    assert monitor.warning_counts() == {}


def test_gradients_that_are_accumulated_over_passes_and_stepped_in_the_last() -> None:
    model = Net()
    recorder = Recorder(model)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    count = [0]

    def hook(parameter: Tensor) -> None:
        if count[0] % 3 == 2:
            recorder.take([parameter])
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    monitor = watch(model, list(optimizers.values()))
    for step in range(4):
        recorder.begin()
        for _ in range(3):
            (model(batch(count[0])).square().mean() / 3).backward()
            count[0] += 1
        assert monitor.last_record.step == step
        recorder.check(monitor.get_step_metrics())
    assert monitor.warning_counts() == {}


@pytest.mark.parametrize("outside", [False, True], ids=["all of it", "all but the last layer"])
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_reentrant_checkpoints_make_one_step_of_several_passes(outside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    recorder = Recorder(model)
    monitor = watch(model, tutorial(model, recorder))
    for step in range(4):
        recorder.begin()
        y = batch(step).requires_grad_()
        for number, layer in enumerate(model):
            y = layer(y) if outside and number == 2 else checkpoint(layer, y, use_reentrant=True)
        y.square().mean().backward()
        if not outside:  # no hook tells of the end of the pass around the others
            model(batch(step))
        assert monitor.last_record.step == step
        recorder.check(monitor.get_step_metrics())
    assert monitor.warning_counts() == {}


def test_values_asked_for_within_a_step_are_those_of_the_last_one() -> None:
    model = Net()
    monitor = watch(model, tutorial(model, None))
    model(batch(0)).square().mean().backward()
    values = monitor.get_step_metrics()
    loss = model(batch(1)).square().mean()
    assert monitor.get_step_metrics() == values
    loss.backward()
    assert monitor.get_step_metrics() != values


def test_nothing_can_be_done_about_a_spike_and_that_is_said_once() -> None:
    model = Net()
    monitor = watch(model, tutorial(model, None), on_spike="skip")
    with pytest.warns(GradmonWarning, match="step within the backward pass.*nothing is done about spikes") as caught:
        for step in range(3):
            model(batch(step)).square().mean().backward()
    assert len(caught) == 1
    assert not monitor.step_was_skipped
    assert monitor.get_step_counts().applied == 3


def test_a_spike_in_such_a_loop_is_found() -> None:
    model = Net()
    monitor = watch(model, tutorial(model, None), on_spike="warn")
    for step in range(40):
        model(batch(step)).square().mean().backward()
    with pytest.warns(GradmonWarning, match="step 40"):
        (1e6 * model(batch(40)).square().mean()).backward()
        monitor.get_step_metrics()


def test_steps_begun_by_hand() -> None:
    model = Net()
    recorder = Recorder(model)
    monitor = watch(model, tutorial(model, recorder))
    for step in (3, 5):
        recorder.begin()
        monitor.begin_step(step)
        model(batch(step)).square().mean().backward()
        monitor.end_step()
        assert monitor.last_record.step == step
        recorder.check(monitor.get_step_metrics())


@pytest.mark.parametrize("make", [tutorial, helper])
@pytest.mark.parametrize("preset", ["standard", "full"])
def test_training_is_the_same_and_the_hooks_of_others_stay(make: Callable[..., list[Optimizer]], preset: str) -> None:
    found = []
    for watches in (False, True):
        model = Net()
        optimizers = make(model, None)
        hooks = {n: list((p._post_accumulate_grad_hooks or {}).values()) for n, p in model.named_parameters()}
        if watches:
            monitor = watch(model, optimizers, preset=preset, every=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(6):
                model(batch(step)).square().mean().backward()
        if watches:
            monitor.detach()
        assert hooks == {n: list((p._post_accumulate_grad_hooks or {}).values()) for n, p in model.named_parameters()}
        found.append((dict(model.named_parameters()), [o.state_dict() for o in optimizers], torch.get_rng_state()))
    assert differences(*found) == []


def test_local_gradients_where_the_optimizers_hooks_were_first() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    true: dict[str, float] = {}
    for name, parameter in model.named_parameters():

        def step(p: Tensor, name: str = name) -> None:
            true[f"gradient_local/{name}/norm"] = pytest.approx(norm({0: p.grad}), rel=1e-6)
            optimizers[p].step()
            optimizers[p].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm", stages=("local",))
    monitor.attach(*optimizers.values())
    model(torch.randn(5, 4)).square().mean().backward()
    assert {key: value for key, value in monitor.get_step_metrics().items() if key.startswith("gradient_local")} == true
    monitor.detach()
