"""Loops and surroundings that broke an earlier version, each kept as it was found."""

from __future__ import annotations

import functools
import json
import random
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, MonitorMixin, SpikeDetector, SpikeError
from torch_gradmon.core import torch_modes

from . import forked

pytestmark = pytest.mark.thorough

SGD = torch.optim.SGD
X = torch.ones(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def one(model: nn.Module, *optimizers: Any, x: torch.Tensor = X) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def true_norm(model: nn.Module) -> float:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm().item()


# --- it never breaks the loop --------------------------------------------------------------------------------------------------


def test_an_optimizer_whose_step_takes_something_else_gets_it() -> None:
    class Scaled(SGD):
        @torch.no_grad()
        def step(self, scale: float) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-scale)

    model = net()
    before = model[0].weight.detach().clone()
    optimizer = Scaled(model.parameters(), lr=0.1)
    gradmon.watch(model, optimizer)
    model(X).sum().backward()
    optimizer.step(0.5)
    assert torch.equal(model[0].weight, before - 0.5 * model[0].weight.grad)


def test_a_watched_scaler_steps_what_is_no_optimizer() -> None:
    class Duck:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

        def step(self) -> str:
            return "stepped"

    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = SGD(model[0].parameters(), lr=0.1)
    gradmon.watch(model, optimizer, scaler=scaler)
    duck = Duck(model[2].parameters())
    scaler.scale(model(X).sum()).backward()
    assert scaler.step(duck) == "stepped"


def _compiled_backward(model: nn.Module) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(model, backend="aot_eager")
        torch.compile(lambda x: compiled(x).sum().backward(), backend="aot_eager")(X)


def _backward_by_a_graph(model: nn.Module) -> None:
    loss = model(X).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 no graph has activations, and tracing warns")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
@pytest.mark.parametrize("train", [_compiled_backward, _backward_by_a_graph])
def test_compiled_autograd_goes_on_and_the_values_it_hides_are_absent(train: Callable[[nn.Module], None]) -> None:
    torch._dynamo.reset()
    models = net(), net()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = SGD(model.parameters(), lr=0.1)
        monitor = gradmon.watch(model, optimizer, preset="full") if model is models[0] else None
        if monitor is not None:
            monitor.add_gradient_metric("norm", stages=("local", "after_clip"))
            monitor.add_activation_metric("norm", of=("output", "output_gradient"))
        for _ in range(3):
            optimizer.zero_grad()
            train(model)
            expected = float(model[0].weight.grad.norm())
            optimizer.step()
        if monitor is not None:
            shown, missing = monitor.get_step_metrics(), monitor.missing()
            assert shown["gradient/0.weight/norm"] == pytest.approx(expected, rel=1e-6)
            assert shown["activation/0/norm"] > 0
            for hidden in ("gradmon/grad_norm", "gradient_local/0.weight/norm", "activation_gradient/0/norm"):
                assert hidden not in shown
                assert missing[hidden]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_under_compiled_autograd_the_monitors_clip_measures_gradients_before_it() -> None:
    torch._dynamo.reset()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    for _ in range(2):  # the first step shows that no backward pass will be seen
        optimizer.zero_grad()
        _compiled_backward(model)
        total = float(monitor.clip_grad_norm_(0.5))
        optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(total, rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 hooks that are not traced break a graph")
def test_a_compiled_step_is_one_graph_and_its_values_are_there() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gradmon.watch(model, optimizer)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        model(X).sum().backward()
        expected = true_norm(model)
        step()
        optimizer.zero_grad()
    assert monitor.current_step == 2
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiled_model_is_not_compiled_again_for_steps_that_are_not_monitored() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, every=2)
    monitor.add_activation_metric("norm")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(24):
        one(compiled, optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("saved", ["some", "all"])
def test_selective_checkpointing_recomputes_what_it_did_without_us(saved: str) -> None:
    aten = torch.ops.aten
    ours_too = {aten.addmm.default, aten.amax.default, aten.sum.default}  # operations that are also ours

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = saved == "all" or operation in ours_too
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().amax().clamp(min=1e-5).detach()

    def trained(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), Scaled(), nn.Linear(16, 16), Scaled())
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        if watched:
            monitor = gradmon.watch(model, optimizer)
            monitor.add_activation_metric("norm")
            monitor.add_activation_metric("max")
            monitor.add_activation_metric("mine", lambda x: x.amax())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 16)).square().mean().backward()
            optimizer.step()
        if watched:
            assert monitor.get_step_metrics()["activation/inner.1/max"] == pytest.approx(1.0)
        return [parameter.detach() for parameter in model.parameters()]

    for bare, watched in zip(trained(False), trained(True), strict=True):
        assert torch.equal(bare, watched)


