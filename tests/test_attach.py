"""What hooks make of a loop: when steps begin and end, what belongs to them, and what comes and goes in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

from . import oracle
from .families import BY_NAME

MLP = BY_NAME["mlp"]
BATCHES = MLP.batches(30)


def exact(*gradients: Tensor | None) -> float:
    return oracle.values([g for g in gradients if g is not None])["norm"]


def norm_of(model: nn.Module) -> float:
    return exact(*(p.grad for p in model.parameters()))


class Run:
    """A model, its optimizer, and one step after another."""

    def __init__(self, **options: Any) -> None:
        self.model = MLP.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.monitor = ModuleMonitor(self.model, **options)
        self.taken = 0

    def attach(self, **options: Any) -> Run:
        self.monitor._runtime.use_preset("minimal")
        self.monitor.attach(self.optimizer, **options)
        return self

    def backward(self) -> None:
        MLP.loss(self.model, BATCHES[self.taken % len(BATCHES)]).backward()
        self.taken += 1

    def train(self) -> float:
        """Take a step and return its gradient norm."""
        self.optimizer.zero_grad()
        self.backward()
        norm = norm_of(self.model)
        self.optimizer.step()
        return norm

    def step(self, count: int = 1) -> dict[str, float]:
        """Take steps that end by themselves, check the gradient norm of the last one, and return its values."""
        norm = [self.train() for _ in range(count)][-1]
        values = self.monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
        return values


# --- which step it is ------------------------------------------------------------------------------------------------------------


def test_steps_are_numbered_from_zero_or_from_start_step() -> None:
    assert list(_steps(Run().attach(), 3)) == [0, 1, 2]
    assert list(_steps(Run().attach(start_step=40), 3)) == [40, 41, 42]


def _steps(run: Run, count: int) -> list[int]:
    run.step(count)
    return list(run.monitor.get_all_metrics())


def test_a_resumed_run_goes_on_counting_and_remembers_what_it_learned() -> None:
    whole, first = Run().attach(), Run().attach()
    expected = [whole.step() for _ in range(25)]
    first.step(18)
    second = Run()
    second.monitor._runtime.use_preset("minimal")
    second.monitor.load_state_dict(first.monitor.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    second.taken = first.taken
    second.monitor.attach(second.optimizer)
    found = [second.step() for _ in range(7)]
    assert list(second.monitor.get_all_metrics()) == list(range(18, 25))
    for values in [*found, *expected]:
        del values["gradmon/overhead_fraction"]
    assert found == expected[18:]
    assert "gradmon/spike_score" in found[0]


def test_begin_step_sets_the_number_and_the_caller_then_ends_steps() -> None:
    run = Run().attach()
    run.step(2)
    for step in (100, 101):
        assert run.monitor.begin_step(step)
        norm = run.train()
        assert run.monitor.current_step == step
        assert list(run.monitor.get_all_metrics())[-1] < step  # the optimizer's step did not end it
        run.monitor.log_scalar("late", float(step))
        run.monitor.end_step()
        values = run.monitor.get_step_metrics()
        assert values["late"] == step
        assert values["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert list(run.monitor.get_all_metrics()) == [0, 1, 100, 101]


def test_an_explicit_step_takes_several_optimizer_steps() -> None:
    run = Run().attach()
    run.monitor.begin_step(7)
    norm = [run.train() for _ in range(3)][-1]
    run.monitor.end_step()
    run.monitor.end_step()
    values = run.monitor.get_step_metrics()
    assert "gradmon/grad_norm_after_clip" not in values
    assert values.get("gradmon/grad_norm", norm) == pytest.approx(norm, rel=1e-6)  # of the last one, or not there
    assert list(run.monitor.get_all_metrics()) == [7]


def test_a_number_that_goes_back_warns_once_and_counting_goes_on() -> None:
    run = Run().attach(start_step=5)
    run.step()
    with pytest.warns(GradmonWarning, match="step 2 comes after step 5"):
        run.monitor.begin_step(2)
    for step in (2, 1, 2):  # a second warning would be an error
        run.monitor.begin_step(step)
        norm = run.train()
        run.monitor.end_step()
        assert run.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert run.monitor.current_step == 2
    assert run.monitor.warning_counts()["back"] == 3


# --- what is no step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eval", "no_grad_in_training_mode", "no_monitor", "no_monitor_with_backward"])
def test_validation_between_steps_opens_none_and_counts_in_none(kind: str) -> None:
    def validate(run: Run) -> None:
        if kind == "eval":
            run.model.eval()
            with torch.no_grad():
                MLP.loss(run.model, BATCHES[0])
            run.model.train()
        elif kind == "no_grad_in_training_mode":
            with torch.no_grad():
                MLP.loss(run.model, BATCHES[0])
        else:
            with run.monitor.no_monitor():
                loss = MLP.loss(run.model, BATCHES[0])
                if kind == "no_monitor_with_backward":
                    loss.backward()
                assert not run.monitor.is_monitoring()

    run, other = Run(), Run()
    for r in (run, other):
        r.monitor.add_activation_metric("norm", metric_regex="^0$")
        r.attach()
    for step in range(4):
        values, expected = run.step(), other.step()
        validate(run)
        assert run.monitor.current_step == step
        assert run.monitor.get_step_metrics() == values
        assert values["activation/0/norm"] == expected["activation/0/norm"]
        run.monitor.log_scalar("validation", 0.5)  # belongs to the step that just ended
        assert run.monitor.get_step_metrics() == {**values, "validation": 0.5}


def test_validation_within_a_step_leaves_it_open() -> None:
    run = Run().attach()
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward()
        run.model.eval()
        MLP.loss(run.model, BATCHES[0])
        run.model.train()
        run.backward()
        before = norm_of(run.model)
        run.optimizer.step()
        assert run.monitor.current_step == step
        assert run.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)


# --- two optimizers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_two_optimizers_in_turn_are_seen_also_when_the_loop_is_known_well(clips: bool) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 1)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=1e-4) for name in "ab"]
    monitor = gradmon.watch(model, *optimizers)
    for step in range(110):
        norms = []
        for name, optimizer in zip("ab", optimizers, strict=True):
            model.zero_grad()
            model["b"](model["a"](torch.randn(4, 3))).square().mean().backward()
            norms.append(norm_of(model[name]))
            if clips:
                torch.nn.utils.clip_grad_norm_(model[name].parameters(), 1e-3)
            optimizer.step()
        assert monitor.current_step == step
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(torch.tensor(norms).norm().item(), rel=1e-6), step


@pytest.mark.parametrize("detached", [False, True], ids=["touches_both", "detached"])
def test_two_optimizers_in_turn_each_give_the_gradients_that_they_use(detached: bool) -> None:
    """As in a GAN: the generator's backward pass also reaches the discriminator, whose step is already over, and vice versa."""
    model = nn.ModuleDict({"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)})
    generator, discriminator = model["generator"], model["discriminator"]
    optimizers = {name: torch.optim.Adam(model[name].parameters(), lr=0.01) for name in ("discriminator", "generator")}
    monitor = gradmon.watch(model, *optimizers.values())
    for metric in ("norm", "mean"):
        monitor.add_gradient_metric(metric)
    monitor.add_update_metric("norm")
    for step in range(4):
        noise = torch.randn(5, 3)
        true: dict[str, Tensor] = {}
        updates: dict[str, Tensor] = {}
        for name, optimizer in optimizers.items():
            model.zero_grad()
            fake = generator(noise)
            if name == "discriminator":
                loss = discriminator(fake.detach() if detached else fake).mean() - discriminator(torch.randn(5, 4)).mean()
            else:
                loss = -discriminator(fake).mean()
            loss.backward()
            true |= {f"{name}.{n}": p.grad.clone() for n, p in model[name].named_parameters()}
            before = {f"{name}.{n}": p.detach().clone() for n, p in model[name].named_parameters()}
            optimizer.step()
            updates |= {n: model.get_parameter(n).detach() - p for n, p in before.items()}
        assert monitor.current_step == step
        values = monitor.get_step_metrics()
        for name, gradient in true.items():
            for source in ("gradient_before_clip", "gradient"):
                assert values[f"{source}/{name}/norm"] == pytest.approx(gradient.double().norm().item(), rel=1e-6), name
            assert values[f"update/{name}/norm"] == pytest.approx(updates[name].double().norm().item(), rel=1e-5)
        assert values["gradmon/grad_norm"] == pytest.approx(exact(*true.values()), rel=1e-6)
        assert "gradmon/grad_norm_after_clip" not in values


def test_the_step_ends_with_the_last_optimizer_however_often_the_first_steps() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 1)})
    first, last = (torch.optim.SGD(model[name].parameters(), lr=0.01) for name in "ab")
    monitor = gradmon.watch(model, first, last)
    for step in range(3):
        for inner in range(3):
            model.zero_grad()
            model["b"](model["a"](torch.randn(2, 3))).sum().backward()
            first.step()
            if inner == 2:
                last_norm = norm_of(model)
                last.step()
        assert monitor.current_step == step
        values = monitor.get_step_metrics()
        assert "gradmon/grad_norm_after_clip" not in values
        assert values.get("gradmon/grad_norm", last_norm) == pytest.approx(last_norm, rel=1e-6)  # right, or not there


