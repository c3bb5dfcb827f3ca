"""What went wrong in monitors before this one, each as the smallest program that shows it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention


def one_step(monitor: ModuleMonitor, model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float]:
    """The loop by hand, as torch-module-monitor's README has it."""
    monitor.begin_step(0)
    output = model(*args, **kwargs)
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    output.float().square().mean().backward()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    return monitor.get_step_metrics()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_several_scalars_can_be_logged() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.begin_step(0)
    monitor.log_scalars({"loss": 1.5, "accuracy": torch.tensor(0.25)})
    monitor.end_step()
    assert monitor.get_step_metrics() == {"loss": 1.5, "accuracy": 0.25}


def test_no_gradient_metric_or_one_that_matches_nothing_is_no_error() -> None:
    model = mlp()
    assert one_step(ModuleMonitor(model), model, X) == {}
    monitor = ModuleMonitor(model)
    with pytest.warns(gradmon.GradmonWarning, match="matches nothing"):
        monitor.add_gradient_metric("norm", metric_regex="nowhere")
    assert one_step(monitor, model, X) == {}


def test_an_activation_metric_may_return_a_number_of_python() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("largest", lambda x: x.max().item(), "^0$")
    assert one_step(monitor, model, X) == {"activation/0/largest": pytest.approx(model[0](X).max().item(), rel=1e-6)}


def test_a_metric_that_raises_does_not_stop_the_step() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("bad", lambda x: 1 / 0)
    monitor.add_gradient_metric("norm", metric_regex="0.weight", stages=("after_clip",))
    with pytest.warns(gradmon.GradmonWarning, match="'bad' failed"):
        assert one_step(monitor, model, X).keys() == {"gradient/0.weight/norm"}


def test_an_integer_output_is_left_out() -> None:
    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    model = nn.ModuleDict({"linear": nn.Linear(4, 3), "choice": Choice()})
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    model["choice"](model["linear"](X))
    monitor.end_step()
    assert monitor.get_step_metrics().keys() == {"activation/linear/mean"}
    assert "int64" in monitor.missing()["activation/choice/mean"]


def test_the_minimum_of_all_is_a_plain_float() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("min", lambda x: torch.min(x, dim=-1).values, "^0$", metric_aggregation_fn=torch.min)
    values = one_step(monitor, model, X)
    assert type(values["activation/0/min"]) is float
    assert values["activation/0/min"] == pytest.approx(model[0](X).min().item(), rel=1e-6)


def test_values_that_are_asked_for_in_the_middle_of_a_step_are_those_of_the_last_one() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(dim=-1))
    first = one_step(monitor, model, X)
    monitor.begin_step(1)
    model(2 * X)
    found = monitor.get_step_metrics()
    assert found in ({}, first)
    assert all(type(value) is float for value in found.values())


def test_the_mixin_works_without_a_monitor() -> None:
    class Layer(nn.Linear, MonitorMixin):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.is_monitoring
            assert self.get_module_monitor() is None
            return super().forward(x)

    assert Layer(4, 2)(X).shape == (5, 2)


def test_a_shared_module_has_a_reference() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    monitor = ModuleMonitor(model)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference[0].weight += 0.5
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", metric_regex="^0$")
    hidden, other = shared(X), reference[0](X)
    both = torch.cat([hidden - other, shared(hidden.tanh()) - reference[0](other.tanh())]).double()
    assert one_step(monitor, model, X) == {"activation_difference/0/norm": pytest.approx(both.norm().item(), rel=1e-5)}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=reentrant))

    model = Net()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("elements", lambda x: x.numel(), metric_aggregation_fn="sum")
    values = one_step(monitor, model, X.clone().requires_grad_())
    assert {key: value for key, value in values.items() if "body" in key} == {
        "activation/body/elements": 10,
        "activation/body.0/elements": 30,
        "activation/body.1/elements": 30,
        "activation/body.2/elements": 10,
    }


def _entropy(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> float:
    model = nn.Identity()
    monitor = ModuleMonitor(model)
    monitor.begin_step(0)
    monitor_scaled_dot_product_attention(monitor, "attention", query, key, value, **arguments)
    monitor.end_step()
    return monitor.get_step_metrics()["attention_entropy/attention.head_0"]


def test_entropy_in_half_precision_with_a_causal_mask_is_a_number() -> None:
    q, k, v = torch.randn(3, 2, 1, 16, 8).half().unbind(0)
    logits = (q.double() @ k.double().mT / math.sqrt(8)).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf)
    weights = logits.softmax(-1)
    expected = -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1).mean().item()
    assert _entropy(q, k, v, is_causal=True) == pytest.approx(expected, rel=1e-4)


