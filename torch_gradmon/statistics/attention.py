"""Statistics of scaled dot product attention: what the heads attend to, computed next to the real call; and of logits in general."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from ..core.moments import WIDTH, Column, from_columns, identity
from ..core.torch_modes import no_autocast, spare_memory
from .request import accumulator_dtype

#: Largest number of logits in a block, 16 MB in float32, or as many as fill the spare memory of an accelerator; a query with more keys is a
#: block of its own.
LOGITS_PER_BLOCK = 2**22
#: The results of :func:`attention_rows`, in the order of their computation.
QUANTITIES = ("attention_entropy", "attention_entropy_normalized", "attention_max_logit", "attention_first_key")
#: An exponent whose weight is zero in any dtype; it replaces -inf in the expectation, since 0 * -inf is NaN.
_NO_WEIGHT = -1000.0


class _AttentionCall:
    """One call, with heads in groups that share a key head. All tensors are views. One key head serves any number of query heads."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> None:
        leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])  # type: ignore[no-untyped-call]
        heads = max(query.size(-3), key.size(-3))
        grouped = (key.size(-3), heads // max(key.size(-3), 1))
        # ``[..., key heads, groups, L, E]``, ``[..., key heads, S, E]``
        self.query: Tensor = torch.unflatten(query.expand(*leading, heads, *query.shape[-2:]), -3, grouped)
        self.key = key.expand(*leading, *key.shape[-3:])
        if mask is not None:  # as many dimensions as the query, each of the size there or 1 (the last one S or 1)
            mask = mask[(None,) * (self.query.dim() - 1 - mask.dim())]
            mask = torch.unflatten(mask, -3, grouped if mask.size(-3) > 1 else (1, 1))
        self.mask, self.is_causal = mask, is_causal
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        # of the arithmetic: float32, or float64 if an input is
        self.dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)

    def visible(self) -> Tensor:
        """The number of keys visible to each query ``[..., key heads, groups, L]``, ignoring the mask."""
        length, keys = self.query.size(-2), self.key.size(-2)
        counts = self.query.new_full((length,), keys, dtype=self.dtype)
        if self.is_causal:
            torch.arange(1, length + 1, out=counts).clamp_(max=keys)
        return counts.expand(self.query.shape[:-1]).contiguous()

    def bias(self, mask: Tensor, queries: tuple[slice, ...], keys: int) -> Tensor:
        """What the mask adds to the logits of some queries and the first ``keys`` keys; -inf hides a key.

        Has the mask's own shape, which broadcasts to ``[..., key heads, groups, l, keys]``.
        """
        boxes = zip((*queries, slice(keys)), mask.shape, strict=True)
        mask = mask[tuple(box if size > 1 else slice(None) for box, size in boxes)]
        if mask.dtype == torch.bool:
            return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=self.dtype, device=mask.device))
        return functional.threshold(mask, torch.finfo(mask.dtype).min / 2, -math.inf).to(self.dtype)

    def hide(self, logits: Tensor, queries: tuple[slice, ...], visible: Tensor, spare: Tensor) -> Tensor | None:
        """Apply mask and ``is_causal`` to the logits of a block, and count the keys that a mask leaves visible; both in place. Returns the
        first of these for each query, ``[...]`` as the mask's shape without the last dimension; None without a mask: all see key 0.
        """
        first: Tensor | None = None
        start, length, later = queries[-1].start, logits.size(-2), logits.size(-1) - queries[-1].start
        if self.mask is not None:
            bias = self.bias(self.mask, queries, logits.size(-1))
            logits.add_(bias)
            shows = bias != -math.inf
            first = shows.view(torch.uint8).argmax(dim=-1)  # is_causal hides later keys, and so leaves the first one, or none
            # floats in existing memory: summing booleans makes an int64 copy of twice the block
            shown = spare.copy_(shows)
            visible[queries] = (shown.tril_(start) if self.is_causal else shown).sum(dim=-1)
        if self.is_causal and later > 0:  # keys before the block's first query are hidden from none of its queries
            hidden = spare.view(-1)[: length * later].view(length, later)
            logits[..., start:].add_(hidden.fill_(-math.inf).triu_(1))
        return first