# --- metrics, cadence, hooks -----------------------------------------------------------------------------------------------------


def test_metrics_may_come_before_attaching_after_it_and_in_mid_run() -> None:
    run = Run()
    run.monitor.add_gradient_metric("mean")
    run.attach()
    run.monitor.add_gradient_metric("norm")
    run.monitor.add_activation_metric("norm")
    first = run.step()
    assert {"gradient/0.weight/mean", "gradient_before_clip/0.weight/norm", "activation/2/norm"} <= first.keys()
    run.monitor.add_gradient_metric("std", stages=("local",))
    run.monitor.add_activation_metric("std")
    run.monitor.add_update_metric("ratio")
    new = {"gradient_local/0.weight/std", "activation/2/std", "update/0.weight/ratio"}
    assert not new & first.keys()
    second = run.step()
    assert second.keys() - first.keys() >= new
    assert second.keys() >= first.keys() - {"gradmon/spike_score"}


def _hooked(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("options", [{"every": 3}, {"monitor_step_fn": lambda step: step % 3 == 0}], ids=["every", "function"])
def test_parameters_and_modules_are_hooked_for_monitored_steps_only(options: dict[str, Any]) -> None:
    torch._dynamo.utils.counters.clear()  # where anything was compiled, modules keep their hooks
    run = Run(**options).attach()
    run.monitor.add_activation_metric("norm")
    for step in range(9):
        monitored = step % 3 == 0
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, BATCHES[step])
        assert _hooked(run.model) == (7 if monitored else 1)  # the audit has one, which stays
        assert bool(run.model[0]._forward_hooks) == monitored
        assert run.monitor.is_monitoring() == monitored
        loss.backward()
        before = norm_of(run.model)
        run.optimizer.step()
        values = run.monitor.get_step_metrics()
        assert run.monitor.current_step == step
        assert bool(values) == monitored
        if monitored:
            assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
            assert "activation/0/norm" in values
    assert list(run.monitor.get_all_metrics()) == [0, 3, 6]


