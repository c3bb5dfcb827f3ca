"""The public helper for attention modules that call scaled dot product attention themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from . import names as n
from .modes import unseen
from .names import Key
from .statistics.attention import attention_statistics, heads_of

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
    """Log one call of ``F.scaled_dot_product_attention``, head by head.

    Keys: ``attention_entropy/{module}.head_{i}`` (nats, mean over queries), ``attention_max_logit/{module}.head_{i}``, and for
    the activation metrics that match them the names ``{module}.head_{i}.query``, ``.key``, ``.value`` and ``.activation``.

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
    if not monitor.is_monitoring():
        return
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(f"{label} must have the shape [..., heads, length, size], got {tuple(tensor.shape)}")
    name = monitor.module_name(module)
    with unseen():
        named = {"query": query, "key": key, "value": value, **({} if activation is None else {"activation": activation})}
        for label, tensor in named.items():
            for head, part in enumerate(heads_of(tensor)):
                monitor.monitor_activations(f"{name}.head_{head}.{label}", part)
        entropy, largest = attention_statistics(query, key, attn_mask, is_causal, scale, enable_gqa)
        for head in range(query.size(-3)):
            # the last dimension is the query's, the one before it the head's
            monitor.log_key(Key(n.ATTENTION_ENTROPY, f"{name}.head_{head}", ""), entropy[..., head, :])
            monitor.log_key(Key(n.ATTENTION_MAX_LOGIT, f"{name}.head_{head}", ""), largest[..., head, :], "max")
