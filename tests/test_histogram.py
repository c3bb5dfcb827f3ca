"""Histograms by magnitude: right for any values, merged over micro-batches, and shown as histograms where a tracker has them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.sinks import JsonlSink
from torch_gradmon.sinks.tensorboard import without_histograms
from torch_gradmon.statistics.histogram import HIGHEST, LOWEST, as_metrics, log2_counts


def _naive(tensor: Tensor) -> dict[str, float]:
    """One element at a time."""
    counts: Counter[str] = Counter()
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    numbers = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    for x in numbers.double().reshape(-1).tolist():
        if x == 0:
            counts["zero"] += 1
        elif math.isfinite(x):
            counts[str(min(HIGHEST, max(LOWEST, math.frexp(abs(x))[1] - 1)))] += 1
    return dict(counts)


def _found(tensor: Tensor) -> dict[str, float]:
    return {name: value for name, value in ((k, float(v)) for k, v in as_metrics(log2_counts(tensor)).items()) if value}


EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1.9999999, 2.0**-40, 2.0**-41, 1e-38, 1e-45, 1e30, 3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_class_is_that_of_a_loop_over_the_elements(dtype: torch.dtype) -> None:
    spread = torch.randn(3000) * torch.logspace(-45, 25, 3000, base=2.0)
    for tensor in (
        torch.tensor(EDGES).to(dtype),
        spread.to(dtype),
        torch.zeros(0, dtype=dtype),
        torch.full((70_000,), 3.0).to(dtype),
    ):
        assert _found(tensor) == _naive(tensor)


def test_double_precision_beyond_single() -> None:
    tensor = torch.tensor([1e-300, 5e-324, 1e300, -1e39, 0.0, math.nan, math.inf], dtype=torch.float64)
    assert _found(tensor) == _naive(tensor) == {"zero": 1, str(LOWEST): 2, str(HIGHEST): 2}
    just_below = torch.tensor([1 - 2**-53, 2 - 2**-50, 2**-3 - 2**-56], dtype=torch.float64)
    assert _found(just_below) == _naive(just_below) == {"-1": 1, "0": 1, "-4": 1}


def test_how_its_classes_merge_is_its_own_affair() -> None:
    with pytest.raises(ValueError, match="'log2_histogram' merges its values itself; leave metric_aggregation_fn='sum' out"):
        ModuleMonitor(nn.Linear(1, 1)).add_gradient_metric("log2_histogram", metric_aggregation_fn="sum")


@given(st.lists(st.floats(width=32), max_size=50))
def test_any_numbers(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    assert _found(tensor) == _naive(tensor)


@given(st.lists(st.floats(width=32), max_size=30), st.lists(st.floats(width=32), max_size=30))
def test_parts_add_up_to_the_whole(left: list[float], right: list[float]) -> None:
    a, b = torch.tensor(left, dtype=torch.float32), torch.tensor(right, dtype=torch.float32)
    parts = as_metrics(torch.cat([log2_counts(a), log2_counts(b)]))
    whole = as_metrics(log2_counts(torch.cat([a, b])))
    assert {k: float(v) for k, v in parts.items()} == {k: float(v) for k, v in whole.items()}


def test_tensors_of_any_kind() -> None:
    sparse = torch.sparse_coo_tensor([[0, 3]], [1.0, 0.25], (10,))
    for tensor in (sparse, torch.randn(5, 4).t(), torch.randn(6, dtype=torch.complex64), torch.tensor(3.0)):
        assert _found(tensor) == _naive(tensor)


def _monitored(sink: Any, steps: int = 3, **options: Any) -> tuple[ModuleMonitor, list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, **options).attach(optimizer)
    monitor.add_gradient_metric("log2_histogram", metric_regex="weight", stages=("after_clip",), every=2)
    monitor.add_activation_metric("log2_histogram", metric_regex="^0$")
    if sink is not None:
        monitor.add_sink(sink)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 30)).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    monitor.detach()
    return monitor, gradients


def test_it_is_a_metric_like_any_other() -> None:
    monitor, gradients = _monitored(None)
    rows = monitor.get_all_metrics()
    prefix = "gradient/0.weight/log2_histogram."
    assert {k.removeprefix(prefix): v for k, v in rows[2].items() if k.startswith(prefix)} == _naive(gradients[2]["0.weight"])
    assert not [key for key in rows[1] if key.startswith("gradient/")]
    both = sum(v for k, v in rows[0].items() if k.startswith("activation/0/log2_histogram."))
    assert both == 2 * 8 * 20  # two micro-batches
    assert "number of elements" in monitor.describe()["gradient/weight/log2_histogram"]


def test_where_nothing_is_finite_it_says_so() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.add_gradient_metric("log2_histogram", stages=("after_clip",))
    model(torch.full((1, 2), math.nan)).sum().backward()
    optimizer.step()
    monitor.log_scalar("x", 0.0)
    assert monitor.missing()["gradient/weight/log2_histogram"] == "it has no finite element"
    assert monitor.get_step_metrics()["gradient/bias/log2_histogram.0"] == 1


@pytest.mark.parametrize("style", ["name_first", "metric_first"])
def test_sinks_put_the_classes_together(style: str, tmp_path: Path) -> None:
    _, gradients = _monitored(JsonlSink(tmp_path / "rows.jsonl"), key_order=style)
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[2])
    scalars, histograms = without_histograms(row)
    key = "gradient/0.weight/log2_histogram" if style == "name_first" else "gradient_log2_histogram/0.weight"
    counts = _naive(gradients[2]["0.weight"])
    assert histograms[key] == [counts.get(str(power), 0) for power in range(LOWEST, HIGHEST + 1)]
    assert len(histograms[key]) == HIGHEST - LOWEST + 1
    assert not [name for name in scalars if "histogram" in name and "zero" not in name]


def test_other_values_are_left_as_they_are() -> None:
    values = {
        "x": 1.0,
        "log2_histogram": 2.0,
        "my_log2_histogram.zero": 3.0,
        "gradient/a.1/norm": 4.0,
        "a_log2_histogram.99": 5.0,
    }
    assert without_histograms(values) == (values, {})


@pytest.mark.extra
def test_tensorboard_has_them_as_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, gradients = _monitored(gradmon.sinks.TensorBoardSink(tmp_path))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    event = found.Histograms("gradient/0.weight/log2_histogram")[-1]
    counts = _naive(gradients[2]["0.weight"])
    value = event.histogram_value
    limits = {str(int(limit) - 1): count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert event.step == 2
    assert limits == {power: count for power, count in counts.items() if power != "zero"}


@pytest.mark.extra
def test_wandb_has_them_as_histograms(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from .wandb_files import history

    run = wandb.init(project="tests", dir=tmp_path)
    _, gradients = _monitored(run)
    run.finish()
    row = history(tmp_path)[2]
    of = "gradient/0.weight/log2_histogram"
    assert row[f"{of}._type"] == "histogram"
    counts = _naive(gradients[2]["0.weight"])
    assert row[f"{of}.values"] == [counts.get(str(power), 0) for power in range(LOWEST, HIGHEST + 1)]
    assert row[f"{of}.bins"] == list(range(LOWEST, HIGHEST + 2))