def test_nothing_of_a_hook_stays_in_a_parameter() -> None:
    """A removed hook after the accumulation costs each later pass nearly as much as one that is there, and cannot be undone."""
    run = Run(every=3).attach()
    hooked: set[str] = set()
    for step in range(9):
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, BATCHES[step])
        if step % 3:
            hooked |= {name for name, p in run.model.named_parameters() if p._backward_hooks is not None}
        loss.backward()
        run.optimizer.step()
        hooked |= {name for name, p in run.model.named_parameters() if p._post_accumulate_grad_hooks is not None}
    assert len(hooked) == 1  # that of the audit


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_are_returned_are_no_end_of_a_backward_pass(create_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ends = Run(), list[None]()
    monkeypatch.setattr(run.monitor._runtime.built_in.audit, "on_backward_ended", lambda: ends.append(None))
    run.attach()
    weights = list(run.model.parameters())
    loss = MLP.loss(run.model, BATCHES[0])
    returned = torch.autograd.grad(loss, weights, create_graph=create_graph, retain_graph=True)
    torch.autograd.grad(loss, weights[-1:], retain_graph=True)
    assert not ends
    if create_graph:
        loss = loss + sum(g.square().sum() for g in returned)
    loss.backward(inputs=weights[2:], retain_graph=True)
    assert len(ends) == 1
    loss.backward(inputs=weights[:2])
    assert len(ends) == 2
    before = norm_of(run.model)
    nn.utils.clip_grad_norm_(weights, before / 2)
    run.optimizer.step()
    assert run.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)


