"""What attention statistics have to be, from the calls that were made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .oracle import Key, Number
    from .truth import Truth


def attention(truth: Truth, metric: str, autocast: bool) -> Iterator[tuple[Key, Number]]:
    """Keys of each head, and over the heads."""
    from .oracle import NOTHING, Key, Number

    beyond = Number(math.nan, math.inf)  # as torch's weights are NaN then
    source = f"attention_{metric}"
    if not truth.attention:
        yield Key(source, ".*", ""), NOTHING
    for name, calls in truth.attention.items():
        found = [_per_query(call, metric, autocast) for call in calls]
        heads = [torch.cat([values[head] for values in found]) for head in range(len(found[0]))]
        means = [float(values.max() if metric == "max_logit" else values.mean()) for values in heads]
        over = [any(_overflows(call, head, autocast) for call in calls) for head in range(len(heads))]
        slack = 1e-5 * max(1.0, max(map(abs, means)))
        for head, value in enumerate(means):
            yield Key(source, f"{name}.head_{head}", ""), beyond if over[head] else Number(value, slack)
        whole = {"min": min(means), "mean": sum(means) / len(means), **({"max": max(means)} if metric == "max_logit" else {})}
        for over_heads, value in whole.items():
            yield Key(source, name, over_heads), beyond if any(over) else Number(value, slack)


def _overflows(call: dict[str, Any], head: int, autocast: bool) -> bool:
    """Whether a logit is finite, but not in the arithmetic of the call."""
    query, key = (_cast(call[label], autocast).select(-3, head) for label in ("query", "key"))
    logits = query.double() @ key.double().transpose(-1, -2) * (call.get("scale") or 1 / math.sqrt(query.size(-1)))
    largest = torch.finfo(torch.promote_types(query.dtype, torch.float32)).max
    return bool((logits.isfinite() & (logits.abs() > largest)).any())


def parts(truth: Truth, by_head: bool, autocast: bool, call_number: str) -> dict[str, list[Tensor]]:
    """Query, key, value and result of each call as activations, by name."""
    found: dict[str, list[Tensor]] = {}
    for name, calls in truth.attention.items():
        for call in calls:
            for label in ("query", "key", "value", "activation"):
                tensor = _cast(call[label], autocast and label != "activation")
                heads = enumerate(tensor.unbind(-3)) if by_head else []
                places = [(f"{name}.head_{head}.{label}", part) for head, part in heads] or [(f"{name}.{label}", tensor)]
                for place, part in places:
                    found.setdefault(place + call_number, []).append(part)
    return found


def _cast(tensor: Tensor, autocast: bool) -> Tensor:
    return tensor.bfloat16() if autocast and tensor.dtype == torch.float32 else tensor


def _per_query(call: dict[str, Any], metric: str, autocast: bool) -> list[Tensor]:
    """The values of all queries, by head."""
    query, key = (_cast(call[label], autocast).double() for label in ("query", "key"))
    logits = query @ key.transpose(-1, -2) * (call.get("scale") or 1 / math.sqrt(query.size(-1)))
    visible = torch.ones(logits.shape, dtype=torch.bool)
    if call.get("is_causal"):
        visible = visible.tril()
    if (mask := call.get("attn_mask")) is not None:
        visible = visible & (mask if mask.dtype == torch.bool else torch.ones_like(mask, dtype=torch.bool))
        logits = logits + (mask if mask.dtype != torch.bool else 0)
    weights = torch.softmax(logits.masked_fill(~visible, -math.inf), dim=-1)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=-1)
    counts = visible.sum(dim=-1)
    values = {
        "entropy": entropy,
        "entropy_normalized": torch.where(counts > 1, entropy / counts.double().log(), math.nan),
        "max_logit": logits.masked_fill(~visible, -math.inf).amax(dim=-1),
        "first_key": weights.gather(-1, visible.byte().argmax(dim=-1, keepdim=True)).squeeze(-1),
    }[metric]
    split = [values.select(-2, head).flatten() for head in range(values.size(-2))]
    return [each[~each.isnan()] for each in split] if metric == "entropy_normalized" else split
