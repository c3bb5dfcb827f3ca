"""Gradients that are edited between backward and the optimizer's step, in ways that move no version counter and keep sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, load_run
from torch_gradmon.runs.index import RunIndex

VALUES: dict[str, Callable[[Tensor], float]] = {
    "norm": lambda g: g.norm().item(),
    "max": lambda g: g[g.isfinite()].abs().max().item(),
    "min_value": lambda g: g[g.isfinite()].min().item(),
    "max_value": lambda g: g[g.isfinite()].max().item(),
    "mean": lambda g: g.mean().item(),
    "std": lambda g: g.std(correction=0).item(),
    "nonfinite_count": lambda g: float((~g.isfinite()).sum()),
}


def _first(gradient: Tensor) -> Tensor:
    return gradient.flatten()[0]


def _with_nan(gradient: Tensor) -> Tensor:
    return gradient.flatten().index_fill(0, torch.tensor(3), float("nan")).view_as(gradient)


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "neg": lambda p: p.grad.data.neg_(),
    "flip": lambda p: p.grad.data.copy_(p.grad.detach().clone().flip(0, 1)),
    "exchange of signs": lambda p: p.grad.data.view(-1)[:2].mul_(torch.tensor([-1.0, 1.0])),
    "reflection": lambda p: p.grad.data.sub_(2 * p.grad.detach().mean()),  # keeps the sum of squares
    "other memory": lambda p: setattr(p.grad, "data", -p.grad.detach()),
    "by its memory": lambda p: _through_memory(p.grad),
}


def _through_memory(gradient: Tensor) -> None:
    gradient.untyped_storage().copy_(gradient.detach().flip(0).clone().untyped_storage())


def _trained(
    edit: Callable[[nn.Parameter], object],
    monitor: Callable[[nn.Module, torch.optim.Optimizer], ModuleMonitor],
    spoiled: bool = False,
) -> tuple[ModuleMonitor, list[Tensor]]:
    """Three steps; the gradients of the weight that the optimizer used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    weight = model[0].weight
    if spoiled:
        weight.register_hook(_with_nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched, used = monitor(model, optimizer), []
    for _ in range(3):
        optimizer.zero_grad()
        (3 * model(torch.randn(8, 4))).square().mean().backward()
        edit(weight)
        used.append(weight.grad.detach().clone())
        optimizer.step()
        if spoiled:
            weight.data.nan_to_num_()
    return watched, used


def _by_key(*names: str) -> Callable[[nn.Module, torch.optim.Optimizer], ModuleMonitor]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        monitor = ModuleMonitor(model, on_metric_error="raise")
        for name in names:
            monitor.add_gradient_metric(name, metric_regex=r"0\.weight")
        monitor.add_gradient_metric("first", _first, metric_regex=r"0\.weight", stages=("before_clip", "after_clip"))
        return monitor.attach(optimizer)

    return make


@pytest.mark.parametrize(
    "names", [("norm", "max"), ("norm", "min_value", "max_value"), tuple(VALUES)], ids=lambda names: "-".join(names)
)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_through_data_is_measured(edit: str, names: tuple[str, ...]) -> None:
    monitor, used = _trained(EDITS[edit], _by_key(*names))
    values, gradient = monitor.get_step_metrics(), used[-1].double()
    for name in names:
        assert values[f"gradient/0.weight/{name}"] == pytest.approx(VALUES[name](gradient), rel=1e-6, abs=1e-9), name
    assert values["gradient/0.weight/first"] == gradient.flatten()[0].item()
    monitor.detach()


def test_an_edit_of_finite_elements_beside_a_nan_is_measured() -> None:
    monitor, used = _trained(lambda p: p.grad.data.clamp_(-0.1, 0.1), _by_key("max", "nonfinite_count", "norm"), spoiled=True)
    values, gradient = monitor.get_step_metrics(), used[-1].double()
    assert gradient[gradient.isfinite()].abs().max().item() == pytest.approx(0.1)
    assert values["gradient/0.weight/max"] == pytest.approx(0.1)
    assert values["gradient/0.weight/nonfinite_count"] == 1
    assert values["gradient/0.weight/norm"] != values["gradient/0.weight/norm"]
    monitor.detach()


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_clipped_by_the_monitor_is_measured_as_it_is_then(exact: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("min_value", metric_regex="weight", stages=("before_clip", "after_clip"))
    monitor.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        (3 * model(torch.randn(8, 4))).square().mean().backward()
        model.weight.grad.data.neg_()
        least = model.weight.grad.min().item()
        monitor.clip_grad_norm_(1.0, exact=exact)
        clipped = model.weight.grad.min().item()
        optimizer.step()
        values = monitor.get_step_metrics()
        assert values["gradient_before_clip/weight/min_value"] == least
        assert values["gradient/weight/min_value"] == clipped
        assert least < clipped < 0
    monitor.detach()


@pytest.mark.parametrize("edit", ["nothing", "neg", "flip"])
def test_a_run_directory_tells_the_gradients_of_both_stages(edit: str, tmp_path: Path) -> None:
    """Equal rows are stored once; an edit that keeps sums of squares shows by the sums."""
    edits: dict[str, Callable[[nn.Parameter], object]] = {**EDITS, "nothing": lambda p: None}
    monitor, used = _trained(
        edits[edit], lambda model, optimizer: gradmon.watch(model, optimizer, run_dir=tmp_path / "run", on_spike=None)
    )
    monitor.detach()
    run, signs = load_run(tmp_path / "run"), {"nothing": 1, "neg": -1, "flip": 1}
    before, after = run._reader.table("gradient_before_clip", 2), run._reader.table("gradient", 2)
    assert before is not None
    assert after is not None
    if edit != "flip":  # the order of a sum may change its last bit
        with closing(RunIndex(run.path)) as index:
            shared = [layout.source for layout in index.layouts() if layout.same_as]
        assert shared == (["gradient"] if edit == "nothing" else [])
    sums = [table.rows[table.names.index("0.weight"), 1].item() for table in (before, after)]
    assert sums[1] == pytest.approx(used[-1].double().sum().item(), rel=1e-6)
    assert sums[0] == pytest.approx(signs[edit] * sums[1], rel=1e-6)
