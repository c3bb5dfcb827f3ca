"""The Triton kernels against the same oracle as the stock operations: in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import oracle

pytest.importorskip("triton")
pytest.importorskip("numpy")

from torch_gradmon.core.errors import GradmonWarning, NotMeasurable, WarningLog
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column, identity
from torch_gradmon.statistics import triton
from torch_gradmon.statistics.dispatch import Statistics
from torch_gradmon.statistics.eager import EagerStatistics
from torch_gradmon.statistics.request import DEFAULT_EPS
from torch_gradmon.statistics.triton import CHUNK, TritonStatistics, supports

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, which interprets, comments on NaN and Inf
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),  # torch says so wherever it is switched on
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: The interpreter of Triton 3.9 widens denormal bfloat16 numbers wrongly.
HAVE_DENORMALS = [dtype for dtype in DTYPES if dtype != torch.bfloat16 or DEVICE == "cuda"]
INF, NAN = math.inf, math.nan
#: Enough elements for the loop over whole aligned blocks, and some more.
BLOCKS = 5003


def measure(tensors: Sequence[Tensor], **options: Any) -> Tensor:
    return oracle.measured(TritonStatistics(), tensors, **options)


def check(rows: Tensor, tensors: Sequence[Tensor], eps: float = DEFAULT_EPS) -> None:
    """Every built-in metric of every row is what the oracle says of the tensor, and the row holds its eight columns."""
    assert rows.shape == (len(tensors), 8)
    assert rows.dtype == torch.float64
    assert rows.device.type == DEVICE
    for index, (row, tensor) in enumerate(zip(rows.cpu().split(1), tensors, strict=True)):
        found = {name: view.compute(row).item() for name, view in VIEWS.items() if view.defined(row).item()}
        oracle.check(found, tensor, f"tensor {index} ({tensor.dtype}, {tuple(tensor.shape)})", eps)
        assert row[0, Column.COUNT] == tensor.numel()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64) * 0.3
    x[..., ::5] = 0
    return x.to(dtype).to(DEVICE)


def repeated(numbers: Sequence[float], dtype: torch.dtype, size: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(dtype).repeat(size // len(numbers) + 1)[:size].to(DEVICE)


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where stock operations measure anything."""

    def refuse(*arguments: object, **options: object) -> Tensor:
        raise AssertionError("measured with stock operations")

    monkeypatch.setattr(EagerStatistics, "rows", refuse)


# --- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("size", [0, 1, 2, 31, 511, BLOCKS, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_all_dtypes_in_one_list_at_every_size(size: int) -> None:
    tensors = [random(size, dtype=dtype) for dtype in DTYPES]
    rows = measure(tensors)
    check(rows, tensors)
    if size == 0:
        assert rows.equal(identity(4, DEVICE))


TINY = torch.finfo(torch.float32).tiny
VALUES = {
    "one NaN": [1.0, NAN, -2.0, 0.0],
    "one Inf": [1.0, INF, -2.0, 0.0],
    "one -Inf": [1.0, -INF, -2.0, 0.0],
    "both infinities": [INF, -INF, 3.0],
    "all three": [INF, NAN, -INF, 0.25],
    "only NaN": [NAN],
    "only Inf": [INF],
    "only -Inf": [-INF],
    "signed zeros": [0.0, -0.0],
    "denormals": [TINY / 8, -TINY / 1024, 1e-45, 0.0],
    "tiny": [1e-30, -3e-30, 2e-30],
    "huge": [1e30, -3e30, 2e30],
    "near the largest float32": [3e38, 3e38, -1e38],
    "tiny and huge": [1e-30, 1e30, -1.0],
    "a constant": [0.1],
    "small scatter around one": [1.0, 1.0001, 0.9999, 1.0],
    "both sides of eps": [1e-8, -1e-8, 1.0000001e-8, 0.9999999e-8, 2e-8],
}


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("numbers", VALUES.values(), ids=VALUES)
def test_values_that_are_hard_to_sum(numbers: list[float]) -> None:
    dtypes = HAVE_DENORMALS if 0 < abs(numbers[0]) < TINY else DTYPES
    tensors = [repeated(numbers, dtype, size) for dtype in dtypes for size in (len(numbers), BLOCKS)]
    check(measure(tensors), tensors)


@pytest.mark.parametrize(
    ("bad", "place"),
    # what is bad is decided by element and kind of number, and where it is found by place
    [*((NAN, place) for place in (0, 700, BLOCKS - 1, CHUNK - 1, CHUNK, 2 * CHUNK)), (INF, 700), (-INF, 700)],
    ids=str,
)
def test_a_single_bad_element_is_found_wherever_it_is(bad: float, place: int) -> None:
    x = random(2 * CHUNK + 1)
    x[place] = bad
    check(measure([x]), [x])


