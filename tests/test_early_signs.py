"""Metrics that move before the loss does: updates beside their parameters, features, and logits, against float64."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

pytestmark = pytest.mark.thorough


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def angle(before: Tensor, after: Tensor) -> float:
    """By the chord of the unit circle, which is exact for small angles too."""
    a, b = before.double().flatten(), after.double().flatten()
    return 2 * math.asin(min(float((a / a.norm() - b / b.norm()).norm()) / 2, 1.0))


@pytest.mark.parametrize("lr", [1e-1, 1e-3, 1e-5])
def test_the_angle_and_the_growth_of_an_update(lr: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    for metric in ("angle", "growth", "norm"):
        monitor.add_update_metric(metric)
    monitor.add_update_metric("own", lambda change: change.abs().sum())
    monitor.attach(optimizer)
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().sum().backward()
        optimizer.step()
        found = monitor.get_step_metrics()
        for name, p in model.named_parameters():
            old, new = before[name].double(), p.detach().double()
            assert found[f"update/{name}/angle"] == pytest.approx(angle(old, new), rel=1e-6)
            assert found[f"update/{name}/growth"] == pytest.approx(float(new.norm() / old.norm()) - 1, rel=1e-6, abs=1e-12)
            assert found[f"update/{name}/own"] == pytest.approx(float((new - old).abs().sum()), rel=1e-6)
    monitor.detach()


@pytest.mark.parametrize(("factor", "angle_of", "growth_of"), [(2.0, 0.0, 1.0), (0.0, None, -1.0), (-1.0, math.pi, 0.0)])
def test_updates_along_the_parameter(factor: float, angle_of: float | None, growth_of: float) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    monitor.add_update_metric("angle")
    monitor.add_update_metric("growth")
    monitor.attach(optimizer)
    model.weight.grad = (1 - factor) * model.weight.detach()
    optimizer.step()
    found = monitor.get_step_metrics()
    assert found["update/weight/growth"] == pytest.approx(growth_of, abs=1e-6)
    if angle_of is None:
        assert "update/weight/angle" not in found
        assert "update/weight/angle" in monitor.missing()
    else:
        assert found["update/weight/angle"] == pytest.approx(angle_of, abs=1e-3)
    monitor.detach()


def test_a_zero_parameter_has_neither() -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    monitor.add_update_metric("angle")
    monitor.add_update_metric("growth")
    monitor.attach(optimizer)
    model(draw(3, 4)).sum().backward()
    optimizer.step()
    found, missing = monitor.get_step_metrics(), monitor.missing()
    assert "update/weight/angle" in found
    for metric in ("angle", "growth"):
        assert f"update/bias/{metric}" not in found
        assert "zero before the step" in missing[f"update/bias/{metric}"]
    monitor.detach()


def test_weight_decay_and_gradient_balance_at_the_angle_of_the_theory() -> None:
    """Kosson and others (2024, arXiv 2305.17212, table 1): AdamW turns a weight before a norm by sqrt(2 lr wd) a step in equilibrium, with
    random gradients.
    """
    torch.manual_seed(0)
    lr, decay = 3e-3, 0.5
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, betas=(0.0, 0.99))
    monitor = gradmon.ModuleMonitor(model)
    monitor.add_update_metric("angle")
    monitor.attach(optimizer)
    seen = []
    for step in range(3000):
        gradient = torch.randn(64, 64)
        weight = model.weight.detach()
        model.weight.grad = gradient - (gradient * weight).sum() / weight.square().sum() * weight  # as through a norm
        optimizer.step()
        if step >= 2500:
            seen.append(monitor.get_step_metrics()["update/weight/angle"])
    monitor.detach()
    assert sum(seen) / len(seen) == pytest.approx(math.sqrt(2 * lr * decay), rel=0.03)


def outputs_of(
    model: nn.Module, metric: str, batches: list[Tensor], pattern: str, of: str = "output"
) -> tuple[dict[str, float], dict[str, str]]:
    """Of one step with these micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric(metric, metric_regex=pattern, of=of)
    monitor.attach(optimizer)
    for batch in batches:
        model(batch).square().sum().backward()
    optimizer.step()
    found, missing = monitor.get_step_metrics(), monitor.missing()
    monitor.detach()
    return {key: value for key, value in found.items() if metric in key}, missing


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_dormant_units(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), activation(), nn.Linear(40, 2))
    with torch.no_grad():
        model[0].bias[:10] = -30.0  # GELU and SiLU do not reach zero there
        model[0].bias[10:20] -= torch.linspace(0, 6, 10)
    batches = [draw(5, 6), draw(11, 6, seed=2)]
    found, _ = outputs_of(model, "dormant", batches, "^1$")
    sizes = [model[1](model[0](batch)).detach().double().abs().mean(0) for batch in batches]
    shares = [float((size <= 0.025 * size.mean()).double().mean()) for size in sizes]
    assert found == {"activation/1/dormant": pytest.approx(sum(shares) / 2)}
    assert min(shares) >= 0.25