def attention_rows(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Tensor]:
    """Rows of sufficient statistics, per head, of the attention of the queries in one call.

    A key is *visible* to a query unless ``is_causal`` hides it (aligned at the top left), a boolean mask is False there, or an additive
    mask is at most half of its dtype's smallest number: -inf, or ``finfo.min`` as in Hugging Face's masks. Half of it, since a position
    bias may have been added, or a bfloat16 mask converted to float32. A query without visible keys counts nowhere. With ``finfo.min``
    softmax spreads its weight evenly over the hidden keys, but such a query is padding, and its logits of -3e38 would drown the mean.
    Masks of -1e4 or -100 are ordinary biases: their keys are visible and get hardly any weight.

    Four quantities, each one value per query:

    ===================================  =============================================================================
    ``attention_entropy``                of the softmax weights, in nats: log-sum-exp minus expected logit; at least 0
    ``attention_entropy_normalized``     entropy / log(visible keys), in [0, 1]; of queries with two visible keys or more
    ``attention_max_logit``              largest logit of the visible keys, after scale and mask
    ``attention_first_key``              share of the weight on the first key visible to the query, the attention sink of most decoders:
                                         key 0, or the first one of its document, or behind padding on the left
    ===================================  =============================================================================

    A row holds COUNT, SUM, NONFINITE, MIN and MAX of these values; its other columns are 0. NaN and infinite inputs, and logits beyond
    the range of the arithmetic, make the values of their queries NaN or infinite, as they do torch's weights, even where a mask hides
    such a key. Rows of micro-batches merge with
    :func:`torch_gradmon.core.moments.merge`, and the mean is SUM / COUNT.

    Works in float32, or in float64 if an input is, with autocast off. Half-precision products are then exact; those of float32 follow
    ``torch.set_float32_matmul_precision``, as the call itself does. Does not synchronise the device.

    Peak memory: two blocks of :data:`LOGITS_PER_BLOCK` logits, 32 MB in float32 and twice that in float64; on an accelerator whose
    memory is known a 128th of it, at most 256 MB; up to one and a half more for a mask, less if it broadcasts. Queries and keys of a
    block's heads are copied if they need casting or are not contiguous, each at most one block or the keys of one head. Each query of a
    head takes 24 bytes meanwhile, and up to 80 at the end.

    Takes the arguments of :func:`torch.nn.functional.scaled_dot_product_attention`: ``query`` ``[..., heads, L, E]``, ``key``
    ``[..., key heads, S, E]``, whose heads divide those of the query and are not repeated, and a mask that broadcasts to
    ``[..., heads, L, S]``. Returns rows ``[heads, 8]`` by quantity, over the queries of all batches, on the device of the query.
    """
    with torch.no_grad(), no_autocast(query.device.type):
        values, visible = _per_query(_AttentionCall(query, key, attn_mask, is_causal, scale))
        some, several = visible > 0, visible > 1
        rows = _rows(values, torch.stack([some, several, some, some]))
    return dict(zip(QUANTITIES, rows.unbind(0), strict=True))


