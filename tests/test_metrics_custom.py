"""Metrics that are functions of the user: what they may return, how they may fail, and that they never touch the training."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

SOURCES = ["gradient_before_clip", "gradient", "gradient_local", "parameter", "update", "optimizer", "activation"]
STAGES = ("local", "before_clip", "after_clip")


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def _add(monitor: ModuleMonitor, name: str, function: Callable, regex: str = ".*", aggregation: Any = None) -> None:
    """The metric on every source."""
    monitor.add_gradient_metric(name, function, regex, aggregation, stages=STAGES)
    monitor.add_parameter_metric(name, function, regex, aggregation)
    monitor.add_update_metric(name, function, regex, aggregation)
    monitor.add_optimizer_metric(name, lambda state: function(state["grad"]), regex, aggregation)
    monitor.add_activation_metric(name, function, regex, aggregation)


def _run(
    prepare: Callable[[ModuleMonitor], None] | None,
    steps: int = 3,
    micro_batches: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    on_metric_error: str = "raise",
) -> tuple[list[dict[str, float]], list[Tensor], ModuleMonitor]:
    """Metrics of every step, what the training left (parameters and the next random numbers), and the monitor."""
    model = _model(dtype)
    model.insert(2, nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = ModuleMonitor(model, on_metric_error=on_metric_error)
    if prepare is not None:
        prepare(monitor)
        monitor.attach(optimizer)
    metrics = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(torch.randn(3, 4, dtype=dtype)).square().sum().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        metrics.append(monitor.get_step_metrics())
    return metrics, [*(p.detach() for p in model.parameters()), torch.rand(5)], monitor


def _untouched(left: list[Tensor], **arguments: Any) -> bool:
    """Whether the training that left this was, to the last bit, the one without a monitor."""
    return all(a.equal(b) for a, b in zip(left, _run(None, **arguments)[1], strict=True))


PARAMETERS = [f"{layer}.{kind}" for layer in (0, 3) for kind in ("weight", "bias")]
MODULES = ["[root module]", "0", "1", "2", "3"]
ALL_KEYS = {f"{s}/{name}/mine" for s in SOURCES for name in (MODULES if s == "activation" else PARAMETERS)}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: 2, 2.0),
        (lambda x: 0.25, 0.25),
        (lambda x: True, 1.0),
        (lambda x: torch.tensor(3), 3.0),
        (lambda x: torch.tensor(False), 0.0),
        (lambda x: torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (lambda x: torch.tensor([1.0, 2.0, 6.0]), 3.0),
        (lambda x: torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16), 2.5),
        (lambda x: x.numel() / x.numel(), 1.0),
        (lambda x: math.inf, math.inf),
    ],
)
def test_whatever_a_function_returns_becomes_a_plain_float(function: Callable, expected: float) -> None:
    metrics, left, _ = _run(lambda monitor: _add(monitor, "mine", function))
    for step in metrics:
        assert step == dict.fromkeys(ALL_KEYS, expected)
        assert all(type(value) is float for value in step.values())
    assert _untouched(left)


def test_a_function_gets_the_tensor_as_it_is_at_its_stage() -> None:
    shapes, grads = [], []
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_metric_error="raise")

    def look(x: Tensor) -> float:
        shapes.append((tuple(x.shape), x.dtype, x.requires_grad, torch.is_grad_enabled()))
        return float(x.abs().max())

    monitor.add_gradient_metric("top", look, r"^2\.weight$")
    monitor.attach(optimizer)
    model(torch.ones(3, 4)).sum().backward()
    grads.append(model[2].weight.grad.abs().max().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    grads.append(model[2].weight.grad.abs().max().item())
    optimizer.step()
    assert monitor.get_step_metrics() == {
        "gradient_before_clip/2.weight/top": pytest.approx(grads[0]),
        "gradient/2.weight/top": pytest.approx(grads[1]),
    }
    assert set(shapes) == {((2, 5), torch.float32, False, False)}


def test_none_is_no_value() -> None:
    metrics, _, monitor = _run(lambda monitor: _add(monitor, "mine", lambda x: None if x.dim() < 2 else 1.0))
    expected = {key for key in ALL_KEYS if ".weight" in key or "activation" in key}
    assert [step.keys() for step in metrics] == [expected] * 3
    assert monitor.missing().keys() == ALL_KEYS - expected
    assert all("nothing" in monitor.missing()[f"{source}/0.bias/mine"] for source in SOURCES[:-1])


def test_a_function_that_raises_on_one_tensor_is_off_there_and_only_there() -> None:
    calls = []

    def fails_on_vectors(x: Tensor) -> Tensor:
        calls.append(x.dim())
        if x.dim() == 1:
            raise ArithmeticError("only matrices")
        return x.norm()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics, left, monitor = _run(
            lambda monitor: (_add(monitor, "mine", fails_on_vectors), monitor.add_parameter_metric("norm")),
            on_metric_error="warn",
        )
    failed = {key for key in ALL_KEYS if ".bias" in key}
    assert [step.keys() for step in metrics] == [(ALL_KEYS - failed) | {f"parameter/{name}/norm" for name in PARAMETERS}] * 3
    missing = monitor.missing()
    assert missing.keys() == failed
    assert {key: "ArithmeticError: only matrices" in reason for key, reason in missing.items()} == dict.fromkeys(failed, True)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, GradmonWarning)]
    assert len(said) == len(caught) == len({message.split(" failed on ")[0] for message in said})
    assert all("only matrices" in message and ".bias" in message for message in said)
    assert calls.count(1) <= 2 * (len(SOURCES) - 1)  # once for each source and vector, never again
    assert _untouched(left)


def test_with_raise_the_error_of_a_function_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        _run(lambda monitor: monitor.add_parameter_metric("mine", lambda x: 1 / 0))


@pytest.mark.parametrize(
    "spoil",
    [
        Tensor.abs_,
        lambda x: x.zero_(),
        lambda x: x.detach().mul_(2),
        lambda x: torch.nn.init.ones_(x),
        lambda x: x.view(-1).add_(1),
    ],
)
def test_a_function_that_works_in_place_is_refused_and_the_training_is_as_without(spoil: Callable) -> None:
    with pytest.warns(GradmonWarning, match="in place"):
        metrics, left, monitor = _run(lambda monitor: _add(monitor, "mine", lambda x: spoil(x).sum()), on_metric_error="warn")
    assert metrics == [{}] * 3
    assert all("in place" in reason for reason in monitor.missing().values())
    assert _untouched(left)


@pytest.mark.parametrize("name", ["momentum_buffer", "param", "grad"])
def test_an_optimizer_metric_that_works_in_place_is_refused(name: str) -> None:
    with pytest.warns(GradmonWarning, match="in place"):
        metrics, left, _ = _run(
            lambda monitor: monitor.add_optimizer_metric("mine", lambda state: state[name].abs_().sum()), on_metric_error="warn"
        )
    assert metrics == [{}] * 3
    assert _untouched(left)


def test_a_function_that_works_in_place_on_some_tensors_only_is_refused_there_too() -> None:
    def sometimes(x: Tensor) -> Tensor:
        return x.abs_().sum() if x.dim() == 1 else x.sum()

    with pytest.warns(GradmonWarning, match="in place"):
        _, left, _ = _run(lambda monitor: _add(monitor, "mine", sometimes), on_metric_error="warn")
    assert _untouched(left)


def test_a_function_that_draws_random_numbers_leaves_those_of_the_training_alone() -> None:
    metrics, left, _ = _run(lambda monitor: _add(monitor, "mine", lambda x: torch.randn(100).sum() + torch.rand_like(x).sum()))
    assert [step.keys() for step in metrics] == [ALL_KEYS] * 3
    assert _untouched(left)


def test_a_function_that_keeps_its_input_gets_no_graph() -> None:
    kept: list[Tensor] = []
    _, left, _ = _run(lambda monitor: _add(monitor, "mine", lambda x: kept.append(x) or 1.0))
    assert kept
    assert not any(x.requires_grad for x in kept)
    assert _untouched(left)


def test_under_autocast_a_function_computes_in_the_precision_of_its_input() -> None:
    model, x = _model(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("gram", lambda g: (g @ g.t()).diagonal().sum(), "weight", stages=STAGES)
    monitor.add_activation_metric("gram", lambda a: (a.float() @ a.float().t()).diagonal().sum(), "0")
    monitor.attach(optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        out.float().square().sum().backward()
        hidden = model[0](x).float()
        gradients = {f"{i}.weight": model[i].weight.grad.clone() for i in (0, 2)}
        optimizer.step()
    expected = {f"{s}/{k}/gram": g.double().square().sum().item() for k, g in gradients.items() for s in SOURCES[:3]}
    expected["activation/0/gram"] = hidden.double().square().sum().item()  # the mean of two equal calls
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-5)


AGGREGATIONS: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "default": (None, lambda v: v.mean()),
    "mean": ("mean", lambda v: v.mean()),
    "sum": ("sum", lambda v: v.sum()),
    "torch.min": (torch.min, lambda v: v.min()),
    "torch.max": (torch.max, lambda v: v.max()),
    "a dict": (lambda v: {"low": v.min(), "high": float(v.max())}, lambda v: {"low": v.min(), "high": v.max()}),
}


@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_over_elements_and_micro_batches(aggregation: str, dtype: torch.dtype, max_norm: float | None) -> None:
    given, by_hand = AGGREGATIONS[aggregation]
    model = _model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("row", lambda g: g[0], "^0.weight", given, stages=STAGES)
    monitor.add_gradient_metric("one", lambda g: g[0, 0], "^0.weight", given, stages=STAGES)
    monitor.add_activation_metric("rows", lambda a: a.abs().sum(dim=1), "^0", given)
    monitor.attach(optimizer)
    seen: dict[str, list[Tensor]] = {}
    model[0].register_forward_hook(
        lambda m, args, out: seen.setdefault("activation/0/rows", []).append(out.detach().abs().sum(dim=1))
    )
    for size in (5, 1, 2):
        loss = model(torch.randn(size, 4, dtype=dtype)).square().sum()
        (local,) = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
        seen.setdefault("gradient_local/0.weight/row", []).append(local[0])
        seen.setdefault("gradient_local/0.weight/one", []).append(local[0, 0].reshape(1))
        loss.backward()
    for source in ("gradient_before_clip", "gradient"):
        gradient = model[0].weight.grad.clone()
        seen |= {f"{source}/0.weight/row": [gradient[0]], f"{source}/0.weight/one": [gradient[0, 0].reshape(1)]}
        if max_norm is not None and source == "gradient_before_clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    expected: dict[str, float] = {}
    for key, parts in seen.items():
        value = by_hand(torch.cat(parts).double())
        expected |= {f"{key}.{name}": float(v) for name, v in value.items()} if isinstance(value, dict) else {key: float(value)}
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)
    assert all(type(value) is float for value in monitor.get_step_metrics().values())
    assert monitor.missing() == {}


def test_a_failing_aggregation_loses_its_keys_with_a_reason_and_nothing_else() -> None:
    def prepare(monitor: ModuleMonitor) -> None:
        monitor.add_parameter_metric("good", lambda p: p.sum())
        monitor.add_parameter_metric("bad", lambda p: p.sum(), r"0\.weight", lambda v: v.no_such_method())

    with pytest.warns(GradmonWarning, match="aggregation"):
        metrics, left, monitor = _run(prepare, on_metric_error="warn")
    assert [step.keys() for step in metrics] == [{f"parameter/{name}/good" for name in PARAMETERS}] * 3
    assert monitor.missing().keys() == {"parameter/0.weight/bad"}
    assert "no_such_method" in monitor.missing()["parameter/0.weight/bad"]
    assert _untouched(left)


def test_a_key_logged_with_two_aggregations_keeps_the_first() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, values = ModuleMonitor(model).attach(optimizer), []
    with pytest.warns(GradmonWarning) as told:
        for turn in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            monitor.log_scalar("other", 1.0)
            monitor.log_scalar("most", 1.0, "max")
            for aggregation in [None, "min", lambda v: v.sum()] if turn else [None]:
                monitor.log_scalar("most" if turn else "plain", 3.0, aggregation)
            monitor.log_scalar("plain", 5.0)
            monitor.log_scalar("other", 3.0)
            optimizer.step()
            values.append({key: value for key, value in monitor.get_step_metrics().items() if not key.startswith("gradmon/")})
    assert values == [{"most": 1.0, "plain": 4.0, "other": 2.0}, *([{"most": 1.0, "plain": 5.0, "other": 2.0}] * 2)]
    assert monitor.missing() == {}
    assert monitor.warning_counts() == {"log:most": 6}
    assert "need one aggregation, and were logged with 'max' and 'mean'" in str(told[0].message)


@pytest.mark.parametrize("result", ["text", [1.0], {"a": 1}, torch.empty(0), torch.tensor(1j)], ids=repr)
def test_what_is_no_number_is_refused_like_an_error(result: Any) -> None:
    with pytest.warns(GradmonWarning, match="parameter/0.weight/mine"):
        metrics, left, monitor = _run(
            lambda monitor: monitor.add_parameter_metric("mine", lambda p: result, r"0\.weight"), on_metric_error="warn"
        )
    assert metrics == [{}] * 3
    assert monitor.missing().keys() == {"parameter/0.weight/mine"}
    assert _untouched(left)


def _trained_with(function: object, steps: int = 4, source: str = "gradient") -> gradmon.ModuleMonitor:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    getattr(monitor, f"add_{source}_metric")("mine", function)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    monitor.get_step_metrics()
    return monitor


@pytest.mark.parametrize("source", ["gradient", "parameter", "update", "activation"])
def test_metric_that_always_returns_none_warns_once(source: str) -> None:
    with pytest.warns(GradmonWarning, match="'mine' has returned None each time so far: is its return missing") as caught:
        monitor = _trained_with(lambda x: None, source=source)
    assert len([each for each in caught if "None" in str(each.message)]) == 1
    assert "its function returned nothing" in monitor.missing().values()
    monitor.detach()


def test_metric_that_has_values_for_some_tensors_alone_is_no_mistake() -> None:
    monitor = _trained_with(lambda x: x.norm() if x.dim() > 1 else None)
    assert "gradient/weight/mine" in monitor.get_step_metrics()
    monitor.detach()


@pytest.mark.parametrize("pattern", ["weight", re.compile("weight")])
def test_pattern_in_the_place_of_a_function_is_named_as_such(pattern: object) -> None:
    monitor = gradmon.ModuleMonitor(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="pass metric_regex="):
        monitor.add_gradient_metric("norm", pattern)  # type: ignore[arg-type]