def test_a_function_that_writes_past_the_version_counter_is_refused_on_its_copy() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("evil", lambda g: g.data.abs_().max(), "^0.weight$", stages="after_clip")
    model(-X).sum().backward()
    gradient = model[0].weight.grad.clone()
    with pytest.warns(GradmonWarning, match="in place"):
        optimizer.step()
    assert torch.equal(model[0].weight, before.add(gradient, alpha=-0.1))


def test_a_function_that_draws_from_pythons_random_leaves_its_stream_alone() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    gradmon.watch(model, optimizer).add_gradient_metric("lucky", lambda g: g.flatten()[random.randrange(g.numel())])
    random.seed(3)
    expected = random.random()
    random.seed(3)
    one(model, optimizer)
    assert random.random() == expected


def test_values_that_cannot_be_logged_cost_one_key_and_no_error() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    model(X).sum().backward()
    with pytest.warns(GradmonWarning, match="selected"):
        monitor.log_tensor("selected", torch.ones(3)[:0])
    with pytest.warns(GradmonWarning, match="meta"):
        monitor.log_scalar("lost", torch.zeros((), device="meta"))
    optimizer.step()
    assert "gradmon/grad_norm" in monitor.get_step_metrics()


def test_detach_takes_the_hooks_away_also_when_the_last_step_raises() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_spike="raise", preset="minimal")
    monitor.attach(optimizer)
    monitor.begin_step(0)
    (model(X).sum() * float("nan")).backward()
    with pytest.raises(SpikeError):
        monitor.detach()
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


