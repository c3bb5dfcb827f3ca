"""One-pass statistics against naive float64 values, for every dtype, layout and size, and the laws of merging."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import oracle
from tests.oracle import measure, measured
from torch_gradmon.core.errors import NotMeasurable
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column, identity, merge, merge_by_group
from torch_gradmon.statistics.eager import CPU_BLOCK, EagerStatistics, inner_product, needs_precise_pass

INF, NAN = math.inf, math.nan


def views(row: Tensor) -> dict[str, float]:
    """All built-in metrics that a row ``[8]`` defines."""
    rows = row.unsqueeze(0)
    return {name: view.compute(rows).item() for name, view in VIEWS.items() if view.defined(rows).item()}


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-50, 50, shape).to(dtype)
    x = torch.randn(*shape, dtype=dtype if dtype.is_complex else torch.float64) * 0.3
    x[..., ::5] = 0
    return x.to(dtype)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (7,), (4, 5), (CPU_BLOCK + 3,), (1, 2, CPU_BLOCK)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_at_every_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = _random(*shape, dtype=dtype) if shape else _random(1, dtype=dtype).reshape(())
    row = measure([x])
    assert row.shape == (1, 8)
    assert row.dtype == torch.float64
    oracle.check(views(row[0]), x)


def _sparse(hybrid: bool = False) -> Tensor:
    index = torch.tensor([[0, 2, 2, 0, 5]])
    if not hybrid:
        index = torch.cat([index, torch.tensor([[1, 3, 3, 1, 0]])])
    values = torch.randn(5, 4) if hybrid else torch.randn(5)
    return torch.sparse_coo_tensor(index, values, (6, 4))


def test_std_of_finite_numbers_whose_squares_overflow_is_inf() -> None:
    x = torch.tensor([-2e200, 3e202, 1e180], dtype=torch.float64)
    assert views(measure([x])[0])["std"] == x.std(correction=0) == torch.inf
    assert torch.tensor(views(measure([torch.cat([x, x.new_tensor([torch.inf])])])[0])["std"]).isnan()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: _random(5, 7).t(),
    "channels_last": lambda: _random(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: _random(3, 4, 5).permute(2, 0, 1),
    "every second": lambda: _random(9, 8)[::2, 1::3],
    "backwards windows overlap": lambda: _random(30).unfold(0, 7, 2),
    "expanded": lambda: _random(1, 4).expand(6, 4),
    "expanded scalar": lambda: torch.tensor(0.1).expand(1000),
    "complex conjugate": lambda: _random(3, 4, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": lambda: _random(3, 4, dtype=torch.complex64).conj().imag,
    "complex transposed": lambda: _random(3, 4, dtype=torch.complex64).t(),
    "sparse, uncoalesced": _sparse,
    "sparse, hybrid": lambda: _sparse(hybrid=True),
    "sparse, coalesced": lambda: _sparse().coalesce(),
    "sparse, complex": lambda: _sparse().to(torch.complex64) * (1 + 2j),
    "sparse, narrow": lambda: torch.sparse_coo_tensor(torch.zeros(1, 300, dtype=torch.long), _random(300).bfloat16(), (6,)),
    "sparse, nothing stored": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "sparse, no implicit zero": lambda: torch.full((2, 2), -3.0).to_sparse(),
    "a parameter": lambda: torch.nn.Parameter(_random(3, 4)),
    "a result of autograd": lambda: torch.nn.Parameter(_random(3, 4)) * 2,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout(make: Callable[[], Tensor]) -> None:
    x = make()
    before = x.detach().clone()
    oracle.check(views(measure([x])[0]), x)
    assert oracle.reals(x).equal(oracle.reals(before))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_layouts(layout: str) -> None:
    dense = _random(4, 6) * (torch.rand(4, 6) < 0.3)
    blocks = ((2, 3),) if layout.startswith("b") else ()
    oracle.check(views(measure([getattr(dense, f"to_sparse_{layout}")(*blocks)])[0]), dense)


TINY = torch.finfo(torch.float32).tiny
VALUES = {
    "one NaN": [1.0, NAN, -2.0, 0.0],
    "one Inf": [1.0, INF, -2.0, 0.0],
    "one -Inf": [1.0, -INF, -2.0, 0.0],
    "both infinities": [INF, -INF, 3.0],
    "all three": [INF, NAN, -INF, 0.25],
    "only NaN": [NAN, NAN],
    "only Inf": [INF],
    "only -Inf": [-INF, -INF],
    "signed zeros": [0.0, -0.0, -0.0, 0.0],
    "denormals": [TINY / 8, -TINY / 1024, 1e-45, 0.0],
    "tiny": [1e-30, -3e-30, 2e-30],
    "huge": [1e30, -3e30, 2e30],
    "near the largest float32": [3e38, 3e38, -1e38],
    "tiny and huge": [1e-30, 1e30, -1.0],
    "small scatter around one": [1.0, 1.0001, 0.9999, 1.0],
    "a constant": [0.1] * 1000,
    "both sides of eps": [1e-8, -1e-8, 1.0000001e-8, 0.9999999e-8, 2e-8],
}


@pytest.mark.parametrize("length", [1, CPU_BLOCK], ids=["one block", "several blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numbers", VALUES.values(), ids=VALUES)
def test_values_that_are_hard_to_sum(numbers: list[float], dtype: torch.dtype, length: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    x = torch.cat([x, torch.zeros(length - 1, dtype=dtype), x])
    oracle.check(views(measure([x])[0]), x)


def test_a_half_precision_norm_may_exceed_the_largest_half() -> None:
    x = torch.full((70000,), 300.0, dtype=torch.float16)
    assert views(measure([x])[0])["norm"] == pytest.approx(300 * math.sqrt(70000), rel=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-3, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_near_zero_is_decided_in_real_numbers_at_the_boundary(eps: float, dtype: torch.dtype) -> None:
    at = torch.tensor(eps, dtype=torch.float64).to(dtype)
    below, above = torch.nextafter(at, torch.zeros_like(at)), torch.nextafter(at, torch.full_like(at, 10))
    x = torch.stack([at, below, above, -at, -above, torch.full_like(at, 2)])
    for finite in (x, torch.cat([x, torch.full_like(x[:1], NAN)])):
        oracle.check(views(measure([finite], eps=eps)[0]), finite, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_inverse_scale_multiplies_first(dtype: torch.dtype) -> None:
    x, scale = _random(300, dtype=dtype) * 100, torch.tensor(1 / 1024)
    unscaled = x.double() * scale.double()
    oracle.check(views(measure([x], inverse_scale=scale)[0]), unscaled)


def test_the_inverse_scale_of_an_infinite_gradient_leaves_it_infinite() -> None:
    x = torch.tensor([INF, 1.0, NAN])
    found = views(measure([x], inverse_scale=torch.tensor(0.5))[0])
    assert found["nonfinite_count"] == 2
    assert found["max"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("layouts", [*itertools.product(["plain", "transposed", "gaps"], repeat=2)], ids="-".join)
def test_a_difference_pairs_elements_whatever_their_strides(layouts: tuple[str, str], dtype: torch.dtype) -> None:
    make = {
        "plain": lambda: _random(6, 5, dtype=dtype),
        "transposed": lambda: _random(5, 6, dtype=dtype).t(),
        "gaps": lambda: _random(6, 10, dtype=dtype)[:, ::2],
    }
    x, y = (make[layout]() for layout in layouts)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    oracle.check(views(measure([x], minus=[y])[0]), x.to(wide) - y.to(wide))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [300, 200_000])
def test_a_difference_of_two_dtypes(dtype: torch.dtype, size: int) -> None:
    x, y = _random(size), (_random(size) * 20).to(dtype)
    oracle.check(views(measure([x], minus=[y])[0]), x.double() - y.double())
    oracle.check(views(measure([y], minus=[x])[0]), y.double() - x.double())


def test_a_difference_of_conjugates() -> None:
    x, y = _random(4, 5, dtype=torch.complex64).conj(), _random(5, 4, dtype=torch.complex64).t()
    oracle.check(views(measure([x], minus=[y])[0]), x.to(torch.complex128) - y.to(torch.complex128))


def test_a_difference_of_neighbouring_floats_is_exact() -> None:
    x = torch.full((1000,), 1.0)
    y = torch.nextafter(x, torch.full_like(x, 2.0))
    assert views(measure([y], minus=[x])[0])["norm"] == pytest.approx(2**-23 * math.sqrt(1000), rel=1e-12)


SUBSETS = [frozenset(c) for k in (0, 1, 2) for c in itertools.combinations(Column, k)] + [ALL_COLUMNS - {c} for c in Column]


@pytest.mark.parametrize("bad", [None, NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_subset_of_columns_has_what_was_asked_for_and_exact_counts(dtype: torch.dtype, bad: float | None) -> None:
    x = _random(1000, dtype=dtype)
    if bad is not None:
        x[7] = x[999] = bad
    whole = measure([x])
    for columns in SUBSETS:
        row = measure([x], columns)
        for column in columns | {Column.COUNT, Column.NONFINITE}:
            torch.testing.assert_close(row[:, column], whole[:, column], rtol=1e-6, atol=0, equal_nan=True)


def test_counts_are_exact_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert measure([torch.zeros(2**25 + 1)])[0, Column.NEAR_ZERO] == 2**25 + 1


@pytest.mark.parametrize("size", [100, 200_000])
def test_rows_of_a_subclass_are_plain(size: int) -> None:
    class Mine(Tensor):
        pass

    rows = measure([torch.randn(size).as_subclass(Mine)])
    assert type(rows) is Tensor


@pytest.mark.parametrize("pattern", ["half an ulp", "a giant among ones", "two values"])
@pytest.mark.parametrize("size", [300, 100_000, 1_000_000])
def test_sums_that_float32_rounds_in_one_direction(pattern: str, size: int) -> None:
    x = torch.ones(size)
    if pattern == "half an ulp":
        x[1::2] = 1.07e0 * 2.0**-24 * 16
    elif pattern == "a giant among ones":
        x[size // 3] = 2.0**24
    else:
        x[::3] = 0.1
    oracle.check(views(measure([x])[0]), x)


def test_counts_are_exact_where_float32_would_overflow() -> None:
    x = torch.full((3,), 1e30)
    assert measure([x], frozenset())[0, Column.NONFINITE] == 0
    assert measure([x], frozenset({Column.SUM}))[0, Column.NONFINITE] == 0


def test_many_tensors_of_many_kinds_at_once() -> None:
    tensors = [
        _random(5, 5), _random(3, dtype=torch.bfloat16), torch.tensor([NAN, 1.0]), _sparse(), torch.empty(0),
        _random(9, dtype=torch.complex64), _random(CPU_BLOCK + 1), torch.tensor(INF),
    ]  # fmt: skip
    for row, tensor in zip(measure(tensors), tensors, strict=True):
        oracle.check(views(row), tensor)
    assert measure([]).equal(identity(0))


def test_autocast_and_grad_mode_change_nothing() -> None:
    x = _random(1000).requires_grad_()
    plain = measure([x])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measure([x]).equal(plain)
    assert not plain.requires_grad


def test_inference_tensors_are_measured() -> None:
    with torch.inference_mode():
        x = _random(10)
    oracle.check(views(measure([x])[0]), x)


# --- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
    ids=["meta", "nested"],
)
def test_what_has_no_readable_values_is_refused_with_the_reason(tensor: Tensor, reason: str) -> None:
    with pytest.raises(NotMeasurable, match=reason):
        measure([torch.ones(2, device=tensor.device), tensor])


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())], ids=["vmap", "grad"])
def test_inside_a_functorch_transform_nothing_is_measured(transform: Callable) -> None:
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(NotMeasurable, match=r"torch\.func"):
            measure([x])
        return x * 2

    transform(inside)(torch.ones(3))


# --- long sums ---------------------------------------------------------------------------------------------------------------

LONG = 30_000_000


@pytest.mark.parametrize("size", [LONG, pytest.param(67_000_000, marks=pytest.mark.slow)])
def test_a_long_constant_tensor(size: int) -> None:
    found = views(measure([torch.full((size,), 0.1)])[0])
    value = float(torch.tensor(0.1))
    for metric, expected in {"norm": value * math.sqrt(size), "l1_norm": value * size, "mean": value, "rms": value}.items():
        assert found[metric] == pytest.approx(expected, rel=1e-6), metric
    assert found["std"] <= 1e-7 * value


@pytest.mark.parametrize("size", [1000, 8192, 8193, 65_536, 100_000, 131_072, CPU_BLOCK, 2_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_std_of_a_constant_is_zero_within_the_promise(dtype: torch.dtype, size: int) -> None:
    for constant in (1 / 3, 1.1, -7e-5, 123.4, 4.18e-5, 0.77):
        x = torch.full((size,), constant, dtype=dtype)
        assert views(measure([x])[0])["std"] <= 1e-7 * abs(constant), constant


@pytest.mark.parametrize("spread", [1e-7, 1e-6, 1e-4])
def test_a_small_std_beside_a_large_mean(spread: float) -> None:
    x = 0.7 * (1 + spread * torch.randn(2_000_000, dtype=torch.float64))
    for dtype in (torch.float64, torch.float32):
        oracle.check(views(measure([x.to(dtype)])[0]), x.to(dtype))


def test_a_long_random_tensor_where_the_norm_of_torch_is_off() -> None:
    x = torch.rand(LONG)
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in x.split(1000_000)))
    assert abs(torch.linalg.vector_norm(x).item() / norm - 1) > 1e-4  # else what the documentation says of torch is outdated
    assert views(measure([x])[0])["norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("size", [50, 70_000, 600_000])
def test_a_transform_leaves_no_trace_in_later_calls(size: int) -> None:
    eager, plain = EagerStatistics(), torch.randn(size)

    def inside(x: Tensor) -> Tensor:
        with pytest.raises(NotMeasurable, match=r"inside a torch\.func transform"):
            measured(eager, [plain])
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))
    with FakeTensorMode(), contextlib.suppress(Exception):
        measured(eager, [plain])
    oracle.check(views(measured(eager, [plain])[0]), plain)


@pytest.mark.parametrize(
    "sizes", [(0, 0), (1, 1), (CPU_BLOCK - 1, CPU_BLOCK - 1), (CPU_BLOCK * 2 + 5, CPU_BLOCK * 2 + 5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_inner_product(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    a, b = _random(sizes[0], dtype=dtype), _random(sizes[1], dtype=dtype)
    slack = 1e-12 * float((a.double() * b.double()).abs().sum())
    assert inner_product(a, b).item() == pytest.approx(float((a.double() * b.double()).sum()), rel=0, abs=slack)


def test_the_inner_product_pairs_elements_whatever_their_layout() -> None:
    sparse, dense = _sparse(), _random(4, 6).t()
    expected = float((sparse.to_dense().double() * dense.double()).sum())
    for a, b in ((sparse, dense), (dense, sparse), (sparse.to_dense(), dense), (sparse.coalesce(), dense)):
        assert inner_product(a, b).item() == pytest.approx(expected, rel=1e-12)
    assert inner_product(sparse, sparse).item() == pytest.approx(float(sparse.to_dense().double().square().sum()), rel=1e-12)


def test_the_inner_product_does_not_overflow_where_float32_would() -> None:
    assert inner_product(torch.full((4,), 1e30), torch.full((4,), 1e30)).item() == pytest.approx(4e60, rel=1e-6)


# --- the laws of merging -----------------------------------------------------------------------------------------------------

# whole numbers, so that sums in another order are the same to the last bit
numbers = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -2.0, 3.0, 1024.0, INF, -INF, NAN]) | st.integers(-99, 99).map(float), max_size=9
)
tensors = numbers.map(lambda x: torch.tensor(x, dtype=torch.float32))


def _merged(*rows: Tensor) -> Tensor:
    return merge(torch.stack(rows))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@given(tensors, tensors, tensors)
def test_merge_is_associative_and_commutative_with_an_identity(x: Tensor, y: Tensor, z: Tensor) -> None:
    a, b, c = measure([x, y, z])
    assert _same(_merged(_merged(a, b), c), _merged(a, _merged(b, c)))
    assert _same(_merged(a, b, c), _merged(a, _merged(b, c)))
    assert _same(_merged(a, b), _merged(b, a))
    assert _same(_merged(a, identity(1)[0]), a)
    assert _same(measure([torch.empty(0)])[0], identity(1)[0])


@given(st.lists(tensors, min_size=1, max_size=5))
def test_the_whole_is_the_merge_of_its_parts(parts: list[Tensor]) -> None:
    whole = torch.cat(parts)
    merged = merge(measure(parts))
    assert _same(merged, measure([whole])[0])
    oracle.check(views(merged), whole)


@given(st.lists(st.tuples(tensors, st.integers(0, 3)), max_size=8))
def test_merging_by_group_is_the_merge_of_each_group(pairs: list[tuple[Tensor, int]]) -> None:
    rows, groups = measure([x for x, _ in pairs]), [group for _, group in pairs]
    merged = merge_by_group(rows, groups, 5)
    assert merged.shape == (5, 8)
    for group in range(5):
        members = [row for row, g in zip(rows, groups, strict=True) if g == group]
        assert _same(merged[group], _merged(identity(1)[0], *members))


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=4))
def test_views_of_merged_rows_are_those_of_the_concatenation(parts: list[list[float]]) -> None:
    batches = [torch.tensor(part, dtype=torch.float32) for part in parts]
    oracle.check(views(merge(measure(batches))), torch.cat(batches))


_NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, INF, -INF, NAN, 1e-31, 1e31, 1.0]))


@given(
    st.lists(st.lists(_NUMBERS, min_size=6, max_size=6), min_size=2, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.frozensets(st.sampled_from(list(Column))),
)
def test_one_row_is_doubted_as_among_many(values: list[list[float]], counts: list[int], columns: frozenset[Column]) -> None:
    squares = [abs(row[2]) for row in values]
    rows = torch.tensor(
        [[n, a, abs(b), s, 0.0, 0.0, c, d] for n, (a, b, _, c, d, _), s in zip(counts, values, squares, strict=False)],
        dtype=torch.float64,
    )
    rows = torch.cat([rows, identity(1)])  # and an empty tensor
    alone = [needs_precise_pass([row], columns) for row in rows.tolist()]
    together = needs_precise_pass(rows.tolist(), columns)
    for kind in range(2):
        assert [number for number, found in enumerate(alone) if found[kind]] == together[kind]
