"""The programs of torch-module-monitor's README, with the package renamed: they run unchanged, and their values are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor


class Wandb:
    """As much of wandb as the README uses."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert all(type(key) is str and type(value) is float for key, value in values.items())
        self.logged.append((step, values))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3)
        self.mlp = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6))
        self.fc1, self.fc = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc1(self.mlp(self.conv2(self.conv1(x)).flatten(1))))


def _dataloader(count: int, batch: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(batch, 1, 6, 6), torch.randint(4, (batch,))) for _ in range(count)]


def _norm(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()


def _outputs(model: nn.Module, *inputs: Tensor) -> dict[str, list[Tensor]]:
    """What each module returns for each input, by hooks of the test's own."""
    found: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: found.setdefault(name, []).append(out.detach().double()))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        for x in inputs:
            model(x)
    for handle in handles:
        handle.remove()
    return found


def test_basic_usage() -> None:
    model, wandb, dataloader = ConvNet(), Wandb(), _dataloader(25)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[dict[str, Any]] = []

    # Initialize and add metrics
    monitor = ModuleMonitor(monitor_step_fn=lambda step: step % 10 == 0)
    monitor.set_module(model)

    monitor.add_activation_metric("mean", lambda x: x.mean(dim=-1))
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())

    # Training loop
    for step, (inputs, targets) in enumerate(dataloader):
        monitor.begin_step(step)

        outputs = model(inputs)  # Activations captured via hooks
        loss = criterion(outputs, targets)
        loss.backward()

        monitor.monitor_parameters()
        monitor.monitor_gradients()

        if step % 10 == 0:  # the test's own account
            expected.append({f"parameter/{name}/norm": _norm(p) for name, p in model.named_parameters()})
            expected[-1] |= {f"gradient/{name}/norm": _norm(p.grad) for name, p in model.named_parameters()}
            with monitor.no_monitor():
                seen = _outputs(model, inputs)
            expected[-1] |= {f"activation/{name}/mean": outs[0].mean().item() for name, outs in seen.items()}
            expected[-1]["activation/[root module]/mean"] = expected[-1]["activation/fc/mean"]

        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()

        # Log metrics
        if monitor.is_step_monitored(step):
            wandb.log(monitor.get_step_metrics())
        else:
            assert monitor.get_step_metrics() == {}

    assert len(wandb.logged) == 3
    for (_, logged), account in zip(wandb.logged, expected, strict=True):
        assert logged == pytest.approx(account, rel=1e-5, abs=1e-7)


def test_micro_batches_aggregate_by_the_functions_of_the_readme() -> None:
    model, wandb, current_step = ConvNet(), Wandb(), 7
    monitor = ModuleMonitor(model)

    # Compute L2 norm across the last dimension
    monitor.add_activation_metric("l2norm", lambda x: x.norm(dim=-1))
    # Compute mean activation
    monitor.add_activation_metric("mean", lambda x: x.mean(dim=-1))
    # Track minimum activation across micro-batches for conv1 modules
    monitor.add_activation_metric(
        "min",
        lambda x: torch.min(x, dim=-1).values,
        metric_regex="conv1",
        metric_aggregation_fn=torch.min,  # Custom aggregation
    )
    # Track maximum activation across micro-batches for conv2 modules
    monitor.add_activation_metric(
        "max",
        lambda x: torch.max(x, dim=-1).values,
        metric_regex="conv2",
        metric_aggregation_fn=torch.max,  # Custom aggregation
    )

    inputs = [x for size in (4, 1, 7) for x, _ in _dataloader(1, size)]  # uneven micro-batches: by elements, not mean of means
    monitor.begin_step(current_step)
    for x in inputs:
        model(x).sum().backward()
        monitor.after_micro_batch()
    monitor.end_step()
    wandb.log(monitor.get_step_metrics(), step=current_step)

    expected = {}
    for name, outs in (seen := _outputs(model, *inputs)).items():
        expected[f"activation/{name}/l2norm"] = torch.cat([out.norm(dim=-1).flatten() for out in outs]).mean().item()
        expected[f"activation/{name}/mean"] = torch.cat([out.mean(dim=-1).flatten() for out in outs]).mean().item()
    expected |= {f"activation/[root module]/{metric}": expected[f"activation/fc/{metric}"] for metric in ("l2norm", "mean")}
    expected["activation/conv1/min"] = min(out.amin().item() for out in seen["conv1"])
    expected["activation/conv2/max"] = max(out.amax().item() for out in seen["conv2"])
    assert wandb.logged == [(7, pytest.approx(expected, rel=1e-5, abs=1e-7))]