def _per_query(call: _AttentionCall) -> tuple[Tensor, Tensor]:
    """The quantities ``[4, ..., key heads, groups, L]``, and the number of visible keys ``[..., key heads, groups, L]``.

    Values of queries without enough visible keys are undefined.
    """
    (*_, groups, length, size), keys = call.query.shape, call.key.size(-2)
    values = call.query.new_zeros(len(QUANTITIES), *call.query.shape[:-1], dtype=call.dtype)
    visible = call.visible()
    if not values.numel() or not keys:
        return values, visible
    # a block is also bounded by the float32 copies of its queries and of the keys of its heads
    most = max(LOGITS_PER_BLOCK, spare_memory(call.query.device) // (2 * call.dtype.itemsize))
    rows = most // max(keys, size)
    parts = list(_boxes((groups, length), rows))
    heads = list(_boxes(call.key.shape[:-2], min(rows // _volume(parts[0]), most // (keys * size))))
    # allocated once: on CPU, new memory costs as much time as the arithmetic
    first, second = (values.new_empty(_volume(heads[0]) * _volume(parts[0]) * keys) for _ in range(2))
    for head in heads:
        key = call.key[head].to(call.dtype, memory_format=torch.contiguous_format).reshape(-1, keys, size).transpose(1, 2)
        for part in parts:
            index = head + part
            seen = min(keys, part[-1].stop) if call.is_causal else keys  # later keys are hidden from the whole block
            query = call.query[index].to(call.dtype, memory_format=torch.contiguous_format)
            logits, spare = (b[: _volume(index) * seen].view(*query.shape[:-1], seen) for b in (first, second))
            products = logits.view(key.size(0), -1, seen)
            products.baddbmm_(query.reshape(key.size(0), -1, size), key[..., :seen], beta=0, alpha=call.scale)
            del query  # possibly a copy; free it before the next one is made
            first_key = call.hide(logits, index, visible, spare)
            block = slice(None), *index
            values[block] = _of_block(logits, spare, visible[index], first_key)
        del key
    return values, visible


def _of_block(logits: Tensor, spare: Tensor, visible: Tensor, first_key: Tensor | None) -> Tensor:
    """The quantities ``[4, ...]`` of logits ``[..., S]``; ``spare`` has the same size, and both are overwritten. ``first_key``: the first
    one visible to each query, as :meth:`_AttentionCall.hide` returns it.

    Every pass is in place and fused if torch has it: a pass over a block outside of the cache costs as much as its matrix product.
    """
    largest = logits.amax(dim=-1)
    weights = torch.softmax(logits, dim=-1, out=spare)
    if first_key is None:
        first = weights[..., 0].clone()
    else:
        first = weights.gather(-1, first_key.expand(weights.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    log_sum = -weights.amax(dim=-1).log()  # of exp(logit - largest), since the largest weight is 1 / that sum
    # subtract the largest first: with logits of 1e4, the entropy would have an error of 1e-3
    logits.sub_(largest.unsqueeze(-1)).clamp_(min=_NO_WEIGHT)
    expected = weights.mul_(logits).sum(dim=-1)
    entropy = (log_sum - expected).clamp_(min=0)  # a device may round the largest weight above 1
    return torch.stack([entropy, entropy / visible.log(), largest, first])


def _rows(values: Tensor, counted: Tensor) -> Tensor:
    """Rows ``[k, heads, 8]`` of the ``counted`` values ``[k, ..., key heads, groups, L]``."""
    kinds, heads = len(values), values.size(-3) * values.size(-2)
    wide = accumulator_dtype(values.device)
    if not values.numel():
        return identity(kinds * heads, values.device, wide).view(kinds, heads, WIDTH)
    finite, over = counted & values.isfinite(), (*range(1, values.dim() - 3), -1)
    columns = {
        Column.COUNT: counted.sum(over),
        Column.SUM: values.where(counted, 0.0).sum(over, dtype=wide),
        Column.NONFINITE: counted.sum(over) - finite.sum(over),
        Column.MIN: values.where(finite, math.inf).amin(over),
        Column.MAX: values.where(finite, -math.inf).amax(over),
    }
    flat = {column: reduced.flatten().to(wide) for column, reduced in columns.items()}
    return from_columns(flat, None, kinds * heads).view(kinds, heads, WIDTH)


def _boxes(shape: Sequence[int], budget: int) -> Iterator[tuple[slice, ...]]:
    """Cut an index space into boxes of at most ``budget`` elements, or of one; the last dimensions are cut last."""
    cuts = []
    for size in reversed(shape):
        step = max(1, min(size, budget))
        budget //= step
        cuts.append([slice(start, min(start + step, size)) for start in range(0, size, step)])
    return product(*reversed(cuts))


def _volume(box: tuple[slice, ...]) -> int:
    return math.prod(part.stop - part.start for part in box)


def logsumexp(logits: Tensor) -> Tensor | None:
    """``log(sum(exp(x)))`` over the last dimension, in nats: ``[...]`` without it, float32 or wider; None for 0-d or integer tensors.

    It is the z that PaLM's loss pulls to zero (Chowdhery et al. 2022, arXiv 2204.02311, section 5, 1e-4 times its square), and whose
    growth comes before the loss diverges at high rates (Wortsman et al. 2023, arXiv 2309.14322, section 3.1.2). Does not synchronise.
    """
    if not logits.dim() or not logits.is_floating_point():
        return None
    return logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def logsumexp_square(logits: Tensor) -> Tensor | None:
    """The square of :func:`logsumexp`, whose mean is the z-loss without its factor."""
    z = logsumexp(logits)
    return None if z is None else z.square()