def test_sums_beyond_the_largest_float64_leave_the_finite_part_finite() -> None:
    x = random(BLOCKS, dtype=torch.float64)
    x[10], x[1500], x[4000] = 1e308, -1e308, 5e307  # no part of the sum overflows, in whatever order, but that of |x| does
    row = measure([x])[0].cpu()
    assert row[Column.NONFINITE] == 0
    assert row[Column.SUM].item() == pytest.approx(5e307)
    assert row[Column.ABS_SUM] == row[Column.SQUARE_SUM] == INF
    assert (row[Column.MIN], row[Column.MAX]) == (-1e308, 1e308)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-3, 0.1, 0.25, 1.0])
def test_near_zero_is_decided_in_real_numbers_at_the_boundary(eps: float) -> None:
    tensors = []
    for dtype in DTYPES if eps else HAVE_DENORMALS:
        at = torch.tensor(eps, dtype=torch.float64).to(dtype)
        below, above = torch.nextafter(at, torch.zeros_like(at)), torch.nextafter(at, torch.full_like(at, 10))
        numbers = torch.stack([at, below, above, -at, -above, torch.full_like(at, 2)]).tolist()
        tensors += [repeated(numbers, dtype, 6), repeated(numbers, dtype, BLOCKS), repeated([*numbers, NAN], dtype, BLOCKS)]
    check(measure(tensors, eps=eps), tensors, eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_small_std_beside_a_large_mean(dtype: torch.dtype) -> None:
    scatter = torch.randn(3 * CHUNK + 5, dtype=torch.float64)
    tensors = [(mean + 1e-4 * scatter).to(dtype).to(DEVICE) for mean in (1.0, -0.7)]
    tensors += [torch.full((3 * CHUNK + 5,), constant, dtype=dtype, device=DEVICE) for constant in (1 / 3, -7e-5, 123.4)]
    check(measure(tensors), tensors)


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(width=16) | st.sampled_from([0.0, -0.0, INF, -INF, NAN]), max_size=40),
            st.sampled_from(DTYPES),
            st.sampled_from([1, 60]),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=25)
def test_any_numbers(parts: list[tuple[list[float], torch.dtype, int]]) -> None:
    tensors = [torch.tensor(numbers * times, dtype=dtype, device=DEVICE) for numbers, dtype, times in parts]
    check(measure(tensors), tensors)


def test_the_same_input_gives_the_same_bits() -> None:
    tensors = [random(2 * CHUNK + 77, dtype=dtype) for dtype in DTYPES]
    first = measure(tensors)
    assert first.equal(measure(tensors))
    assert first[2:3].equal(measure(tensors[2:3])), "a row depends on the tensors beside it"


def test_more_chunks_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNK", 64)
    monkeypatch.setattr(triton, "_LANES", 16)
    x = random(64 * (2 * 16 + 1) + 3)
    x[64 * 16] = NAN
    check(measure([x, x.nan_to_num()]), [x, x.nan_to_num()])


# --- the scale and the difference --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("size", [31, BLOCKS])
def test_the_inverse_scale_multiplies_first(size: int) -> None:
    tensors = [random(size, dtype=dtype) * 100 for dtype in DTYPES]
    scale = torch.tensor(1 / 3, device=DEVICE)
    scaled = [x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) * scale for x in tensors]
    check(measure(tensors, inverse_scale=scale), scaled)


@pytest.mark.parametrize("scale", [INF, NAN, 0.0], ids=str)
def test_a_scale_that_is_no_number_is_as_bad_as_in_torch(scale: float) -> None:
    tensors = [torch.ones(size, device=DEVICE) for size in (5, BLOCKS)]
    check(measure(tensors, inverse_scale=torch.tensor(scale, device=DEVICE)), [x * scale for x in tensors])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_difference(shift: int) -> None:
    for scale in (None, torch.tensor(0.5, device=DEVICE)):
        tensors = [random(size, dtype=dtype) for dtype in DTYPES for size in (0, 7, BLOCKS)]
        minus = [random(len(x) + shift, dtype=x.dtype)[shift:] for x in tensors]
        factor = 1.0 if scale is None else 0.5
        differences = [x.double() * factor - m.double() for x, m in zip(tensors, minus, strict=True)]
        check(measure(tensors, minus=minus, inverse_scale=scale), differences)