# --- its numbers are right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [lambda g: g.data.clamp_(-0.1, 0.1), lambda g: g.data.neg_()], ids=["clamp", "negate"])
def test_an_edit_through_data_is_seen(edit: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    for metric in ("max", "mean"):
        monitor.add_gradient_metric(metric)
    model(X).sum().backward()
    for p in model.parameters():
        edit(p.grad)
    expected = model[2].weight.grad.double()
    optimizer.step()
    values = monitor.get_step_metrics()
    assert values["gradient/2.weight/max"] == pytest.approx(expected.abs().max().item(), rel=1e-6)
    assert values["gradient/2.weight/mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert "gradmon/grad_norm_after_clip" in values


def test_optimizers_named_in_another_order_are_put_right_with_one_warning() -> None:
    model = net()
    a, b = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    monitor = gradmon.watch(model, a, b)
    monitor.add_gradient_metric("norm")
    with pytest.warns(GradmonWarning, match="order"):
        one(model, b, a)
    for step in range(1, 4):
        one(model, b, a)
        assert monitor.current_step == step
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(true_norm(model), rel=1e-6)
        assert values["gradient/0.bias/norm"] == pytest.approx(model[0].bias.grad.norm().item(), rel=1e-6)


def test_parameters_that_an_optimizer_gets_later_are_in_its_updates() -> None:
    model = net()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_update_metric("norm")
    one(model, optimizer)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    one(model, optimizer)
    expected = 0.1 * model[0].weight.grad.norm().item()
    assert monitor.get_step_metrics()["update/0.weight/norm"] == pytest.approx(expected, rel=1e-4)


def test_the_norm_of_all_parameters_is_that_of_all_also_when_one_optimizer_rests() -> None:
    model = net()
    a, b = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    monitor = gradmon.watch(model, a, b)
    for resting in (False, True):
        expected = torch.cat([p.detach().double().flatten() for p in model.parameters()]).norm().item()
        one(model, *((b,) if resting else (a, b)))
        assert monitor.get_step_metrics()["gradmon/param_norm"] == pytest.approx(expected, rel=1e-6)


def test_the_update_of_a_parameter_of_two_optimizers_is_that_of_both() -> None:
    model = net()
    a, b = SGD(model.parameters(), lr=0.1), SGD(model[2].parameters(), lr=1.0)
    monitor = gradmon.watch(model, a, b)
    monitor.add_update_metric("norm")
    before = model[2].bias.detach().clone()
    one(model, a, b)
    assert monitor.get_step_metrics()["update/2.bias/norm"] == pytest.approx((model[2].bias - before).norm().item(), rel=1e-6)


def test_an_optimizer_that_was_replaced_is_missed_and_no_old_values_are_given() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    one(model, optimizer)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(GradmonWarning, match="optimizers are gone"):
        one(model, optimizer)
    assert monitor.get_step_metrics() == {}


def test_local_gradients_of_a_discarded_micro_batch_do_not_count() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm", stages="local")
    model(X * 100).sum().backward()
    one(model, optimizer)
    local = monitor.get_step_metrics()["gradient_local/0.weight/norm"]
    assert local == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # re-entrant checkpointing in evaluation
def test_values_from_inside_a_forward_count_once_for_each_training_forward() -> None:
    class Logs(nn.Linear, MonitorMixin):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.is_monitoring:
                self.get_module_monitor().log_tensor("calls", torch.ones(()), "sum")
            return y

    class Net(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layer, self.reentrant = Logs(4, 4), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        model = Net(reentrant)
        optimizer = SGD(model.parameters(), lr=0.1)
        monitor = gradmon.watch(model, optimizer)
        model(X.clone().requires_grad_()).sum().backward()
        with torch.no_grad():
            model(X)
        optimizer.step()
        assert monitor.get_step_metrics()["calls"] == 1.0


def test_one_of_two_optimizers_refused_leaves_the_others_update() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    a, b = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    monitor = gradmon.watch(model, a, b, scaler=scaler)
    monitor.add_update_metric("norm")
    handle = model[0].weight.register_hook(lambda g: g * float("inf"))
    scaler.scale(model(X).sum()).backward()
    handle.remove()
    before = model[2].weight.detach().clone()
    scaler.step(a)
    scaler.step(b)
    scaler.update()
    values = monitor.get_step_metrics()
    assert values["gradmon/steps_not_applied"] == 1.0
    assert values["update/2.weight/norm"] == pytest.approx((model[2].weight - before).norm().item(), rel=1e-5)
    assert "update/0.weight/norm" not in values


# --- logging and reading -------------------------------------------------------------------------------------------------------


def test_late_values_merge_and_reach_their_detector() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_detector(SpikeDetector(signal="loss"))
    for _ in range(20):
        one(model, optimizer)
        monitor.log_scalar("a", 1.0)
        monitor.log_scalar("a", 3.0)
        monitor.log_scalar("b", 2.0, "sum")
        monitor.log_scalar("b", torch.tensor(2.0), "sum")
        monitor.log_scalar("loss", 1.0)
    values = monitor.get_step_metrics()
    assert (values["a"], values["b"]) == (2.0, 4.0)
    assert monitor.get_all_metrics()[18]["spike_score/loss"] == 0.0


def test_a_detector_is_fed_without_a_preset_and_scores_stand_under_their_signal() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model)
    monitor.add_detector(SpikeDetector())
    monitor.attach(optimizer)
    for _ in range(20):
        one(model, optimizer)
    assert set(monitor.get_step_metrics()) == {"spike_score/grad_norm"}
    monitor._runtime.use_preset("minimal")
    one(model, optimizer)
    assert "gradmon/spike_score" in monitor.get_step_metrics()


def test_what_the_full_preset_adds_stays_out_of_sight_and_makes_way(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=tmp_path)
    one(model, optimizer)
    assert all(key.startswith("gradmon/") for key in monitor.get_step_metrics())
    run = gradmon.load_run(tmp_path)
    assert run.series("optimizer/0.weight/exp_avg_norm")[0] > 0
    assert run.series("activation/2/std")[0] == pytest.approx(model(X).std(correction=0).item(), rel=0.5)
    monitor.add_gradient_metric("norm")
    monitor._runtime.use_preset("minimal")
    one(model, optimizer)
    assert "gradient/0.weight/norm" in monitor.get_step_metrics()
    assert not any(key.startswith("optimizer/") for key in monitor.describe())


def test_the_run_has_what_was_shown_where_its_rows_do_not_say_so(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, run_dir=tmp_path, layers="blocks", preset="minimal")
    monitor.add_gradient_metric("norm", lambda g: g.abs().max())  # a built-in's name for something else
    monitor.add_activation_metric("norm", metric_regex="^0$")
    monitor.add_activation_metric("max", metric_regex="^2$")
    monitor.attach(optimizer)
    one(model, optimizer)
    monitor.log_scalar("optimizer/lr/0", 0.1)
    run = gradmon.load_run(tmp_path)
    for key, value in monitor.get_step_metrics().items():
        assert run.series(key)[0] == pytest.approx(value, rel=1e-6), key


def test_a_forked_child_that_ends_sends_nothing(tmp_path: Path) -> None:
    code = f"""
        import os, sys, torch, torch_gradmon as gm
        m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), lr=.1)
        monitor = gm.watch(m, o, run_dir={str(tmp_path)!r}); monitor.add_sink(gm.sinks.JsonlSink({str(tmp_path / "m.jsonl")!r}))
        for _ in range(3):
            m(torch.ones(2)).sum().backward(); o.step()
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        monitor.detach()
    """
    assert forked.run(textwrap.dedent(code)).returncode == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert gradmon.load_run(tmp_path).steps == [0, 1, 2]


def test_the_callback_of_a_spike_can_ask_the_monitor() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    told: list[Any] = []
    monitor = gradmon.watch(
        model, optimizer, on_spike=lambda event: told.append((monitor.get_step_metrics(), monitor.last_record.top_gradients(1)))
    )
    for step in range(20):
        one(model, optimizer, x=X * (1000 if step == 19 else 1))
    ((values, top),) = told
    assert values["gradmon/spike_score"] > 6
    assert len(top) == 1


def test_getters_can_be_called_from_another_thread() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, history=5, preset="minimal")
    monitor.attach(optimizer)
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                monitor.get_all_metrics()
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(50):
        one(model, optimizer)
    done.set()
    thread.join()
    assert failures == []


def test_a_tag_stands_with_the_step_that_it_was_given_for(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, every=2)
    for step in range(4):
        optimizer.zero_grad()
        model(X).sum().backward()
        monitor.log_context(batch=step)
        optimizer.step()
        monitor.log_context(after=step)
    run = gradmon.load_run(tmp_path)
    assert [run.record(step).context["tags"] for step in run.steps] == [{"batch": 0, "after": 0}, {"batch": 2, "after": 2}]


@pytest.mark.parametrize("device", ["meta"])
def test_a_default_device_is_not_used_for_the_arithmetic(device: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, layers="blocks")
    torch.set_default_device(device)
    try:
        one(model, optimizer)
        values = monitor.get_step_metrics()
    finally:
        torch.set_default_device(None)
    assert {"gradmon/grad_norm", "gradmon/update_ratio_p90", "gradient_before_clip/0/norm"} <= values.keys()


def test_a_choice_of_layers_that_matches_nothing_warns_with_the_nearest_names() -> None:
    model = net()
    with pytest.warns(GradmonWarning, match=r"layers='0.wieght' matches no parameter.*did you mean 0.weight"):
        ModuleMonitor(model, layers="0.wieght")


def test_two_monitors_leave_nothing_behind_in_whatever_order() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = SGD(model.parameters(), lr=0.1)
    found = dict(scaler.__dict__)
    monitors = [ModuleMonitor(model).attach(optimizer, scaler=scaler) for _ in range(2)]
    for monitor in monitors:
        monitor.detach()
    assert scaler.__dict__ == found
    assert not model._forward_pre_hooks