def test_many_returned_gradients_take_no_memory() -> None:
    run = Run().attach()
    weights = list(run.model.parameters())
    loss = MLP.loss(run.model, BATCHES[0])
    for _ in range(10_010):
        torch.autograd.grad(loss, weights[-1:], retain_graph=True)
    assert run.monitor._runtime.loop is not None
    assert len(run.monitor._runtime.loop.backward_hooks._tasks) <= 10_000


def test_gradients_that_are_returned_in_a_batch_are_not_measured() -> None:
    run = Run().attach()
    run.monitor.add_gradient_metric("norm", stages=("local",))
    for step in range(3):
        run.optimizer.zero_grad()
        output = run.model(BATCHES[step][0])
        some = output.flatten()[:2]
        torch.autograd.grad(some, list(run.model.parameters()), torch.eye(2), is_grads_batched=True, retain_graph=True)
        output.square().mean().backward()
        before = norm_of(run.model)
        run.optimizer.step()
        assert run.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
    assert not run.monitor.warning_counts()


def test_two_monitors_of_the_same_parameters_leave_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    monitors = [gradmon.watch(model, optimizers[0]), gradmon.watch(model[2], optimizers[1])]
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for monitor in monitors:
        monitor.detach()
    assert [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()] == [(None, None)] * 4


def test_hooks_change_no_gradient_and_keep_none() -> None:
    """Autograd puts a gradient into a parameter as it is, unless a hook holds on to it."""
    run, places = Run().attach(), {}
    for name, parameter in run.model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: places.update({name: gradient.data_ptr()}))
    MLP.loss(run.model, BATCHES[0]).backward()
    taken = {name: p.grad.data_ptr() for name, p in run.model.named_parameters() if p.grad is not None}
    bare = Run()
    alone: dict[str, int] = {}
    for name, parameter in bare.model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: alone.update({name: gradient.data_ptr()}))
    MLP.loss(bare.model, BATCHES[0]).backward()
    without = {name: p.grad.data_ptr() for name, p in bare.model.named_parameters() if p.grad is not None}
    assert {name: places[name] == taken[name] for name in taken} == {name: alone[name] == without[name] for name in without}


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_that_never_calls_the_model_is_whole(every: int) -> None:
    """The first thing that is seen of it is its backward pass, as where parts of a model are called one by one."""
    run = Run(every=every).attach()
    for step in range(7):
        run.optimizer.zero_grad()
        sum(p.sum() for p in run.model.parameters()).backward()
        before = norm_of(run.model)
        run.optimizer.step()
        assert run.monitor.current_step == step
        values = run.monitor.get_step_metrics()
        assert values.get("gradmon/grad_norm") == (pytest.approx(before, rel=1e-6) if step % every == 0 else None)


# --- what is logged by hand ------------------------------------------------------------------------------------------------------


def test_a_scalar_belongs_to_the_step_in_flight_or_to_the_one_that_just_ended() -> None:
    run = Run().attach()
    run.monitor.log_scalar("before_all", 1.0)
    for step in range(3):
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, BATCHES[step])
        run.monitor.log_scalar("within", float(step))
        run.monitor.log_scalar("loss", loss)
        loss.backward()
        run.optimizer.step()
        run.monitor.log_scalar("after", float(step))
        values = run.monitor.get_step_metrics()
        assert (values["within"], values["after"]) == (step, step)
        assert values["loss"] == pytest.approx(loss.item())
        assert ("before_all" in values) == (step == 0)
    assert [values["after"] for values in run.monitor.get_all_metrics().values()] == [0, 1, 2]


def test_a_logged_tensor_is_read_when_it_is_logged() -> None:
    run = Run().attach()
    run.monitor.begin_step(0)
    loss = torch.tensor(2.0, requires_grad=True)
    run.monitor.log_scalar("loss", loss)
    with torch.no_grad():
        loss.mul_(10)
    run.monitor.end_step()
    assert run.monitor.get_step_metrics()["loss"] == 2.0


# --- optimizers that behave oddly ------------------------------------------------------------------------------------------------