def test_parameter_metrics() -> None:
    model = ConvNet()
    monitor = ModuleMonitor(model)
    # L2 norm of parameters
    monitor.add_parameter_metric("l2norm", lambda p: p.norm())
    # Maximum absolute value
    monitor.add_parameter_metric("max", lambda p: p.abs().max())
    # Operator norm for fully connected layers
    monitor.add_parameter_metric("opnorm", lambda p: torch.linalg.matrix_norm(p, ord=2), metric_regex=r"fc\d*\.weight")

    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.end_step()

    expected = {f"parameter/{name}/l2norm": _norm(p) for name, p in model.named_parameters()}
    expected |= {f"parameter/{name}/max": p.detach().abs().max().item() for name, p in model.named_parameters()}
    for name in ("fc1", "fc"):
        weight = getattr(model, name).weight.detach().double()
        expected[f"parameter/{name}.weight/opnorm"] = torch.linalg.eigvalsh(weight @ weight.T).max().sqrt().item()
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-5)


def test_gradients_before_and_after_clipping_by_hand() -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model)
    # L2 norm of gradients
    monitor.add_gradient_metric("l2norm", lambda g: g.norm())
    # Maximum absolute gradient
    monitor.add_gradient_metric("max", lambda g: g.abs().max())

    monitor.begin_step(0)
    loss = 50 * model(torch.randn(3, 1, 6, 6)).square().sum()
    # In your training loop
    loss.backward()
    expected = {f"gradient_before_clip/{name}/l2norm": _norm(p.grad) for name, p in model.named_parameters()}
    expected |= {f"gradient_before_clip/{name}/max": p.grad.abs().max().item() for name, p in model.named_parameters()}

    # Monitor gradients before clipping
    monitor.monitor_gradients(before_clip=True)

    # Clip gradients
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)

    # Monitor gradients after clipping
    monitor.monitor_gradients(before_clip=False)
    optimizer.step()
    optimizer.zero_grad()
    monitor.end_step()

    values = monitor.get_step_metrics()
    for key in list(expected):
        expected[key.replace("_before_clip", "")] = expected[key] / total.item()
    assert values == pytest.approx(expected, rel=1e-5)
    assert math.hypot(*(v for k, v in values.items() if k.startswith("gradient/") and k.endswith("l2norm"))) == pytest.approx(
        1, rel=1e-5
    )


def test_regexes_choose_modules_and_parameters() -> None:
    model = ConvNet()
    monitor = ModuleMonitor(model)
    # Monitor only MLP layers
    monitor.add_activation_metric("my_metric", lambda x: x.mean(), metric_regex=r".*mlp.*")
    # Monitor only convolutional layers
    monitor.add_parameter_metric("weight_norm", lambda p: p.norm(), metric_regex=r"conv\d+\.weight")
    monitor.begin_step(0)
    model(torch.randn(2, 1, 6, 6))
    monitor.monitor_parameters()
    monitor.end_step()
    activations = {f"activation/{name}/my_metric" for name in ("mlp", "mlp.0", "mlp.1", "mlp.2")}
    assert monitor.get_step_metrics().keys() == activations | {f"parameter/conv{i}.weight/weight_norm" for i in (1, 2)}


def test_a_reference_module_gives_the_drift_from_initialization() -> None:
    model = ConvNet()
    reference_model = ConvNet()
    reference_model.load_state_dict(model.state_dict())
    monitor = ModuleMonitor(model)
    assert not monitor.has_reference_module()

    monitor.set_reference_module(reference_model)

    # Track drift from initialization
    monitor.add_parameter_difference_metric("l2_distance", lambda p, p_ref: (p - p_ref).norm())

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        monitor.begin_step(step)
        model(torch.randn(2, 1, 6, 6)).square().sum().backward()
        optimizer.step()
        monitor.monitor_parameters()
        monitor.end_step()
        references = dict(reference_model.named_parameters())
        assert monitor.get_step_metrics() == pytest.approx(
            {f"parameter_difference/{name}/l2_distance": _norm(p - references[name]) for name, p in model.named_parameters()},
            rel=1e-5,
        )
    monitor.remove_reference_module()
    assert not monitor.has_reference_module()
