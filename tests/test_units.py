"""Metrics that are no view of the statistics: dead units, saturated gates, kurtosis, each against its plain formula in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests import oracle
from torch_gradmon import ModuleMonitor
from torch_gradmon.capture.module_values import WINDOW
from torch_gradmon.statistics.histogram import central_sums, kurtosis

SGD = torch.optim.SGD


class Scale(nn.Module):
    """A layer that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# --- dead units ----------------------------------------------------------------------------------------------------------------


def monitored(layer: nn.Module, metric: str = "dead", **options: object) -> tuple[nn.Sequential, ModuleMonitor]:
    model = nn.Sequential(layer)
    monitor = ModuleMonitor(model, on_metric_error="raise", **options)
    monitor.add_activation_metric(metric, metric_regex="^0$")
    return model, monitor


def step(monitor: ModuleMonitor, number: int, model: nn.Module, *inputs: Tensor) -> float | None:
    """What a step of these micro-batches says of the layer."""
    monitor.begin_step(number)
    for x in inputs:
        model(x)
    monitor.end_step()
    return next(iter(monitor.get_step_metrics().values()), None)


def silent(output: Tensor, dim: int, eps: float = oracle.EPS) -> Tensor:
    """Which units, along ``dim``, have no element above ``eps``; NaN is above."""
    units = output.detach().double().movedim(dim, 0)
    return ~(~(units.reshape(len(units), -1).abs() <= eps)).any(dim=1)


def test_the_share_is_of_the_last_window_of_steps_and_absent_before_with_the_reason() -> None:
    model, monitor = monitored(Scale())
    generator = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.0, 1.0, 0.02, 0.005, 0.01, 0.0, 0.3, 0.01])  # of a unit to be alive in a step
    history: list[Tensor] = []
    shares = set()
    for number in range(2 * WINDOW + 50):
        alive = torch.rand(8, generator=generator) < chances
        x = torch.zeros(5, 8)
        x[number % 5] = torch.where(alive, -0.5, 0.0)
        share = step(monitor, number, model, x)
        history.append(silent(x, 1))
        if number + 1 < WINDOW:
            assert share is None
            assert monitor.missing() == {"activation/0/dead": f"it takes 100 monitored steps, and {number + 1} were seen"}
        else:
            expected = torch.stack(history[-WINDOW:]).all(dim=0).double().mean().item()
            assert share == expected, number
            assert monitor.missing() == {}
            shares.add(share)
    assert len(shares) >= 4  # units died and woke up