def test_dropout_does_not_enter_the_entropy() -> None:
    q = k = v = torch.zeros(1, 1, 64, 8)
    assert _entropy(q, k, v, dropout_p=0.5) == pytest.approx(math.log(64), rel=1e-6)


def test_other_lengths_and_a_mask_beside_a_causal_one_are_measured() -> None:
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 9, 8)
    assert _entropy(q, k, k) == pytest.approx(math.log(9), rel=1e-6)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, 1] = False  # of the keys that each query sees, this one is hidden: 1, 1 and 2 are left
    assert _entropy(q, k, k, attn_mask=mask, is_causal=True) == pytest.approx(math.log(2) / 3, rel=1e-6)


def test_tuples_keywords_and_dropout_are_compared_with_a_reference() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, *, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.drop(self.linear(x))
            return y, y.abs()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.pair(x=x)
            return one + other

    model = Net()
    monitor = ModuleMonitor(model)
    monitor.set_reference_module("init")
    monitor.add_activation_difference_metric("norm")
    names = ("pair.linear", "pair.drop", "pair[0]", "pair[1]", "[root module]")
    assert one_step(monitor, model, X) == {f"activation_difference/{name}/norm": 0.0 for name in names}


def test_a_watched_model_can_be_saved() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm", of=("output", "output_gradient", "input"))
    monitor.begin_step(0)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(X), model(X))


class Wrapper(nn.Module):
    """What DDP does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Wrapper, lambda m: torch.compile(m, backend="eager")], ids=["bare", "DDP", "compile"]
)
def test_patterns_see_the_names_that_keys_show_whatever_is_wrapped_around(wrap: Any) -> None:
    torch._dynamo.reset()
    model = wrap(mlp())
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm", metric_regex=r"^(0|\[root module\])$")
    monitor.add_gradient_metric("norm", metric_regex="^0", stages=("after_clip",))
    monitor.add_parameter_metric("norm", metric_regex="^0")
    assert one_step(monitor, model, X).keys() == {
        *("activation/0/norm", "activation/[root module]/norm"),
        *(f"{source}/0.{name}/norm" for source in ("gradient", "parameter") for name in ("weight", "bias")),
    }


def test_what_is_not_finite_is_counted() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("nonfinite_count", metric_regex="^0$")
    monitor.add_gradient_metric("nonfinite_count", metric_regex="0.bias", stages=("after_clip",))
    bad = X.clone()
    bad[0, 0] = torch.nan
    values = one_step(monitor, model, bad)
    assert values == {"activation/0/nonfinite_count": 6, "gradient/0.bias/nonfinite_count": 6}


# --- what it cost ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wide() -> Iterator[tuple[nn.Module, ModuleMonitor]]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    monitor = ModuleMonitor(model, monitor_step_fn=lambda step: step % 2 == 0, history=5)
    monitor.add_activation_metric("norm", metric_regex="^[01]$")
    yield model, monitor
    monitor.detach()


def test_only_modules_that_a_metric_matches_have_hooks_and_only_on_steps_that_are_monitored(
    wide: tuple[nn.Module, ModuleMonitor],
) -> None:
    model, monitor = wide
    for step in range(6):
        monitor.begin_step(step)
        model(X)
        hooked = [name for name, child in model.named_children() if child._forward_hooks or child._forward_pre_hooks]
        assert hooked == (["0", "1"] if step % 2 == 0 else [])
        monitor.end_step()


def test_a_function_of_every_token_leaves_two_numbers_behind() -> None:
    model = nn.Linear(4, 4)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm", lambda x: x.norm(dim=-1))
    monitor.begin_step(0)
    for _ in range(5):
        model(torch.randn(1000, 4))
    buffer = monitor._runtime.lifecycle.active.buffer
    assert buffer is not None
    assert sum(part.numel() for pending in buffer._values.values() for part in pending.parts) == 2 * 5


def test_patterns_are_not_searched_again_on_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    matches = gradmon.core.records.Metric.matches
    monkeypatch.setattr(
        gradmon.core.records.Metric, "matches", lambda self, name: (searched.append(name), matches(self, name))[1]
    )
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    for step in range(2):
        monitor.begin_step(step)
        model(X)
        monitor.end_step()
    searched.clear()
    for step in range(2, 6):
        monitor.begin_step(step)
        model(X)
        monitor.end_step()
    assert searched == []


def test_history_is_bounded(wide: tuple[nn.Module, ModuleMonitor]) -> None:
    model, monitor = wide
    for step in range(30):
        monitor.begin_step(step)
        model(X)
        monitor.end_step()
    assert list(monitor.get_all_metrics()) == [20, 22, 24, 26, 28]