def test_a_difference_of_neighbouring_floats_is_exact() -> None:
    x = torch.ones(BLOCKS, device=DEVICE)
    y = torch.nextafter(x, torch.full_like(x, 2.0))
    assert measure([y], minus=[x])[0, Column.SQUARE_SUM].item() == BLOCKS * 2.0**-46


def test_a_difference_with_a_nan_in_one_of_the_two() -> None:
    x, y = random(BLOCKS), random(BLOCKS)
    y[100] = NAN
    check(measure([x, y], minus=[y, x]), [x.double() - y.double(), y.double() - x.double()])


@pytest.mark.parametrize(
    "layouts", [("plain", "turned"), ("turned", "turned"), ("gaps", "gaps"), ("turned", "gaps")], ids="-".join
)
def test_a_difference_pairs_elements_whatever_their_strides(layouts: tuple[str, str]) -> None:
    make = {"plain": lambda: random(6, 5), "turned": lambda: random(5, 6).t(), "gaps": lambda: random(6, 10)[:, ::2]}
    x, y = (make[layout]() for layout in layouts)
    assert supports(x, y) == (layouts == ("turned", "turned"))
    check(measure([x, x], minus=[y, x]), [x.double() - y.double(), x.double() - x.double()])


# --- what the kernels take ---------------------------------------------------------------------------------------------------