def _with_dead(layer: nn.Module, units: list[int]) -> nn.Module:
    """Whose ``units`` give zeros."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.shape[0] > max(units):
                parameter[units] = 0.0
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "Linear": (lambda: _with_dead(nn.Linear(6, 4), [1]), lambda: torch.randn(3, 6), -1),
    "Linear on sequences": (lambda: _with_dead(nn.Linear(6, 4), [1]), lambda: torch.randn(2, 3, 6), -1),
    "Linear on four dimensions": (lambda: _with_dead(nn.Linear(6, 4), [1]), lambda: torch.randn(2, 3, 5, 6), -1),
    "Linear on one sample": (lambda: _with_dead(nn.Linear(6, 4), [1]), lambda: torch.randn(6), -1),
    "Conv1d": (lambda: _with_dead(nn.Conv1d(2, 8, 3), [0, 5]), lambda: torch.randn(3, 2, 9), 1),
    "Conv2d": (lambda: _with_dead(nn.Conv2d(2, 8, 3), [0, 5]), lambda: torch.randn(3, 2, 5, 5), 1),
    "Conv3d": (lambda: _with_dead(nn.Conv3d(1, 4, 2), [3]), lambda: torch.randn(2, 1, 3, 3, 3), 1),
    "BatchNorm1d": (lambda: _with_dead(nn.BatchNorm1d(4), [2]), lambda: torch.randn(5, 4), 1),
    "BatchNorm1d on sequences": (lambda: _with_dead(nn.BatchNorm1d(4), [2]), lambda: torch.randn(5, 4, 3), 1),
    "BatchNorm2d": (lambda: _with_dead(nn.BatchNorm2d(4), [2]), lambda: torch.randn(5, 4, 3, 2), 1),
    "GroupNorm": (lambda: _with_dead(nn.GroupNorm(2, 4), [0, 1, 2]), lambda: torch.randn(5, 4, 3), 1),
    "LayerNorm": (lambda: _with_dead(nn.LayerNorm(8), [2]), lambda: torch.randn(2, 3, 8), -1),
    "ReLU behind a convolution": (nn.ReLU, lambda: _with_dead(nn.Conv2d(2, 8, 3), [1])(torch.randn(3, 2, 5, 5)), 1),
    "GELU in a transformer": (nn.GELU, lambda: _with_dead(nn.Linear(6, 4), [1])(torch.randn(2, 3, 6)), -1),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), lambda: _with_dead(nn.Conv1d(2, 8, 3), [0])(torch.randn(3, 2, 9)), 1),
    "Conv2d on one image": (lambda: _with_dead(nn.Conv2d(2, 8, 3), [0, 5]), lambda: torch.randn(2, 5, 5), 0),
    "Conv1d on one signal": (lambda: _with_dead(nn.Conv1d(2, 8, 3), [0, 5]), lambda: torch.randn(2, 5), 0),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(2), lambda: _with_dead(nn.Conv1d(2, 8, 3), [0])(torch.randn(3, 2, 9)), 1),
    "LPPool1d": (lambda: nn.LPPool1d(2, 2), lambda: _with_dead(nn.Conv1d(2, 8, 3), [0])(torch.randn(3, 2, 9)), 1),
    "nothing dead": (lambda: nn.Linear(6, 4), lambda: torch.randn(3, 6), -1),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_what_the_units_of_a_layer_are(kind: str) -> None:
    make, batch, dim = LAYERS[kind]
    layer = make()
    model, monitor = monitored(layer)
    share, dead = None, None
    for number in range(WINDOW):
        x = batch()
        share = step(monitor, number, model, x)
        gone = silent(layer(x), dim)
        dead = gone if dead is None else dead & gone
    assert dead is not None
    assert share == dead.double().mean().item()
    assert (share > 0) == (kind != "nothing dead")


def test_nan_is_alive_and_eps_itself_is_silent() -> None:
    model, monitor = monitored(Scale(), zero_threshold=0.25)
    above = math.nextafter(0.25, 1.0)
    column = torch.tensor([[0.25, -0.25, above, -above, math.nan, math.inf, 0.0, -0.0]], dtype=torch.float64)
    for number in range(WINDOW):
        share = step(monitor, number, model, column)
    assert share == 0.5


@pytest.mark.parametrize(("eps", "dtype"), [(0.1, torch.float32), (1e-8, torch.bfloat16), (0.3, torch.bfloat16)], ids=str)
def test_a_unit_is_alive_above_eps_as_real_numbers_compare(eps: float, dtype: torch.dtype) -> None:
    model, monitor = monitored(Scale().to(dtype), zero_threshold=eps)
    x = torch.tensor([[0.0, eps]], dtype=dtype)
    assert float(x[0, 1]) > eps
    for number in range(WINDOW):
        share = step(monitor, number, model, x)
    assert share == silent(x, 1, eps).double().mean().item() == 0.5


def test_calls_and_micro_batches_of_a_step_count_as_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Scale()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x.flip(1))

    model = Twice()
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("dead", metric_regex="^layer$")
    monitor.add_activation_metric("dead", metric_regex="^layer$", split_calls=True)
    first, second = torch.zeros(2, 8), torch.zeros(3, 8)
    first[1, 0], second[2, 1] = 1.0, 1.0  # units 0 and 1 are alive in one micro-batch each, 7 and 6 in the other call
    for number in range(WINDOW):
        step(monitor, number, model, first, second)
    assert monitor.get_step_metrics() == {
        "activation/layer/dead": 4 / 8,
        "activation/layer@0/dead": 6 / 8,
        "activation/layer@1/dead": 6 / 8,
    }


def test_steps_that_are_not_monitored_do_not_count() -> None:
    model, monitor = monitored(Scale(), every=3)
    x = torch.tensor([[0.0, 1.0]])
    shares = [step(monitor, number, model, x if number % 3 == 0 else x.flip(1)) for number in range(3 * WINDOW)]
    assert [number for number, share in enumerate(shares) if share is not None] == [3 * WINDOW - 3]
    assert shares[-3] == 0.5


def test_steps_on_which_it_is_not_measured_silence_nobody() -> None:
    model = nn.Sequential(Scale())
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("dead", metric_regex="^0$", every=3)
    monitor.add_activation_metric("dead", metric_regex="^0$", every=150, split_calls=True)
    x = torch.tensor([[0.0, 1.0]])
    shares = {}
    for number in range(3 * WINDOW):
        share = step(monitor, number, model, x if number % 3 == 0 else x.flip(1))
        if share is not None:
            shares[number] = share
    assert shares == {3 * WINDOW - 3: 0.5}  # its hundredth step


def test_a_module_that_is_not_called_does_not_die() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.which = Scale(), Scale(), "a"

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, self.which)(x)

    model = Branches()
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("dead", metric_regex="^[ab]$")
    for number in range(WINDOW + 2):
        model.which = "a" if number == 0 else "b"
        step(monitor, number, model, torch.ones(1, 4))
    assert monitor.get_step_metrics() == {"activation/b/dead": 0.0}
    assert "not called" in monitor.missing()["activation/a/dead"]


def test_a_metric_that_is_added_meanwhile_changes_nothing() -> None:
    model, monitor = monitored(Scale())
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for number in range(WINDOW):
        if number == 40:
            monitor.add_activation_metric("std", metric_regex="^0$")
            monitor.add_activation_metric("norm", of="input")
        step(monitor, number, model, x)
    assert monitor.get_step_metrics()["activation/0/dead"] == 0.25


def test_another_number_of_units_begins_anew() -> None:
    model, monitor = monitored(Scale())
    for number in range(WINDOW + 5):
        assert (step(monitor, number, model, torch.zeros(2, 3)) is not None) == (number >= WINDOW - 1)
    for seen in range(1, WINDOW):
        assert step(monitor, WINDOW + 5 + seen, model, torch.zeros(1, 4)) is None
        assert monitor.missing() == {"activation/0/dead": f"it takes 100 monitored steps, and {seen} were seen"}
    assert step(monitor, 2 * WINDOW + 5, model, torch.tensor([[0.0, 0.0, 1.0, 0.0]])) == 0.75


def test_another_batch_size_does_not() -> None:
    model, monitor = monitored(Scale())
    for number in range(WINDOW):
        share = step(monitor, number, model, torch.zeros(1 + number % 3, 2 + number % 2, 3))
    assert share == 1.0


def test_evaluation_wakes_no_unit_and_ends_no_step() -> None:
    model, monitor = monitored(Scale())
    for number in range(WINDOW):
        monitor.begin_step(number)
        with torch.no_grad():
            model.eval()(torch.ones(1, 4))
        model.train()(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
        model.eval()(torch.ones(1, 4))
        model.train()
        monitor.end_step()
    assert monitor.get_step_metrics() == {"activation/0/dead": 0.75}


# --- saturation ------------------------------------------------------------------------------------------------------------------

BOUNDS = {nn.Sigmoid: (0.0, 1.0), nn.Hardsigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}


def saturated(y: Tensor, low: float, high: float) -> float:
    y = y.detach().double()
    return ((y < low + 0.05) | (y > high - 0.05)).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.__name__)
def test_the_share_of_saturated_outputs_is_exact_also_around_the_bounds(kind: type[nn.Module], dtype: torch.dtype) -> None:
    low, high = BOUNDS[kind]
    gate = kind()
    edges = {nn.Sigmoid: math.log(19.0), nn.Hardsigmoid: 2.7, nn.Tanh: math.atanh(0.95)}[kind]
    near = torch.tensor(edges, dtype=dtype) + torch.arange(-40, 41, dtype=dtype) * torch.finfo(dtype).eps * 4
    x = torch.cat([near, -near, torch.randn(200).mul(3).to(dtype), torch.tensor([-1e4, 1e4, 0.0]).to(dtype)])
    model, monitor = monitored(gate, "saturation")
    expected = saturated(gate(x), low, high)
    assert 0.1 < expected < 0.9
    assert len(gate(near).double().sub(high - 0.05).sign().unique()) >= 2  # outputs on both sides of the limit
    assert step(monitor, 0, model, x.reshape(1, -1)) == pytest.approx(expected, rel=1e-12)


def test_calls_and_micro_batches_merge_by_elements() -> None:
    model, monitor = monitored(nn.Tanh(), "saturation")
    monitor.add_activation_metric("saturation", metric_regex="^0$", split_calls=True)
    assert step(monitor, 0, model, torch.full((9,), 8.0), torch.zeros(1, 3)) == pytest.approx(9 / 12, rel=1e-12)
    assert monitor.get_step_metrics()["activation/0@0/saturation"] == pytest.approx(9 / 12, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.__name__)
def test_the_share_of_saturated_outputs_of_all_half_precision_numbers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[(x.abs() < 4) & (x.abs() > 1)]
    model, monitor = monitored(kind(), "saturation")
    assert step(monitor, 0, model, x) == pytest.approx(saturated(kind()(x), *BOUNDS[kind]), rel=1e-12)


def test_nan_is_not_saturated() -> None:
    model, monitor = monitored(nn.Sigmoid(), "saturation")
    assert step(monitor, 0, model, torch.tensor([math.nan, 9.0, 0.0, -9.0])) == 0.5


def test_modules_without_bounds_have_a_reason() -> None:
    class Gate(nn.Sigmoid):
        pass

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Gate(), nn.Sigmoid())
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("saturation")
    step(monitor, 0, model, torch.randn(2, 3))
    assert monitor.get_step_metrics().keys() == {"activation/2/saturation", "activation/3/saturation"}
    reasons = monitor.missing()
    assert reasons.keys() == {f"activation/{name}/saturation" for name in ("[root module]", "0", "1")}
    assert all("Sigmoid, Hardsigmoid, Tanh" in reason for reason in reasons.values())


# --- kurtosis --------------------------------------------------------------------------------------------------------------------


def pearson(x: Tensor) -> float:
    """By the formula, in float64 and two passes, after a shift that loses nothing."""
    x = oracle.reals(x)
    x = x - x[0]
    distance = x - x.mean()
    return float(distance.pow(4).mean() / distance.square().mean() ** 2)


def close(found: float, x: Tensor) -> None:
    assert found == pytest.approx(pearson(x), rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 1000, 131_072, 131_073, 300_001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_the_kurtosis_of_a_tensor(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    if not dtype.is_complex:
        x[:1] *= 20  # a tail on one side
    close(kurtosis(central_sums(x)).item(), x)


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(5, -1), lambda x: x.conj()])
def test_layouts(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(30, 40, dtype=torch.complex64)
    close(kurtosis(central_sums(make(x))).item(), make(x).contiguous())
    close(kurtosis(central_sums(make(x.real))).item(), make(x.real).contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mean_far_above_the_spread_costs_no_digits(dtype: torch.dtype) -> None:
    x = (1e6 + torch.randn(200_000, dtype=torch.float64)).to(dtype)
    close(kurtosis(central_sums(x)).item(), x)
    close(kurtosis(torch.cat([central_sums(part) for part in x.split(33_333)])).item(), x)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e15, 1e30])
def test_very_small_and_very_large_numbers(scale: float) -> None:
    x = torch.randn(500) * scale
    close(kurtosis(torch.cat([central_sums(x[:7]), central_sums(x[7:])])).item(), x)


@given(
    numbers=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60),
    offset=st.sampled_from([0.0, 1.0, -1e4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_parts_of_any_size_in_any_order_are_as_the_whole(numbers: list[float], offset: float, seed: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float64) + offset
    if x.std() < 1e-3 * (1 + abs(offset)):
        x[0] += 10.0
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(numbers)), draw.randrange(len(numbers))))
    parts = [central_sums(part) for part in torch.tensor_split(x, cuts)]
    whole = kurtosis(central_sums(x)).item()
    assert whole == pytest.approx(pearson(x), rel=1e-9)
    assert kurtosis(torch.cat(parts)).item() == pytest.approx(whole, rel=1e-9)
    draw.shuffle(parts)
    assert kurtosis(torch.cat(parts)).item() == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_give_nan(bad: float) -> None:
    x = torch.randn(10)
    spoiled = x.clone()
    spoiled[3] = bad
    assert math.isnan(kurtosis(central_sums(spoiled)).item())
    assert math.isnan(kurtosis(torch.cat([central_sums(x), central_sums(spoiled)])).item())
    model, monitor = monitored(Scale(), "kurtosis")
    value = step(monitor, 0, model, x, spoiled)
    assert value is not None
    assert math.isnan(value)
    assert monitor.missing() == {}


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 4, 11), (200_001,), (131_072, 5)])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1 / 3, 1e-30, 7e8])
def test_where_all_elements_are_equal_it_is_absent_with_the_reason(constant: float, sizes: tuple[int, ...]) -> None:
    model, monitor = monitored(Scale(), "kurtosis")
    assert step(monitor, 0, model, *(torch.full((size,), constant) for size in sizes)) is None
    assert monitor.missing() == {"activation/0/kurtosis": "all its elements are equal"}
    x = [torch.full((size,), constant) for size in sizes]
    x[0][0] = 1e9
    x[-1] = torch.cat([x[-1], torch.tensor([constant, 2e9])])
    value = step(monitor, 1, model, *x)
    assert value is not None
    close(value, torch.cat(x))


@pytest.mark.parametrize("sizes", [(394,), (3, 5, 7, 100), (163, 21, 71)])
@pytest.mark.parametrize("constant", [0.1, -0.0007986725568771363])
def test_equal_elements_in_float64_have_none_whatever_rounding_makes_of_them(constant: float, sizes: tuple[int, ...]) -> None:
    parts = [central_sums(torch.full((size,), constant, dtype=torch.float64)) for size in sizes]
    assert math.isinf(kurtosis(torch.cat(parts)).item())
    spread = torch.tensor([1.0, 1 + 1e-9, 1 - 1e-9, 1 + 3e-9], dtype=torch.float64)
    assert kurtosis(central_sums(spread)).item() == pytest.approx(pearson(spread), rel=1e-6)


def test_micro_batches_and_calls_merge_exactly_for_all_that_modules_take_and_return() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    monitor = ModuleMonitor(model, on_metric_error="raise")
    kinds = ("output", "output_gradient", "input", "input_gradient")
    monitor.add_activation_metric("kurtosis", metric_regex="^1$", of=kinds)
    taken: dict[str, list[Tensor]] = {}
    monitor.begin_step(0)
    for size in (9, 1, 4):
        tensors: list[Tensor] = []
        handle = model[1].register_forward_hook(lambda m, args, out, tensors=tensors: tensors.extend([args[0], out]))
        loss = model(torch.randn(size, 4)).exp().sum()
        handle.remove()
        for source, tensor in zip(("input", "activation"), tensors, strict=True):
            taken.setdefault(source, []).append(tensor.detach().flatten())
            (gradient,) = torch.autograd.grad(loss, tensor, retain_graph=True)
            taken.setdefault(f"{source}_gradient", []).append(gradient.flatten())
        loss.backward()
    monitor.end_step()
    expected = {f"{source}/1/kurtosis": pearson(torch.cat(tensors)) for source, tensors in taken.items()}
    assert len(expected) == 4
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_kurtosis_of_gradients_parameters_and_updates(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("kurtosis", stages=("local", "before_clip", "after_clip"))
    monitor.add_parameter_metric("kurtosis")
    monitor.add_update_metric("kurtosis")
    monitor.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        local: dict[str, list[Tensor]] = {}
        for size in (5, 2):
            loss = model(torch.randn(size, 10, dtype=dtype)).float().exp().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
                local.setdefault(name, []).append(gradient.flatten())
            loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = {f"gradient_local/{name}/kurtosis": pearson(torch.cat(g)) for name, g in local.items()}
        expected |= {f"gradient_before_clip/{n}/kurtosis": pearson(p.grad) for n, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad.mul_(torch.linspace(0.5, 1.5, parameter.numel(), dtype=dtype).view_as(parameter))
        expected |= {f"gradient/{n}/kurtosis": pearson(p.grad) for n, p in model.named_parameters()}
        expected |= {f"parameter/{name}/kurtosis": pearson(p) for name, p in before.items()}
        optimizer.step()
        expected |= {f"update/{n}/kurtosis": pearson(p.double() - before[n].double()) for n, p in model.named_parameters()}
        assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)


def test_a_sparse_gradient_counts_with_the_zeros_that_it_implies() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 6, sparse=True)
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.embed(tokens) * self.weight).sin().sum()

    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("kurtosis", metric_regex="embed")
    monitor.attach(optimizer)
    for tokens in ([3, 3, 7], [1, 39, 1]):  # uncoalesced, and accumulated
        model(torch.tensor(tokens)).backward()
    gradient = model.embed.weight.grad
    assert gradient.is_sparse
    expected = pearson(gradient.to_dense())
    optimizer.step()
    assert monitor.get_step_metrics() == pytest.approx(
        {f"{source}/embed.weight/kurtosis": expected for source in ("gradient", "gradient_before_clip")}, rel=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_of_a_scaled_gradient_get_it_divided_exactly(dtype: torch.dtype) -> None:
    model = nn.Linear(30, 40).to(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)  # whose inverse no binary number holds
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("kurtosis", metric_regex="weight", stages="before_clip")
    monitor.add_gradient_metric("widest", lambda g: g.double().abs().amax(), "weight", stages="before_clip")
    monitor.attach(optimizer, scaler=scaler)
    scaler.scale(model(torch.randn(20, 30, dtype=dtype)).square().float().sum()).backward()
    gradient = model.weight.grad.double() / 1000.0
    scaler.step(optimizer)
    scaler.update()
    metrics = monitor.get_step_metrics()
    close(metrics["gradient_before_clip/weight/kurtosis"], gradient)
    assert metrics["gradient_before_clip/weight/widest"] == pytest.approx(float(gradient.abs().max()), rel=1e-6)


def test_a_complex_parameter() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(30, dtype=torch.complex64))
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_parameter_metric("kurtosis")
    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.end_step()
    close(monitor.get_step_metrics()["parameter/weight/kurtosis"], model.weight)


# --- all of them -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["kurtosis", "saturation"])
def test_an_output_without_elements_counts_for_nothing(metric: str) -> None:
    """An expert that gets no token of a batch."""
    model, monitor = monitored(nn.Sigmoid(), metric)
    x = torch.randn(50) * 3
    y = torch.sigmoid(x)
    assert step(monitor, 0, model, torch.ones(0)) is None
    assert "no elements" in monitor.missing()[f"activation/0/{metric}"]
    value = step(monitor, 1, model, torch.ones(0), x)
    assert value is not None
    if metric == "kurtosis":
        close(value, y)
    else:
        assert value == pytest.approx(saturated(y, 0.0, 1.0), rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "metric", "split", "reason"),
    [
        (lambda: nn.LSTM(3, 3), "dead", False, "it takes 100 monitored steps, and 1 were seen"),
        (lambda: nn.Linear(3, 3), "dead", True, "it takes 100 monitored steps, and 1 were seen"),
        (lambda: nn.LSTM(3, 3), "saturation", False, "Sigmoid"),
        (lambda: nn.Linear(3, 3), "saturation", True, "Sigmoid"),
        (lambda: nn.LSTM(3, 3), "none", False, "its function returned nothing"),
        (Scale, "kurtosis", True, "all its elements are equal"),
    ],
    ids=["dead, a tuple", "dead, split", "saturation, a tuple", "saturation, split", "a function, a tuple", "kurtosis, split"],
)
def test_the_reason_of_a_module_whose_paths_have_no_value(
    layer: Callable[[], nn.Module], metric: str, split: bool, reason: str
) -> None:
    model = nn.Sequential(layer())
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric(metric, (lambda t: None) if metric == "none" else None, "^0$", split_calls=split)
    step(monitor, 0, model, torch.ones(2, 1, 3))
    assert monitor.get_step_metrics() == {}
    assert reason in monitor.missing()[f"activation/0/{metric}"]


def test_a_sparse_output_has_all_that_a_dense_one_has() -> None:
    class ToSparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).to_sparse()

    model = nn.Sequential(ToSparse())
    monitor = ModuleMonitor(model, on_metric_error="raise")
    for metric in ("norm", "kurtosis", "dead"):
        monitor.add_activation_metric(metric, metric_regex="^0$")
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    for number in range(WINDOW):
        step(monitor, number, model, x)
    output = model(x).to_dense()
    metrics = monitor.get_step_metrics()
    close(metrics.pop("activation/0/kurtosis"), output)
    assert metrics == {"activation/0/dead": 0.5, "activation/0/norm": pytest.approx(oracle.values(output)["norm"], rel=1e-6)}


@pytest.mark.parametrize("metric", ["kurtosis", "dead", "saturation"])
def test_they_are_described_and_merge_by_themselves(metric: str) -> None:
    monitor = gradmon.ModuleMonitor(nn.Sigmoid())
    monitor.add_activation_metric(metric)
    assert list(monitor.describe()) == [f"activation/.*/{metric}"]
    if metric == "kurtosis":
        with pytest.raises(ValueError, match="merges its values itself"):
            monitor.add_activation_metric(metric, metric_aggregation_fn="max", of="input")
