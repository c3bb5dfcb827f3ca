"""Rows of attention statistics against naive float64 arithmetic, which is itself held against torch's own weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from torch_gradmon.core.moments import Column, identity, merge
from torch_gradmon.statistics import attention
from torch_gradmon.statistics.attention import QUANTITIES, attention_rows

KEPT = [Column.COUNT, Column.SUM, Column.NONFINITE, Column.MIN, Column.MAX]
ENTROPY, NORMALIZED, MAX_LOGIT, FIRST_KEY = QUANTITIES


def weights_of(query: Tensor, key: Tensor, **call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, logits and visibility ``[..., heads, L, S]`` in float64, as one would write them on a blackboard."""
    key = key.repeat_interleave(max(query.size(-3) // key.size(-3), 1), dim=-3)
    scale = 1 / math.sqrt(query.size(-1)) if call.get("scale") is None else call["scale"]
    logits = query.double() @ key.double().transpose(-2, -1) * scale
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.get("is_causal"):
        visible = visible.tril()
    if (mask := call.get("attn_mask")) is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)
        logits = logits if mask.dtype == torch.bool else logits + mask.double()
    logits = logits.masked_fill(~visible, -math.inf)
    return torch.softmax(logits, dim=-1), logits, visible


def oracle(query: Tensor, key: Tensor, **call: Any) -> dict[str, Tensor]:
    """Rows by head, one value after the other."""
    weights, logits, visible = weights_of(query, key, **call)
    entropy, number = -torch.xlogy(weights, weights).sum(dim=-1), visible.double().sum(dim=-1)
    first = torch.where(visible, torch.arange(visible.size(-1)), visible.size(-1) - 1).amin(dim=-1, keepdim=True)
    on_first = weights.gather(-1, first).squeeze(-1)
    values = {ENTROPY: entropy, NORMALIZED: entropy / number.log(), MAX_LOGIT: logits.amax(dim=-1), FIRST_KEY: on_first}
    rows = {}
    for name, value in values.items():
        rows[name] = identity(value.size(-2))
        for head, row in enumerate(rows[name]):
            some = value[..., head, :][number[..., head, :] >= (2 if name == NORMALIZED else 1)]
            finite = some[some.isfinite()]
            row[Column.COUNT], row[Column.SUM], row[Column.NONFINITE] = len(some), some.sum(), len(some) - len(finite)
            if len(finite):
                row[Column.MIN], row[Column.MAX] = finite.amin(), finite.amax()
    return rows


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """The rows' means, and not their sums, are held to the tolerance."""
    assert list(actual) == list(QUANTITIES)
    for name, rows in actual.items():
        assert rows.shape == expected[name].shape
        assert rows.dtype == torch.float64
        number = expected[name][:, Column.COUNT].clamp(min=1)
        for column in Column:
            divisor = number if column is Column.SUM else 1
            torch.testing.assert_close(
                rows[:, column] / divisor,
                expected[name][:, column] / divisor,
                rtol=tolerance,
                atol=0 if column in (Column.COUNT, Column.NONFINITE) else tolerance,
                equal_nan=True,
                msg=lambda text, what=f"{name} {column.name}": f"{what}: {text}",
            )


def _boolean(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.4
    mask[..., -1] = True
    return mask


def _additive(smallest: float, *shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(~_boolean(*shape), smallest)


def _padding(*shape: int) -> Tensor:
    """As a padded batch has it: the first row of the batch is whole, the last one is padding altogether."""
    return torch.arange(shape[-1]) < torch.linspace(shape[-1], 0, shape[0]).view(-1, *[1] * (len(shape) - 1))


def _documents(size: int, *starts: int) -> Tensor:
    """Packed documents that begin at ``starts``: each sees its own keys only."""
    number = torch.zeros(size, dtype=torch.int64).index_fill(0, torch.tensor(starts[1:], dtype=torch.int64), 1).cumsum(0)
    return number[:, None] == number


#: By kind: shapes of query and key, and the other arguments of the call (a function of the dtype where it matters).
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[torch.dtype], dict[str, Any]]]] = {
    "plain": ((2, 4, 6, 8), (2, 4, 6, 8), lambda d: {}),
    "causal": ((2, 4, 6, 8), (2, 4, 6, 8), lambda d: {"is_causal": True}),
    "boolean mask": ((2, 4, 6, 8), (2, 4, 6, 8), lambda d: {"attn_mask": _boolean(6, 6)}),
    "additive mask": ((2, 4, 6, 8), (2, 4, 6, 8), lambda d: {"attn_mask": _additive(-math.inf, 2, 1, 6, 6).to(d)}),
    "scale": ((2, 4, 6, 8), (2, 4, 6, 8), lambda d: {"scale": 0.7}),
    "grouped queries": ((2, 6, 6, 8), (2, 2, 6, 8), lambda d: {"enable_gqa": True}),
    "cross attention": ((2, 4, 5, 8), (2, 4, 9, 8), lambda d: {}),
    "causal, L < S": ((2, 4, 5, 8), (2, 4, 9, 8), lambda d: {"is_causal": True}),
    "KV cache": ((2, 4, 1, 8), (2, 4, 70, 8), lambda d: {}),
    "causal, L > S": ((2, 4, 9, 8), (2, 4, 5, 8), lambda d: {"is_causal": True}),
    "no batch": ((4, 6, 8), (4, 6, 8), lambda d: {"scale": 2}),
    "two batch dimensions": ((3, 2, 4, 5, 8), (3, 2, 2, 7, 8), lambda d: {"enable_gqa": True, "attn_mask": _boolean(2, 1, 1, 7)}),
    "broadcast batch": ((1, 4, 5, 8), (3, 1, 7, 8), lambda d: {}),
    "broadcast both": ((2, 1, 4, 5, 8), (1, 3, 2, 7, 8), lambda d: {"enable_gqa": True}),
    "one head of queries": ((2, 1, 5, 8), (2, 4, 7, 8), lambda d: {}),
    "padding": ((3, 2, 5, 8), (3, 2, 7, 8), lambda d: {"attn_mask": _padding(3, 1, 1, 7)}),
    "mask of queries": ((2, 4, 5, 8), (2, 4, 7, 8), lambda d: {"attn_mask": torch.tensor([[True], [False], [True], [True], [False]])}),
    "mask of heads": ((2, 4, 5, 8), (2, 2, 7, 8), lambda d: {"enable_gqa": True, "attn_mask": torch.randn(4, 5, 7).to(d)}),
    "mask of everything": ((2, 4, 5, 8), (2, 2, 7, 8), lambda d: {"enable_gqa": True, "attn_mask": _boolean(2, 4, 5, 7)}),
    "finfo.min": ((3, 2, 5, 8), (3, 2, 7, 8), lambda d: {"attn_mask": (~_padding(3, 1, 1, 7)).to(d) * torch.finfo(d).min}),
    "causal and mask": ((2, 4, 6, 8), (2, 4, 7, 8), lambda d: {"is_causal": True, "attn_mask": _boolean(2, 1, 6, 7)}),
    "packed documents": ((2, 4, 9, 8), (2, 2, 9, 8), lambda d: {"enable_gqa": True, "attn_mask": _documents(9, 0, 4, 7).tril()}),
    "packed, additive": ((2, 2, 9, 8), (2, 2, 9, 8), lambda d: {"attn_mask": _documents(9, 0, 3).to(d).log()}),
    "packed and causal": ((2, 2, 9, 8), (2, 2, 9, 8), lambda d: {"is_causal": True, "attn_mask": _documents(9, 0, 2, 3)}),
    "padding on the left": ((3, 2, 6, 8), (3, 2, 6, 8), lambda d: {"attn_mask": _padding(3, 1, 1, 6).flip(-1).expand(3, 1, 6, 6).tril()}),
    "causal and padding": ((3, 2, 6, 8), (3, 2, 6, 8), lambda d: {"is_causal": True, "attn_mask": _padding(3, 1, 1, 6).flip(-1)}),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def call_of(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    queries, keys, rest = KINDS[kind]
    return torch.randn(queries).to(dtype), torch.randn(keys).to(dtype), rest(dtype)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_kind_of_call_equals_naive_arithmetic(kind: str, dtype: torch.dtype) -> None:
    query, key, call = call_of(kind, dtype)
    check(attention_rows(query, key, **call), oracle(query, key, **call), 1e-12 if dtype == torch.float64 else 1e-6)


@every_kind
def test_the_oracle_has_the_weights_that_torch_has(kind: str) -> None:
    query, key, call = call_of(kind, torch.float64)
    weights, _, visible = weights_of(query, key, **call)
    if call.get("is_causal") and "attn_mask" in call:  # torch takes either, and only some of its kernels both
        call["attn_mask"] = call["attn_mask"] & torch.ones_like(visible).tril()
        del call["is_causal"]
    one_hot = torch.eye(key.size(-2), dtype=torch.float64).expand(*key.shape[:-1], -1)  # the result is then the weights
    result, counted = F.scaled_dot_product_attention(query, key, one_hot, **call), visible.any(dim=-1)
    torch.testing.assert_close(result[counted], weights[counted], rtol=1e-12, atol=1e-12)


@every_kind
@pytest.mark.parametrize("size", [1, 23, 150, 400])
def test_the_size_of_the_blocks_changes_nothing(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, call = call_of(kind, torch.float64)
    whole = attention_rows(query, key, **call)
    monkeypatch.setattr(attention, "LOGITS_PER_BLOCK", size)
    check(attention_rows(query, key, **call), whole, 1e-12)


def test_views_autocast_and_gradients_are_left_alone() -> None:
    query, key = (torch.randn(2, 5, 4, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    mask = torch.randn(4, 5, 5).transpose(1, 2).requires_grad_()
    before = [t.detach().clone() for t in (query, key, mask)]
    with torch.autocast("cpu", torch.bfloat16):
        rows = attention_rows(query, key, mask)
    check(rows, oracle(query.detach(), key.detach(), attn_mask=mask.detach()))
    assert not any(row.requires_grad for row in rows.values())
    for tensor, old in zip((query, key, mask), before, strict=True):
        assert torch.equal(tensor, old)


def test_even_attention_has_the_entropy_of_its_keys() -> None:
    rows = attention_rows(torch.zeros(2, 3, 4, 8), torch.randn(2, 3, 1000, 8))
    for name, value in {ENTROPY: math.log(1000), NORMALIZED: 1.0, MAX_LOGIT: 0.0, FIRST_KEY: 1e-3}.items():
        expected = torch.tensor([8, 8 * value, 0, value, value], dtype=torch.float64).expand(3, -1)
        torch.testing.assert_close(rows[name][:, KEPT], expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_logits_far_from_zero_keep_their_entropy(offset: float) -> None:
    steps = torch.tensor([0.0, 0.5, 1.0, -2.0, -300.0])  # float32 holds 1e4 plus each of them
    rows = attention_rows(torch.ones(1, 1, 2), torch.stack([steps, torch.full((5,), offset)], dim=1)[None], scale=1)
    weights = torch.softmax(steps.double(), dim=0)
    assert rows[ENTROPY][0, Column.SUM].item() == pytest.approx(-torch.xlogy(weights, weights).sum().item(), rel=1e-6)
    assert rows[FIRST_KEY][0, Column.SUM].item() == pytest.approx(weights[0].item(), rel=1e-6)
    assert rows[MAX_LOGIT][0, Column.SUM].item() == offset + 1


def test_the_entropy_of_sharp_attention_is_never_below_zero() -> None:
    query, key = torch.randn(2, 3, 400, 8), torch.randn(2, 3, 50, 8)
    for factor in (30.0, 1e3, 1e6, 1e18):
        rows = attention_rows(query * factor, key * factor)
        assert rows[ENTROPY][:, Column.MIN].tolist() == [0, 0, 0]
        assert rows[NORMALIZED][:, [Column.COUNT, Column.MIN, Column.NONFINITE]].tolist() == [[800, 0, 0]] * 3
    check(attention_rows(query * 1e6, key * 1e6, scale=1e-12), oracle(query, key, scale=1.0))


def test_sums_are_wider_than_float32() -> None:
    rows = attention_rows(torch.tensor([[[2.0**24], [1.0]]]), torch.ones(1, 1, 1), scale=1)
    assert rows[MAX_LOGIT][0, Column.SUM] == 2**24 + 1


def test_a_query_that_sees_nothing_counts_nowhere() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    empty = {name: identity(3) for name in QUANTITIES}
    for mask in (torch.zeros(4, 5, dtype=torch.bool), torch.tensor([[False]]), torch.full((5,), -math.inf)):
        check(attention_rows(query, key, mask), empty, 0)
    one = attention_rows(query, key, torch.arange(5) == 2)
    assert one[ENTROPY][:, KEPT].tolist() == [[8, 0, 0, 0, 0]] * 3
    check({**one, ENTROPY: empty[ENTROPY], MAX_LOGIT: empty[MAX_LOGIT], FIRST_KEY: empty[FIRST_KEY]}, empty, 0)
    assert [rows.shape for rows in attention_rows(query[:, :0], key[:, :0]).values()] == [(0, 8)] * 4
    for lacking in (
        attention_rows(query[:0], key[:0]),
        attention_rows(query[:, :, :0], key),
        attention_rows(query, key[:, :, :0]),
    ):
        check(lacking, empty, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_hugging_face_hides_is_hidden(dtype: torch.dtype) -> None:
    query, key, mask = (
        torch.randn(2, 3, 6, 8).to(dtype),
        torch.randn(2, 3, 6, 8).to(dtype),
        _padding(2, 1, 1, 6).expand(2, 1, 6, 6),
    )
    smallest = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
    for hidden in (smallest, smallest + smallest, smallest + torch.where(mask, 0, 64).to(dtype), smallest.float()):
        if dtype != torch.float16 or hidden.dtype == dtype:  # the smallest of float16 is no extreme in float32
            check(attention_rows(query, key, hidden), oracle(query, key, attn_mask=mask))
    mild = torch.where(mask, 0.0, -1e4).to(dtype)  # a number like any other, beside which float32 keeps a logit to 1e-3
    check(attention_rows(query, key, mild), oracle(query, key, attn_mask=mild), 1e-4)


def test_nan_and_infinity_are_counted_where_they_are() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    query[0, 0, 1] = math.nan
    query[1, 0, 2, 0] = math.inf
    key[1, 1, 3] = math.nan
    rows = attention_rows(query, key)
    check(rows, oracle(query, key))
    assert rows[ENTROPY][:, Column.NONFINITE].tolist() == [2, 4, 0]
    assert rows[FIRST_KEY][:, Column.SUM].isnan().tolist() == [True, True, False]
    assert rows[MAX_LOGIT][:, [Column.MIN, Column.MAX]].isfinite().all()


def test_logits_beyond_float32_count_as_torch_has_them() -> None:
    query, key = torch.randn(1, 2, 4, 8), 1e20 * torch.randn(1, 2, 5, 8)
    query[0, 0] *= 1e20
    # not the fused function, whose kernels differ in this between processors
    weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
    rows = attention_rows(query, key)
    assert weights.isnan().any(dim=-1).sum(dim=-1).tolist() == [[4, 0]]
    assert [rows[name][:, Column.NONFINITE].tolist() for name in QUANTITIES] == [[4, 0]] * 4
    check(attention_rows(query.double(), key), oracle(query.double(), key))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 99)
)
def test_rows_merge_like_batches(sizes: list[int], length: int, keys: int, is_causal: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(sum(sizes), 2, n, 4, generator=generator) for n in (length, keys))
    mask = torch.rand(sum(sizes), 1, length, keys, generator=generator) > 0.5
    parts = [attention_rows(q, k, m, is_causal) for q, k, m in zip(*(t.split(sizes) for t in (query, key, mask)), strict=True)]
    merged = {name: merge(torch.stack([part[name] for part in parts])) for name in QUANTITIES}
    check(merged, attention_rows(query, key, mask, is_causal))


def _allocations(call: Callable[[], object]) -> list[int]:
    """Bytes that each allocation took, or gave back (negative), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@pytest.mark.parametrize(
    ("blocks", "arguments"),
    [
        (2, {}),
        (2, {"is_causal": True}),
        (2, {"attn_mask": torch.ones(256, dtype=torch.bool)}),
        (3.25, {"attn_mask": torch.ones(2, 8, 256, 256, dtype=torch.bool)}),
        (3.25, {"attn_mask": torch.ones(2, 8, 256, 256), "is_causal": True}),
        (3.5, {"attn_mask": torch.ones(2, 8, 256, 256, dtype=torch.bfloat16)}),
    ],
    ids=["plain", "causal", "padding", "boolean", "additive and causal", "bfloat16"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_a_few_blocks(
    blocks: float, arguments: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 2**16  # of the 2**20 logits of the call
    monkeypatch.setattr(attention, "LOGITS_PER_BLOCK", block)
    query, key = (torch.randn(2, 8, 256, 16).to(dtype) for _ in range(2))
    taken = _allocations(lambda: attention_rows(query, key, **arguments))
    assert max(taken) <= 4 * block
    copies, number = 0 if dtype == torch.float32 else 2 * 4 * block // 16, query[..., 0].numel()
    assert max(accumulate(taken)) <= max(blocks * 4 * block + copies + 24 * number, 80 * number)
    assert sum(taken) < 16 * 1024  # what is kept are the rows


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((4, 1, 8, 16), (4, 1024, 8, 16)),  # eight blocks of keys
        ((2, 1, 4, 16), (2, 512, 4, 16)),  # one, all of them in memory side by side
        ((1, 256, 4, 256), (1, 4, 4, 256)),  # four blocks of queries
        ((1, 64, 4, 256), (1, 4, 2, 256)),  # one
    ],
)
def test_inputs_are_cast_a_block_at_a_time(
    queries: tuple[int, ...], keys: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LOGITS_PER_BLOCK", 2**16)
    query, key = (torch.randn(shape).bfloat16().transpose(1, 2) for shape in (queries, keys))
    assert max(accumulate(_allocations(lambda: attention_rows(query, key)))) < 1.4 * 4 * 2**16


@pytest.mark.parametrize("kind", ["plain", "mask of everything", "causal and mask"])
def test_nothing_is_decided_by_a_value(kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # there are no values: one that is asked for on the host raises
        query, key, call = call_of(kind, torch.float32)
        assert [row.shape for row in attention_rows(query, key, **call).values()] == [(4, 8)] * 4


def test_first_key_of_packed_documents_is_that_of_each_alone() -> None:
    lengths = (5, 1, 6)
    query, key = torch.randn(2, 4, sum(lengths), 8), torch.randn(2, 2, sum(lengths), 8)
    alone = [
        attention_rows(q, k, is_causal=True)
        for q, k in zip(query.split(lengths, dim=-2), key.split(lengths, dim=-2), strict=True)
    ]
    starts = [0, *accumulate(lengths)][:-1]
    packed = attention_rows(query, key, _documents(sum(lengths), *starts).tril())
    for name in QUANTITIES:
        rows = merge(torch.stack([each[name] for each in alone]))
        torch.testing.assert_close(packed[name], rows, rtol=1e-6, atol=1e-6)


def test_first_key_behind_left_padding_is_that_without_padding() -> None:
    query, key = torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 8)
    padded = attention_rows(query, key, (torch.arange(7) >= 3).expand(7, 7).tril())
    alone = attention_rows(query[..., 3:, :], key[..., 3:, :], is_causal=True)
    for name in QUANTITIES:  # the queries of padding see no key, and do not count
        torch.testing.assert_close(padded[name], alone[name], rtol=1e-6, atol=1e-6)
