"""The complex modules of torch-module-monitor's README, with the package renamed: attention heads, and values of one's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention


class MultiHeadAttention(nn.Module, MonitorMixin):
    def __init__(self, width: int = 8, heads: int = 2, **arguments: Any) -> None:
        super().__init__()
        self.heads, self.arguments = heads, arguments
        self.project, self.output_projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.seen: tuple[Tensor, ...] = ()

    def compute_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.compute_qkv(x)
        q = q[..., : self.arguments.get("queries", q.size(-2)), :]  # cross attention has as many queries as it likes
        options = {name: value for name, value in self.arguments.items() if name != "queries"}
        attn_output = F.scaled_dot_product_attention(q, k, v, **options)
        self.seen = (q, k, v, attn_output)

        if self.is_monitoring:
            monitor_scaled_dot_product_attention(
                self.get_module_monitor(), module=self, query=q, key=k, value=v, activation=attn_output, **options
            )

        return self.output_projection(attn_output.transpose(1, 2).flatten(-2))


def _entropies(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Entropy of every softmax row in float64, ``[batch, heads, L]``."""
    logits = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.size(-1))
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    weights = torch.softmax(logits, dim=-1)
    return -torch.where(weights > 0, weights * weights.log(), 0.0).sum(dim=-1)


_BOOLEAN = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) > 0.4
_BOOLEAN[:, 0] = True


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({}, None),
        ({"is_causal": True}, torch.ones(6, 6, dtype=torch.bool).tril()),
        ({"attn_mask": _BOOLEAN}, _BOOLEAN),
        ({"queries": 3}, None),
        ({"queries": 3, "is_causal": True}, torch.ones(3, 6, dtype=torch.bool).tril()),
        ({"queries": 4, "attn_mask": _BOOLEAN[:4]}, _BOOLEAN[:4]),
    ],
    ids=["plain", "causal", "boolean mask", "L != S", "L != S causal", "L != S mask"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_attention_reports_its_heads(arguments: dict[str, Any], allowed: Tensor | None, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), MultiHeadAttention(**arguments)).to(dtype)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("norm", lambda x: x.float().norm(dim=-1), metric_regex=r"^1(\.head_|$)")
    monitor.begin_step(0)
    micro_batches = []
    for size in (2, 3):
        model(torch.randn(size, 6, 8).to(dtype))
        micro_batches.append(tuple(t.detach() for t in model[1].seen))
    monitor.end_step()

    tensors = [torch.cat(parts) for parts in zip(*micro_batches, strict=True)]
    entropies, expected = _entropies(tensors[0], tensors[1], allowed), {}
    for head in range(2):
        expected[f"attention_entropy/1.head_{head}"] = entropies[:, head].mean().item()
        for label, tensor in zip(("query", "key", "value", "activation"), tensors, strict=True):
            expected[f"activation/1.head_{head}.{label}/norm"] = tensor[:, head].double().norm(dim=-1).mean().item()
    assert {key: value for key, value in monitor.get_step_metrics().items() if key in expected} == pytest.approx(
        expected, rel=1e-5
    )
    others = monitor.get_step_metrics().keys() - expected.keys()
    sources = [f"attention_{name}" for name in ("entropy", "entropy_normalized", "max_logit", "first_key")]
    heads = {f"{source}/1.head_{head}" for source in sources for head in range(2)} - expected.keys()
    layers = {f"{source}/1/{what}" for source in sources for what in ("min", "mean")}
    assert others == {"activation/1/norm", "attention_max_logit/1/max"} | heads | layers


def test_a_pattern_for_heads_only_gives_no_warning() -> None:
    model = nn.Sequential(MultiHeadAttention())
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("mean", metric_regex=r"head_\d+\.query$")
    monitor.begin_step(0)
    model(torch.randn(1, 4, 8))
    monitor.end_step()
    assert "activation/0.head_1.query/mean" in monitor.get_step_metrics()


def test_a_custom_layer_logs_a_tensor() -> None:
    class CustomLayer(nn.Module, MonitorMixin):
        def __init__(self) -> None:
            super().__init__()
            self.transform = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output = self.transform(x)

            if self.is_monitoring:
                self.get_module_monitor().log_tensor("custom_stat", output.norm(dim=-1))

            return output

    model, inputs = CustomLayer(), [torch.randn(size, 4) for size in (2, 5)]
    monitor = ModuleMonitor(model)
    for step in range(2):
        monitor.begin_step(step)
        for x in inputs:
            model(x)
        monitor.end_step()
        expected = torch.cat([model.transform(x) for x in inputs]).double().norm(dim=-1).mean().item()
        assert monitor.get_step_metrics() == {"custom_stat": pytest.approx(expected, rel=1e-6)}
    model(inputs[0])  # between steps and after detach it logs nothing
    monitor.detach()
    model(inputs[0])
    assert list(monitor.get_all_metrics()) == [0, 1]


class _First(MonitorMixin, nn.Linear):
    pass


class _Last(nn.Linear, MonitorMixin):
    pass


@pytest.mark.parametrize("kind", [_First, _Last])
def test_the_mixin_is_inert_without_a_monitor_wherever_it_stands_among_the_bases(kind: type[nn.Linear]) -> None:
    layer = kind(3, 2)
    assert not layer.is_monitoring
    assert layer.get_module_monitor() is None
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer(torch.ones(1, 3)).shape == (1, 2)
    monitor = ModuleMonitor(layer)
    assert layer.get_module_monitor() is monitor
    assert not layer.is_monitoring
    monitor.begin_step(0)
    assert layer.is_monitoring
    with monitor.no_monitor():
        assert not layer.is_monitoring
    monitor.end_step()
    assert not layer.is_monitoring