class Sub(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Fails(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("no step")
        return super().step(closure)


def test_a_subclass_that_calls_super_step_steps_once() -> None:
    run = Run()
    run.optimizer = Sub(run.model.parameters(), lr=0.01)
    run.attach()
    run.monitor.add_update_metric("norm")
    for step in range(3):
        before = run.model[0].weight.detach().clone()
        values = run.step()
        assert run.monitor.current_step == step
        change = (run.model[0].weight - before).double().norm().item()
        assert values["update/0.weight/norm"] == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("with_closure", [False, True])
def test_after_a_step_that_raised_the_next_ones_are_right(with_closure: bool) -> None:
    run = Run()
    run.optimizer = Fails(run.model.parameters(), lr=0.01)
    run.attach()
    run.monitor.add_update_metric("norm")
    run.step()
    for _ in range(2):
        run.optimizer.fails = True
        run.optimizer.zero_grad()
        run.backward()
        with pytest.raises(RuntimeError, match="no step"):
            run.optimizer.step(*[lambda: None] * with_closure)
        run.optimizer.fails = False
        for _ in range(2):
            before = run.model[0].weight.detach().clone()
            values = run.step()
            assert values["gradmon/grad_norm"] > 0
            change = (run.model[0].weight - before).double().norm().item()
            assert values["update/0.weight/norm"] == pytest.approx(change, rel=1e-5)
    steps = list(run.monitor.get_all_metrics())
    assert steps == sorted(set(steps))
    assert len(steps) in (5, 7)


# --- parameters that come and go -------------------------------------------------------------------------------------------------


def _add(run: Run) -> None:
    run.model.append(nn.Linear(3, 2))
    run.optimizer.add_param_group({"params": list(run.model[5].parameters())})


def _replace(run: Run) -> None:
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())


def _thaw(run: Run) -> None:
    run.model[0].requires_grad_(True)


@pytest.mark.parametrize("change", [_add, _replace, _thaw])
def test_parameters_that_change_in_mid_run_are_seen_from_the_next_step(change: Callable[[Run], None]) -> None:
    run = Run()
    if change is _thaw:
        run.model[0].requires_grad_(False)
    run.monitor.add_gradient_metric("norm")
    run.monitor.add_update_metric("norm")
    run.attach()
    run.step(3)
    change(run)
    for _ in range(2):
        values = run.step()
        assert "gradmon/grad_norm" in values  # and it is right: step() checks it
        names = {name for name, _ in run.model.named_parameters()}
        for source in ("gradient", "gradient_before_clip", "update"):
            assert {key.split("/")[1] for key in values if key.startswith(source + "/")} == names


def test_frozen_parameters_leave_the_sums_from_the_next_step() -> None:
    run = Run().attach()
    run.monitor.add_gradient_metric("norm")
    run.step(2)
    run.model[0].requires_grad_(False)
    for _ in range(2):
        values = run.step()
        assert "gradmon/grad_norm" in values
        assert not any(key.startswith("gradient_before_clip/0.") for key in values)


@pytest.mark.parametrize("watched", ["compiled", "inner"])
def test_steps_of_a_compiled_model_are_followed(watched: str) -> None:
    torch._dynamo.reset()
    run = Run()
    compiled = torch.compile(run.model, backend="aot_eager")
    monitor = gradmon.watch(compiled if watched == "compiled" else run.model, run.optimizer)
    for step in range(4):
        run.optimizer.zero_grad()
        MLP.loss(compiled, BATCHES[step]).backward()
        before = norm_of(run.model)
        run.optimizer.step()
        assert monitor.current_step == step
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)


def test_the_environment_can_make_everything_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, scaler=(scaler := torch.amp.GradScaler("cpu")), layers="all")
    monitor.add_activation_metric("norm")
    assert not monitor.begin_step(0)
    MLP.loss(model, BATCHES[0]).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    total = torch.nn.utils.get_total_norm(expected)
    assert monitor.clip_grad_norm_(100.0).equal(total)
    monitor.log_scalar("loss", 1.0)
    optimizer.step()
    monitor.end_step()
    assert monitor.get_step_metrics() == monitor.get_all_metrics() == {}
    assert monitor.last_record is None
    assert _hooked(model) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert "step" not in vars(scaler)
