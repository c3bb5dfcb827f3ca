"""Statistics of scaled dot product attention: what the heads attend to, computed beside the real call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Queries per block: the weights of one block and all heads, batch x heads x 128 x S in float32, are the peak memory.
_BLOCK = 128


def attention_statistics(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Entropy of the attention weights and the largest logit of every query, in float32.

    Args:
        query: ``[..., heads, L, E]``; key: ``[..., key heads, S, E]``; the rest as in
            :func:`torch.nn.functional.scaled_dot_product_attention`. Dropout does not enter.

    Returns:
        Two float32 tensors ``[..., heads, L]``: entropy in nats, ``log sum exp`` minus the expected logit, and the largest
        logit, -inf for a query that may not attend to anything. Its entropy is 0.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        query, key = query.detach().float(), key.detach().float()
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
        length, keys = query.size(-2), key.size(-2)
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        entropies, maxima = [], []
        for start in range(0, length, _BLOCK):
            stop = min(start + _BLOCK, length)
            logits = query[..., start:stop, :] @ key.transpose(-2, -1) * scale
            if is_causal:
                allowed = torch.ones(stop - start, keys, dtype=torch.bool, device=logits.device).tril(diagonal=start)
                logits = logits.masked_fill(~allowed, -math.inf)
            if attn_mask is not None:
                mask = attn_mask.detach()
                mask = mask[..., start:stop, :] if mask.dim() > 1 and mask.size(-2) > 1 else mask
                logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.float()
            largest = logits.amax(dim=-1)
            log_sum = torch.logsumexp(logits, dim=-1)
            weights = torch.exp(logits - log_sum.unsqueeze(-1))
            # 0 * -inf has no place in the expectation: a key out of sight contributes nothing
            expected = torch.where(weights > 0, weights * logits, 0.0).sum(dim=-1)
            entropies.append(torch.where(largest == -math.inf, 0.0, log_sum - expected))
            maxima.append(largest)
        return torch.cat(entropies, dim=-1), torch.cat(maxima, dim=-1)


def heads_of(tensor: Tensor) -> list[Tensor]:
    """The heads of ``[..., heads, L, E]``, one after the other."""
    return list(tensor.unbind(dim=-3))
