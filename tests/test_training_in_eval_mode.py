"""What is logged between forward and backward belongs to the step of that backward, in whatever mode and by whatever call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

from . import oracle
from .loops import differences
from .test_flight import slow  # noqa: F401

Call = Callable[[nn.Module, Tensor], Tensor]


def whole(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def parts(model: nn.Module, x: Tensor) -> Tensor:
    return model[3](model[2](model[1](model[0](x))))


def hidden(model: nn.Module, x: Tensor) -> Tensor:
    return model.forward(x)  # of which no hook of the root is told, as inside of a compiled function


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


class Run:
    """A loop that logs on both sides of its backward pass, and what is to come out for each step."""

    def __init__(self, call: Call = whole, activations: bool = True, **options: Any) -> None:
        self.model, self.call = net(), call
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = ModuleMonitor(self.model, on_spike=None, **options)
        self.monitor.add_gradient_metric("norm")
        if activations:
            self.monitor.add_activation_metric("rms", metric_regex="^0$")
        self.monitor.attach(self.optimizer)
        self.rows: dict[int, dict[str, float]] = {}
        self.monitor.add_sink(lambda values, step: self.rows.update({step: values}))
        self.expected: dict[int, dict[str, float]] = {}
        self.activations = activations

    def step(self, micro_batches: int = 1, number: int | None = None) -> None:
        number = len(self.expected) if number is None else number
        self.optimizer.zero_grad()
        losses, hiddens = [], []
        for _ in range(micro_batches):
            x = torch.randn(8, 4)
            with torch.no_grad():
                hiddens.append(nn.functional.linear(x, self.model[0].weight, self.model[0].bias))
            loss = self.call(self.model, x).square().mean()
            losses.append(loss.item())
            self.monitor.log_scalar("loss", loss.detach())
            self.monitor.log_scalars({"number": number})
            self.monitor.log_tensor("tensor", loss.detach().expand(3))
            self.monitor.log_context(batch=number)
            loss.backward()
        self.optimizer.step()
        self.monitor.log_scalar("after", float(number))
        mean = sum(losses) / len(losses)
        self.expected[number] = {"loss": mean, "number": number, "tensor": mean, "after": number}
        if self.activations:
            self.expected[number]["activation/0/rms"] = oracle.values(hiddens)["rms"]

    def validate(self, mode: Any) -> None:
        """After a step, to which the values belong."""
        was_training = self.model.training
        self.model.eval()
        with mode():
            self.model(torch.full((3, 4), 100.0))
        self.monitor.log_scalar("validation", len(self.expected))
        self.expected[max(self.expected)]["validation"] = len(self.expected)
        self.model.train(was_training)

    def check(self, every: int = 1) -> None:
        self.monitor.detach()
        found = self.monitor.get_all_metrics()
        assert list(found) == list(self.expected)[::every]
        for number, values in found.items():
            assert {k: v for k, v in values.items() if "grad" not in k} == pytest.approx(self.expected[number], rel=1e-6), number
        assert {n: {k: v for k, v in row.items() if k in self.expected[n]} for n, row in self.rows.items()} == {
            n: {k: v for k, v in values.items() if k in self.expected[n]} for n, values in found.items()
        }
        assert self.monitor.warning_counts() == {}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("call", [whole, parts])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_all_of_a_step_is_in_that_step_from_the_first_on(mode: str, call: Call, every: int, tmp_path: Path) -> None:
    run = Run(call, every=every, run_dir=tmp_path)
    getattr(run.model, mode)()
    for _ in range(3):
        run.step()
        run.step(micro_batches=2)
    run.check(every)
    saved = gradmon.load_run(tmp_path)
    for step in saved.steps:
        assert saved.record(step).metrics["loss"] == pytest.approx(run.expected[step]["loss"])
        assert saved.record(step).context["tags"] == {"batch": step}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("call", [parts, hidden])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_forward_that_no_hook_sees_takes_nothing_to_the_step_before(mode: str, call: Call, every: int) -> None:
    run = Run(call, activations=False, every=every)
    getattr(run.model, mode)()
    for number in range(6):
        run.step(micro_batches=1 + number % 2)
        if number > 2:  # a key that comes later, as what is logged behind a step does
            run.monitor.log_scalar("later", number)
            run.expected[number]["later"] = number
    run.check(every)


def test_also_where_values_travel_behind_the_device(slow: Any) -> None:  # noqa: F811
    run = Run()
    run.model.eval()
    for _ in range(5):
        run.step()
        run.validate(torch.no_grad)
    run.check()


@pytest.mark.parametrize("validation", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_validation_between_steps_is_of_the_step_before(mode: str, validation: Any) -> None:
    run = Run()
    getattr(run.model, mode)()
    for _ in range(4):
        run.step()
        run.validate(validation)
        run.validate(validation)
    run.check()


@pytest.mark.parametrize("asks", [False, True])
def test_validation_with_gradients_beside_training_mode_is_of_the_step_before(asks: bool) -> None:
    run = Run()
    for number in range(4):
        run.step()
        run.validate(torch.enable_grad)
        if asks:
            assert run.monitor.get_step_metrics()["validation"] == number + 1
    run.check()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_validation_before_the_first_step_measures_nothing_of_it(mode: str) -> None:
    run = Run()
    run.model.eval()
    with torch.no_grad() if mode == "eval" else torch.enable_grad():
        for _ in range(3):
            run.model(torch.full((3, 4), 100.0))
            run.monitor.log_tensor("tensor", torch.full((3,), 100.0))
    run.monitor.log_scalar("validation", 1.0)  # there is no other step than the first one
    getattr(run.model, mode)()
    for _ in range(3):
        run.step()
    run.expected[0]["validation"] = 1.0
    run.check()


@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_loop_that_changes_its_mode_loses_no_logged_value(first: str) -> None:
    second = "eval" if first == "train" else "train"
    run = Run()
    for mode in (first, second, first):
        getattr(run.model, mode)()
        for micro_batches in (2, 1, 1):
            run.step(micro_batches)
            if mode == "eval" and "activation/0/rms" not in (values := run.monitor.get_step_metrics()):
                # what is measured of modules was not known to be of training; all that is logged is there
                number = len(run.expected) - 1
                assert number == (3 if first == "train" else 6)
                assert values.keys() >= {"loss", "number", "after", "tensor"}
                assert "evaluation mode" in run.monitor.missing()["activation/0/rms"]
                del run.expected[number]["activation/0/rms"]
    run.check()


def test_a_training_that_goes_on_in_evaluation_mode_with_validation_before_it() -> None:
    run = Run()
    for epoch in range(3):
        for _ in range(2):
            run.step()
        run.validate(torch.enable_grad if not epoch else torch.no_grad)
        run.model.eval()  # and nobody calls model.train() again
    del run.expected[2]["activation/0/rms"]
    run.check()


def test_a_look_in_training_mode_hides_no_step_that_is_trained_in_evaluation_mode() -> None:
    run = Run()
    run.model.eval()
    for _ in range(3):
        run.step()
    run.model.train()
    x = torch.randn(8, 4)
    run.model(x)  # belongs to the next step, as it does where all are trained in training mode
    looked_at = nn.functional.linear(x, run.model[0].weight, run.model[0].bias).detach()
    run.model.eval()
    for _ in range(2):
        run.step()
    trained = torch.tensor(run.expected[3].pop("activation/0/rms"))
    run.expected[3]["activation/0/rms"] = (trained.square() / 2 + looked_at.square().mean() / 2).sqrt().item()
    run.check()


def test_modules_that_log_by_themselves_are_heard_in_evaluation_mode() -> None:
    class Layer(nn.Linear, gradmon.MonitorMixin):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.is_monitoring:
                self.get_module_monitor().log_tensor("layer", y)
            return y

    torch.manual_seed(0)
    model = nn.Sequential(Layer(4, 3), nn.Linear(3, 1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(4):
        x = torch.randn(5, 4)
        expected = nn.functional.linear(x, model[0].weight, model[0].bias).double().mean().item()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        with torch.no_grad():
            model(100 * x)
        optimizer.step()
        assert monitor.get_step_metrics()["layer"] == pytest.approx(expected, rel=1e-5)


def test_a_closure_in_evaluation_mode_logs_into_its_step() -> None:
    model = net().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            monitor.log_scalar("loss", float(step))
            loss.backward()
            return loss

        optimizer.step(closure)
        assert monitor.get_step_metrics()["loss"] == step
        monitor.log_scalar("after", float(step))
        assert monitor.get_step_metrics()["after"] == step


@pytest.mark.parametrize("fails", ["closure", "optimizer"])
def test_a_first_step_that_raised_shows_the_mode_of_training(fails: str) -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_spike=None)
    monitor.add_activation_metric("norm", metric_regex="^0$", of=("output", "output_gradient"))
    monitor.attach(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        if fails == "closure" and monitor.current_step == 0:
            raise TypeError
        return loss

    if fails == "closure":
        with pytest.raises(TypeError):
            optimizer.step(closure)
        optimizer.step(closure)
    else:
        closure()
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        monitor.detach()  # else the next forward would count as one of the step that raised
        monitor.attach(optimizer)
        closure()
        optimizer.step()
    assert {"activation/0/norm", "activation_gradient/0/norm"} <= monitor.get_all_metrics()[1].keys(), monitor.missing()


@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_closure_that_begins_to_train_in_eval_mode_says_so(first: str) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_spike=None)
    monitor.add_activation_metric("norm", metric_regex="linear1", of=("output", "output_gradient"))
    monitor.add_attention_metric("entropy")
    monitor.attach(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4, 8)).square().mean()
        loss.backward()
        return loss

    for mode in (first, "eval", "eval"):
        getattr(model, mode)()
        optimizer.step(closure)
        values, missing = monitor.get_step_metrics(), monitor.missing()
        keys = ["activation/linear1/norm", "activation_gradient/linear1/norm", "attention_entropy/self_attn/mean"]
        if monitor.current_step == (first == "train"):
            assert not values.keys() & keys
            for key in (*keys[:2], "attention_entropy/.*"):
                assert "was called in evaluation mode, as it was not before" in missing[key]
        else:
            assert values.keys() >= {*keys}


@pytest.mark.parametrize("place", ["after the step", "before the next one"])
def test_what_is_logged_between_a_validation_with_gradients_and_a_closure_is_of_the_step_before(place: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor = gradmon.watch(model, optimizer, on_spike=None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        optimizer.step(closure)
        if place == "after the step":
            monitor.log_scalar("late", float(step))
        model.eval()
        model(torch.ones(2, 3))  # with a graph, as training might
        model.train()
        if place != "after the step":
            monitor.log_scalar("late", float(step))
    assert [values["late"] for values in monitor.get_all_metrics().values()] == [0.0, 1.0, 2.0]
    monitor.detach()


def test_steps_by_hand_go_by_the_mode_alone() -> None:
    run = Run()
    run.model.eval()
    for number in range(3):
        run.monitor.begin_step(number)
        run.step()
        run.monitor.end_step()
        values = run.monitor.get_step_metrics()
        assert "activation/0/rms" not in values
        assert values["loss"] == pytest.approx(run.expected[number]["loss"])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_parameters_and_buffers_are_the_same_with_and_without_the_monitor(mode: str) -> None:
    found = []
    for watches in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if watches:
            gradmon.watch(model, optimizer, preset="full", on_spike=None)
        for epoch in range(3):
            model.train(mode == "train" and epoch != 1)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            model.eval()
            model(torch.randn(8, 4))
        found.append((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    assert differences(*found) == []


def test_a_refused_step_that_nothing_was_seen_of_changes_no_side_on_which_the_loop_logs() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    for step in range(4):
        monitor.log_scalar("start", float(step))  # which belongs to the step that has ended, or to the first
        loss = model(torch.randn(8, 4)).square().mean() * (float("inf") if step == 1 else 1)
        scaler.scale(loss).backward()
        if step == 1:
            monitor.detach()
            monitor.attach(optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    monitor.detach()
    rows = {step: values.get("start") for step, values in monitor.get_all_metrics().items()}
    assert rows == {0: 0.5, 1: 2.0, 2: 3.0, 3: None}
