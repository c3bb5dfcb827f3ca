"""The public helper for attention modules that call scaled dot product attention themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..core.torch_modes import is_compiling

if TYPE_CHECKING:
    from .monitor import ModuleMonitor


def monitor_scaled_dot_product_attention(
    monitor: ModuleMonitor,
    module: str | nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
) -> None:
    """Record one call of ``F.scaled_dot_product_attention``, head by head.

    :meth:`ModuleMonitor.add_attention_metric` records calls with no edit of the model; where it does so for this module, and
    inside ``torch.compile``, this function does nothing.

    Keys, with ``{i}`` for the head: ``attention_entropy/{module}.head_{i}`` (nats), ``attention_entropy_normalized/...`` (over
    the logarithm of the number of keys that a query sees) and ``attention_first_key/...`` (weight on the first key that a
    query sees), all means over queries; ``attention_max_logit/...``, the largest of any query; of each the ``min`` and
    ``mean`` over heads, ``attention_entropy/{module}/min``; and for the activation metrics that match them the names
    ``{module}.head_{i}.query``, ``.key``, ``.value`` and ``.activation``. Does not synchronise.

    Args:
        monitor: takes the values; nothing is computed while it is not monitoring.
        module: the calling module, or its name.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: as in the call, ``[..., heads, length, size]``.
        dropout_p: as in the call; dropout does not enter the statistics.
        activation: the call's result.

    Raises:
        ValueError: tensors of fewer than three dimensions, or a module that is not watched.
        TypeError: ``module`` is neither a module nor a name.
    """
    if is_compiling() or not monitor.is_monitoring():
        return
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(f"{label} must have the shape [..., heads, length, size], got {tuple(tensor.shape)}")
    named = {"query": query, "key": key, "value": value, **({} if activation is None else {"activation": activation})}
    arguments = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    monitor.record_attention(monitor.module_name(module), named, arguments)