TAKEN: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: nn.Parameter(random(3, 4)),
    "a result of autograd": lambda: nn.Parameter(random(3, 4)) * 2,
    "no dimension": lambda: random(1).reshape(()),
    "no element": lambda: random(3, 0, 4),
    "transposed": lambda: random(50, 101).t(),
    "channels_last": lambda: random(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: random(3, 4, 1, 5).permute(3, 0, 2, 1),
    "one row of a transposed one": lambda: random(5, 7).t()[:, 2:3].t(),
    "a slice of the first dimension": lambda: random(9, 700)[2:],
}
LEFT: dict[str, Callable[[], Tensor]] = {
    "gaps": lambda: random(9, 8)[::2, 1::3],
    "every second": lambda: random(9)[::2],
    "windows that overlap": lambda: random(30).unfold(0, 7, 2),
    "expanded": lambda: random(1, 4).expand(6, 4),
    "negative bit": lambda: torch._neg_view(random(6)),
    "zeros without memory": lambda: torch._efficientzerotensor((3, 4), device=DEVICE),
    "integers": lambda: torch.arange(5, device=DEVICE),
    "booleans": lambda: random(5) > 0,
    "float8": lambda: random(5).to(torch.float8_e4m3fn),
    "complex": lambda: random(5).to(torch.complex64),
    "sparse": lambda: torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,), device=DEVICE),
}


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_layouts_that_the_kernels_take(make: Callable[[], Tensor]) -> None:
    x = make()
    assert supports(x)
    check(measure([x]), [x])


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_the_kernels_leave_is_measured_all_the_same(make: Callable[[], Tensor]) -> None:
    x = make()
    assert not supports(x)
    for row in (measure([random(3), x, random(4)])[1:2], measure([x])):
        torch.testing.assert_close(row, oracle.measure([x]), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_that_start_and_end_anywhere(dtype: torch.dtype) -> None:
    buffer = torch.cat([torch.tensor([NAN, INF]).to(dtype), random(BLOCKS, dtype=dtype).cpu(), torch.tensor([NAN]).to(dtype)])
    buffer = torch.cat([buffer] * 2).to(DEVICE)
    tensors = [buffer[start : start + size] for start in range(2, 11) for size in (1, 9, BLOCKS - 10)]
    check(measure(tensors), tensors)


def test_each_kind_has_its_row_in_its_place() -> None:
    tensors = [make() for pair in zip(LEFT.values(), TAKEN.values(), strict=False) for make in pair]
    rows = measure(tensors)
    torch.testing.assert_close(rows, oracle.measure(tensors), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert rows[:, Column.COUNT].tolist() == [x.numel() * (2 if x.is_complex() else 1) for x in tensors]
    assert measure([]).equal(identity(0))


def test_what_has_no_readable_values_is_refused_with_the_reason() -> None:
    with pytest.raises(NotMeasurable, match="nested"):
        measure([random(2), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, device=DEVICE)])
    with pytest.raises(NotMeasurable, match="meta"):
        measure([torch.empty(3, device="meta")])

    def inside(x: Tensor) -> Tensor:
        with pytest.raises(NotMeasurable, match=r"torch\.func"):
            measure([x])
        return x * 2

    torch.vmap(inside)(random(3))


def test_autocast_grad_mode_and_inference_mode_change_nothing() -> None:
    tensors = [random(1000).requires_grad_(), random(9)[::2]]
    statistics = TritonStatistics()
    with torch.inference_mode():
        plain = oracle.measured(statistics, tensors)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert oracle.measured(statistics, tensors).equal(plain)
    assert not oracle.measured(statistics, tensors).requires_grad


# --- tables and launches -----------------------------------------------------------------------------------------------------


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers went to the device, table by table."""
    sizes: list[int] = []
    upload = triton._numbers

    def counted(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        sizes.append(len(numbers))
        return upload(numbers, device)

    monkeypatch.setattr(triton, "_numbers", counted)
    return sizes


def test_tables_are_made_once_and_the_addresses_anew_when_a_tensor_moved(uploads: list[int]) -> None:
    statistics = TritonStatistics()
    model = nn.ParameterList([random(3), random(40, 5)])
    for _ in range(3):
        check(oracle.measured(statistics, list(model)), list(model))
    assert uploads == [10, 4]  # five numbers for the size of each of the two, and two for its address
    model[1].data.mul_(2)
    check(oracle.measured(statistics, list(model)), list(model))
    assert len(uploads) == 2
    seen = [model[1].data]  # alive, so that no other tensor comes to lie where it was
    model[1].data = model[1].data.clone()
    check(oracle.measured(statistics, list(model)), list(model))
    assert uploads[2:] == [4]
    seen.append(model[1].data)
    model[1].data = random(41, 5)
    check(oracle.measured(statistics, list(model)), list(model))
    assert uploads[3:] == [10, 4]


def test_another_eps_is_noticed() -> None:
    statistics, x = TritonStatistics(), torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    assert [oracle.measured(statistics, [x], eps=eps)[0, Column.NEAR_ZERO].item() for eps in (0.15, 0.25, 0.15)] == [1, 2, 1]


def test_tables_do_not_pile_up_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch, uploads: list[int]) -> None:
    monkeypatch.setattr(triton, "_CACHED", 30)
    statistics, often = TritonStatistics(), [random(7)]
    alive = []
    for size in range(1, 12):
        x = random(size)
        alive.append(weakref.ref(x))
        oracle.measured(statistics, [x, x], minus=[x, x])
        oracle.measured(statistics, often)
    del x
    assert not [reference for reference in alive if reference() is not None]
    assert sum(len(numbers) for _, numbers, *_ in statistics._cached) == statistics._size <= 30
    assert uploads.count(5) == 1, "what is used often was dropped"


def test_rows_of_an_earlier_call_stay() -> None:
    statistics, x = TritonStatistics(), random(100)
    first = oracle.measured(statistics, [x])
    before = first.clone()
    x.mul_(3)
    second = oracle.measured(statistics, [x])
    assert first.equal(before)
    assert not second.equal(before)


class _Counted:
    """Counts the launches of a kernel."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self.launches.append(self.kernel.__name__)
        return self.kernel[grid]


def test_two_launches_however_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for name in ("rows_of_chunks", "merged_rows"):
        monkeypatch.setattr(triton, name, _Counted(getattr(triton, name), launches))
    for count in (1, 30):
        measure([random(50 + index, dtype=DTYPES[index % 4]) for index in range(count)])
        assert launches == ["rows_of_chunks", "merged_rows"]
        launches.clear()


def test_where_the_kernels_fail_it_is_said_once_and_stock_operations_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(triton, "rows_of_chunks", Broken())
    statistics, tensors = Statistics(WarningLog()), [random(9), random(40).to(torch.bfloat16)]
    statistics._of[DEVICE] = TritonStatistics()
    with pytest.warns(GradmonWarning, match="no compiler") as said:
        rows = [statistics.measure(tensors, ALL_COLUMNS) for _ in range(3)]
    assert len(said) == 1
    for row in rows:
        check(row, tensors)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_starts_anew(duplicate: Callable[[TritonStatistics], TritonStatistics]) -> None:
    statistics, x = TritonStatistics(), random(10)
    oracle.measured(statistics, [x])
    other = duplicate(statistics)
    assert not other._cached
    check(oracle.measured(other, [x]), [x])


# --- on a device -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def synchronising_is_an_error() -> Any:
    torch.cuda.synchronize()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_inner_products(no_fallback: None) -> None:
    torch.manual_seed(0)
    shapes = [(3,), (1,), (40, 41), (0,), (CHUNK,), (3 * CHUNK + 7,), (64, 33)]
    for dtype in HAVE_DENORMALS:
        first = [random(*shape, dtype=dtype) for shape in shapes]
        second = [first[0], *(random(*shape, dtype=dtype) for shape in shapes[1:])]
        first[-1], second[-1] = first[-1].t(), second[-1].t()  # not contiguous, and both alike
        found = triton.TritonStatistics().inner_products(first, second)
        assert found.dtype == torch.float64
        expected = torch.stack([(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert triton.TritonStatistics().inner_products([random(5)], [torch.full((5,), NAN, device=DEVICE)]).isnan().all()


def test_inner_products_of_pairs_that_the_kernels_do_not_accept() -> None:
    torch.manual_seed(0)
    first = [random(40, 41), random(5), random(7, 3), random(9)]
    second = [random(41, 40).t(), random(5), random(7, 3, dtype=torch.float64), random(9)]
    found = triton.TritonStatistics().inner_products(first, second)
    expected = torch.stack([(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for i in range(len(first)):
        found = triton.TritonStatistics().inner_products(first[i : i + 1], second[i : i + 1])
        torch.testing.assert_close(found, expected[i : i + 1], rtol=1e-12, atol=1e-12)


def test_inner_products_go_on_with_stock_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = Statistics(WarningLog())
    monkeypatch.setattr(statistics, "_of", {DEVICE: TritonStatistics()})
    monkeypatch.setattr(triton, "_supported", lambda *_: 1 / 0)
    with pytest.warns(GradmonWarning, match="TritonStatistics failed and is off"):
        found = statistics.inner_products([random(5).fill_(2)], [random(5).fill_(3)])
    assert found.tolist() == [30.0]
    assert statistics.inner_products([random(5).fill_(2)], [random(5).fill_(4)]).tolist() == [40.0]


@pytest.mark.gpu
def test_the_device_is_not_waited_for(synchronising_is_an_error: Callable[[], None]) -> None:
    statistics = TritonStatistics()
    tensors = [random(size, dtype=dtype) for dtype in DTYPES for size in (0, 5, CHUNK + 1)]
    moved, longer = [x.clone() for x in tensors], [torch.cat([x, x]) for x in tensors]
    scale = torch.tensor(0.5, device=DEVICE)
    oracle.measured(statistics, tensors, inverse_scale=scale)  # compiles
    synchronising_is_an_error()
    rows = [oracle.measured(statistics, each, inverse_scale=scale) for each in (tensors, moved, longer, tensors)]
    torch.cuda.set_sync_debug_mode("default")
    for row, each in zip(rows, (tensors, moved, longer, tensors), strict=True):
        check(row, [x * 0.5 for x in each])


@pytest.mark.gpu
def test_no_memory_is_taken_in_the_steady_state() -> None:
    statistics = TritonStatistics()
    tensors = [random(size) for size in (5, CHUNK, 3 * CHUNK)]
    oracle.measured(statistics, tensors)
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        oracle.measured(statistics, tensors)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (before, reserved)


@pytest.mark.gpu
def test_a_cuda_graph_measures_anew_with_each_replay_whatever_runs_between() -> None:
    statistics = TritonStatistics()
    tensors = [random(size, dtype=dtype) for dtype in DTYPES for size in (5, CHUNK + 1)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        oracle.measured(statistics, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made_inside = [x * 2 for x in tensors]
        rows = oracle.measured(statistics, [*tensors, *made_inside])
    for _ in range(3):
        for x in tensors:
            x.copy_(random(len(x), dtype=x.dtype))
        # of five numbers each: they push every table out of the cache, and its memory goes to others
        for size in range(1, triton._CACHED // 5 + 100):
            oracle.measured(statistics, [random(size)])
        graph.replay()
        check(rows, [*tensors, *(x * 2 for x in tensors)])


@pytest.mark.gpu
def test_each_stream_has_tables_of_its_own() -> None:
    statistics, tensors = TritonStatistics(), [random(size) for size in (5, CHUNK + 1)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    rows = []
    for stream in streams:
        with torch.cuda.stream(stream):
            rows.append(oracle.measured(statistics, tensors))
    torch.cuda.synchronize()
    for row in rows:
        check(row, tensors)
    assert len({key[-1] for key in statistics._cached}) == 3


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_32_bits_count() -> None:
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB on the device")
    x = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    x[-1], x[2**31 - 1] = -3, 7
    row = measure([x])[0].tolist()
    total = size - 2 - 3 + 7
    assert row == [size, total, total + 6, size - 2 + 9 + 49, 0, 0, -3, 7]