def test_outputs_of_different_widths_have_units_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.one, self.two = nn.ReLU(), nn.Linear(4, 64), nn.Linear(64, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.two(self.act(self.one(x) - torch.arange(64).ge(48) * 99.0)))

    torch.manual_seed(0)
    model = Twice()
    found, _ = outputs_of(model, "dormant", [draw(20, 4)], "^act$")
    first = model.act(model.one(draw(20, 4)) - torch.arange(64).ge(48) * 99.0)
    second = model.act(model.two(first))
    shares = [float((s <= 0.025 * s.mean()).double().mean()) for s in (first.double().mean(0), second.double().mean(0))]
    assert found["activation/act/dormant"] == pytest.approx(sum(shares) / 2)


def test_what_is_not_finite_is_no_share() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    batch = draw(4, 6)
    batch[1] = math.nan
    for metric in ("dormant", "spectral_alignment"):
        found, _ = outputs_of(model, metric, [batch], "^0$")
        assert math.isnan(found[f"activation/0/{metric}"])
    nn.init.zeros_(model[0].weight)
    found, missing = outputs_of(model, "spectral_alignment", [draw(4, 6)], "^0$")
    assert not found
    assert missing["activation/0/spectral_alignment"] == "the weight is zero"


def test_units_of_a_convolution_are_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].bias[:2] = -1.0
    found, _ = outputs_of(model, "dormant", [draw(4, 1, 6, 6)], "^1$")
    assert found["activation/1/dormant"] == pytest.approx(0.25, abs=1e-9)


def test_inputs_on_one_side_of_the_first_singular_vector() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 24)
    with torch.no_grad():
        layer.weight += 3 * draw(24, 1) @ draw(1, 16, seed=3)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(24, 2))
    batches = [draw(7, 16), draw(30, 16, seed=2)]
    found, missing = outputs_of(model, "spectral_alignment", batches, "^[01]$")
    left, _, right = torch.linalg.svd(layer.weight.detach().double())
    first = right[0] * left[left[:, 0].abs().argmax(), 0].sign()
    share = float((torch.cat(batches).double() @ first > 0).double().mean())
    assert found == {"activation/0/spectral_alignment": pytest.approx(share)}
    assert "no Linear" in missing["activation/1/spectral_alignment"]
    for side in (0, 1):
        one_sided = [(2 * side - 1) * first.float() + 0.1 * draw(20, 16)]
        assert outputs_of(model, "spectral_alignment", one_sided, "^0$")[0]["activation/0/spectral_alignment"] == side


def test_a_parametrized_weight_is_left_alone() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2))
    found, missing = outputs_of(model, "spectral_alignment", [draw(4, 6)], "^0$")
    assert not found
    assert "activation/0/spectral_alignment" in missing


def test_no_metric_holds_a_layer_alive() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    reference = weakref.ref(model[0])
    monitor = gradmon.ModuleMonitor(model)
    monitor.add_activation_metric("spectral_alignment")
    monitor.add_activation_metric("dormant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    model(draw(4, 6)).sum().backward()
    optimizer.step()
    monitor.get_step_metrics()
    del model, optimizer
    gc.collect()
    assert reference() is None
    monitor.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logsumexp_of_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 50)).to(dtype)
    batches = [4 * draw(3, 5, 6).to(dtype), draw(2, 5, 6, seed=2).to(dtype)]
    z = torch.cat([model(batch).detach().double().logsumexp(-1).flatten() for batch in batches])
    assert outputs_of(model, "logsumexp", batches, "^1$")[0]["activation/1/logsumexp"] == pytest.approx(float(z.mean()), rel=1e-6)
    found = outputs_of(model, "logsumexp_square", batches, "^1$")[0]["activation/1/logsumexp_square"]
    assert found == pytest.approx(float(z.square().mean()), rel=1e-6)


def test_the_participation_ratio_of_features() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    batches = [draw(9, 6), draw(20, 6, seed=2)]
    ratios = []
    for batch in batches:
        values = torch.linalg.svdvals(model[:2](batch).detach().double()).square()
        ratios.append(float(values.sum() ** 2 / values.square().sum()))
    found, _ = outputs_of(model, "participation_ratio", batches, "^1$")
    assert found["activation/1/participation_ratio"] == pytest.approx(sum(ratios) / 2, rel=1e-5)
    found, _ = outputs_of(model, "participation_ratio", batches[:1], "^2$", of="input")
    assert found["input/2/participation_ratio"] == pytest.approx(ratios[0], rel=1e-5)


def test_the_units_of_a_convolution_are_its_channels_there_too() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2))
    batch = draw(4, 1, 6, 6)
    values = torch.linalg.svdvals(model[0](batch).detach().double().movedim(1, -1).flatten(0, -2)).square()
    found, _ = outputs_of(model, "participation_ratio", [batch], "^0$")
    assert found["activation/0/participation_ratio"] == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-5)
