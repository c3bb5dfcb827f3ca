"""Which way of measuring is taken where, what happens when one fails, and that the compiled one is right."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.core.errors import NotMeasurable, WarningLog
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column, identity, merge_by_group
from torch_gradmon.statistics import cpp, kernel_build
from torch_gradmon.statistics.cpp import CppStatistics, Kernel, compiled, found
from torch_gradmon.statistics.dispatch import Statistics
from torch_gradmon.statistics.eager import SMALL, EagerStatistics, inner_product
from torch_gradmon.statistics.request import DEFAULT_EPS

pytestmark = pytest.mark.thorough


def views(row: Tensor) -> dict[str, float]:
    rows = row.unsqueeze(0)
    return {name: view.compute(rows).item() for name, view in VIEWS.items() if view.defined(rows).item()}


class _Broken:
    def rows(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("the kernel fails")


def test_a_backend_that_fails_is_said_once_and_replaced_by_stock_operations() -> None:
    statistics = Statistics(WarningLog())
    statistics._of["cpu"] = _Broken()
    x = torch.randn(100)
    with pytest.warns(GradmonWarning, match="the kernel fails") as said:
        rows = [statistics.measure([x], ALL_COLUMNS)[0] for _ in range(3)]
    assert len(said) == 1
    for row in rows:
        oracle.check(views(row), x)


def test_a_tensor_that_nobody_can_measure_switches_nothing_off() -> None:
    statistics = Statistics(WarningLog())
    broken = statistics._of["cpu"] = _Broken()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotMeasurable, match="nested"):
            statistics.measure([nested], ALL_COLUMNS)
    assert statistics._of["cpu"] is broken


def test_threads_that_measure_at_once_do_not_mix_up_their_tensors() -> None:
    statistics = Statistics(WarningLog())
    tensors = [torch.randn(size) for size in (100, 5000, 300_000, 70, 40_000, 900_000) for _ in range(4)]
    alone = [statistics.measure([x], ALL_COLUMNS) for x in tensors]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: statistics.measure([x], ALL_COLUMNS), tensors))
    for expected, now in zip(alone, together, strict=True):
        torch.testing.assert_close(now, expected, rtol=1e-6, atol=0)


def test_without_tensors_there_are_no_rows() -> None:
    assert torch.equal(Statistics(WarningLog()).measure([], ALL_COLUMNS), identity(0))


# --- the compiled kernel -----------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
NARROW = [torch.float32, torch.bfloat16, torch.float16]
#: Around the vectors, the runs of them and the chunks that the kernel cuts tensors into, one and several.
SIZES = [1, 5, 15, 16, 17, 255, 256, 257, 5000, 65_535, 65_536, 65_537, 66_049, 131_071, 131_072, 131_073, 196_609, 3_000_000]


_CAPABILITY = torch.backends.cpu.get_cpu_capability()
#: Compiled for this very processor; and as wheels have it, for all processors with what this one has.
KERNELS = ["native", "AVX512", "AVX2"] if _CAPABILITY == "AVX512" else ["native", _CAPABILITY]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels as a wheel has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_build, "DIRECTORY", tmp_path_factory.mktemp("wheel") / "kernels")
        kernel_build.build()
        yield


def kernel(name: str) -> Kernel:
    if name == "native":
        return compiled()
    path = kernel_build.built(name)
    if path is None:
        pytest.skip(f"wheels have no kernel for processors with {name}")
    return cpp.loaded(str(path))


@pytest.fixture(scope="module", params=KERNELS)
def fused(request: pytest.FixtureRequest, portable: None) -> CppStatistics:
    return CppStatistics(kernel(request.param))


@needs_compiler
@pytest.mark.thorough
class TestCompiled:
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_random_numbers(self, fused: CppStatistics, dtype: torch.dtype, size: int) -> None:
        x = (torch.randn(size) * 1e-3).to(dtype)
        x[::7] = 0
        oracle.check(views(oracle.measured(fused, [x])[0]), x)
        row = fused.row_of(x, DEFAULT_EPS)
        if row is not None:  # None: somebody has to look closer
            oracle.check(views(torch.tensor(row, dtype=torch.float64)), x)

    @pytest.mark.parametrize("count", [*range(1, 10), 63, 64, 65, 130, 1023, 1029, 2500], ids=str)
    def test_totals(self, fused: CppStatistics, count: int) -> None:
        """The bits that torch finds, and sums as exact as float64 is; extremes are those of merged rows."""
        generator = torch.Generator().manual_seed(count)
        scales = [1e-42, 1e-20, 1.0, 3.0, 1e17, 1e9, 0.0]  # subnormal, and with squares beyond what is exact in float32
        tensors = [torch.randn(place % 23, generator=generator) * scales[place % 7] for place in range(1, count + 1)]
        rows, total = fused.at_once(tensors, DEFAULT_EPS) or pytest.fail("all of them can be read")
        assert total is not None
        assert total[: Column.MIN] == rows.sum(0).tolist()[: Column.MIN]
        merged = merge_by_group(rows, [0] * count, 1)[0].tolist()
        assert total[Column.MIN :] == merged[Column.MIN :] == [rows[:, Column.MIN].min(), rows[:, Column.MAX].max()]
        for column in range(Column.MIN):
            exact, size = math.fsum(rows[:, column].tolist()), math.fsum(rows[:, column].abs().tolist())
            assert abs(total[column] - exact) <= 1e-15 * size
            assert abs(total[column] - merged[column]) <= max(1e-15, count * 2.0**-53) * size  # that adds row by row

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
    def test_totals_are_not_known_where_one_has_to_be_looked_at_closer(self, fused: CppStatistics, value: float) -> None:
        tensors = [torch.ones(3), torch.full((16,), value), torch.empty(0)]  # 1e30: its square overflows
        rows, total = fused.at_once(tensors, DEFAULT_EPS) or pytest.fail("all of them can be read")
        assert total is None
        assert merge_by_group(rows, [0] * 3, 1)[0, Column.NONFINITE] == (0 if value == 1e30 else 16)

    def test_the_totals_of_what_is_empty_are_those_of_nothing(self, fused: CppStatistics) -> None:
        _, total = fused.at_once([torch.empty(0), torch.empty(0, 3)], DEFAULT_EPS) or pytest.fail("all of them can be read")
        assert total == identity(1)[0].tolist()

    def test_tensors_like_those_of_the_last_calls_are_read_anew(self, fused: CppStatistics) -> None:
        """Whatever was done to a tensor that the guards have seen: none is taken for known, nor kept."""

        class Own(Tensor):
            pass

        changes: list[Callable[[Tensor], object]] = [
            lambda x: None,
            lambda x: x.mul_(2),
            lambda x: x.t_(),
            lambda x: setattr(x, "data", torch.randn(8, 8)),
            lambda x: setattr(x, "data", torch.randn(4, 16)),
            lambda x: setattr(x, "data", x.data[0].expand(8, 8)),
            lambda x: setattr(x, "data", x.data.view(torch.bfloat16)[:, :8].contiguous()),
            lambda x: setattr(x, "data", torch._neg_view(x.data)),
            lambda x: setattr(x, "data", x.data.double()),
            lambda x: setattr(x, "__class__", Own),
            lambda x: x.requires_grad_(),
        ]
        for number, change in enumerate(changes):
            tensors = [torch.randn(8, 8) for _ in range(3)]
            for _ in range(3):
                assert fused.at_once(tensors, DEFAULT_EPS, use=f"change {number}") is not None
            assert fused._known[f"change {number}"][1] == 3
            kept = weakref.ref(tensors[0])
            change(tensors[1])
            found, expected = fused.at_once(tensors, DEFAULT_EPS, use=f"change {number}"), fused.at_once(tensors, DEFAULT_EPS)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found[0], expected[0])
            del tensors
            assert kept() is None
        same = torch.randn(3)
        for _ in range(4):  # of the guards' own, the same tensor twice is none that they know
            assert (fused.at_once([same, same], DEFAULT_EPS, use="twice") or pytest.fail("it can be read"))[1] is not None
        assert fused._known["twice"][1:] == (-1, None)
        for _ in range(4):  # nor does one without elements, which has no address, make all of them unknown
            assert fused.at_once([same, torch.empty(0), torch.ones(2)], DEFAULT_EPS, use="empty") is not None
        assert fused._known["empty"][1] == 3
        assert fused.at_once([], DEFAULT_EPS) is not None

    def test_a_transform_is_no_place_to_read_what_was_read_before(self, fused: CppStatistics) -> None:
        x, inside = [torch.randn(8, 8)], list[object]()
        for _ in range(3):
            assert fused.at_once(x, DEFAULT_EPS, use="outside") is not None
        torch.func.vmap(lambda y: (inside.append(fused.at_once(x, DEFAULT_EPS, use="outside")), y)[1])(torch.ones(2))
        assert inside == [None]

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_inner_products(self, fused: CppStatistics, dtype: torch.dtype) -> None:
        sizes = (0, 1, 15, 16, 17, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 * (1 << 18) + 5)
        first, second = ([torch.randn(size).to(dtype) for size in sizes] for _ in range(2))
        first, second = [*first, *first, second[5]], [*second, *first, first[5]]
        found = fused.inner_products(first, second)
        assert found.dtype == torch.float64
        for a, b, product in zip(first, second, found.tolist(), strict=True):
            a, b = a.double(), b.double()
            assert product == pytest.approx(float((a * b).sum()), rel=0, abs=1e-13 * float((a * b).abs().sum()))
        assert float(found[5]) == float(found[-1])
        assert [float(fused.inner_products([a], [b])) for a, b in zip(first, second, strict=True)] == found.tolist()
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert fused.inner_products(first, second).tolist() == found.tolist()
        finally:
            torch.set_num_threads(threads)

    def test_inner_products_of_what_the_kernel_cannot_read(self, fused: CppStatistics) -> None:
        image = torch.randn(2, 3, 4, 5)
        last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        same, complexes = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(7, dtype=torch.complex64)
        pairs = [
            (image, last),
            (last, same),
            (image[..., 0], image[..., 1]),
            (torch.randn(9).double(), torch.randn(9)),
            (torch.tensor([1e30] * 4), torch.tensor([1e30] * 4)),
            (torch.tensor([torch.inf, 1.0]), torch.tensor([1.0, 1.0])),
            (complexes, complexes),
            (torch.eye(3).to_sparse(), torch.full((3, 3), 2.0)),
            (nn.Parameter(torch.ones(5)), torch.full((5,), 3.0)),
        ]
        found = fused.inner_products([a for a, _ in pairs], [b for _, b in pairs])
        expected = torch.stack([inner_product(a, b) for a, b in pairs])
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
        assert not found.requires_grad
        assert fused.inner_products([torch.tensor([torch.inf])], [torch.zeros(1)]).isnan().all()
        with pytest.raises(NotMeasurable):
            fused.inner_products([torch.ones(3), torch.ones(2, device="meta")], [torch.ones(3), torch.ones(2, device="meta")])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_number_of_16_bits_is_read_as_what_it_is(self, fused: CppStatistics, dtype: torch.dtype) -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        wanted = every[every.isfinite()]
        for place in (0, 16):  # in a whole vector, and in the rest of one
            padded = torch.zeros(len(wanted), place + 1, dtype=dtype)
            padded[:, 0] = wanted
            table = [row.contiguous() for row in padded]
            rows = oracle.measured(fused, table)
            assert torch.equal(rows[:, Column.SUM], wanted.double())
            assert torch.equal(rows[:, Column.ABS_SUM], wanted.double().abs())

    def test_one_call_reads_closer_what_needs_it_and_says_what_is_not_finite(self, fused: CppStatistics) -> None:
        calls, at_work = [], fused._kernel.rows

        def counted(*arguments: Any) -> int:
            calls.append(at_work(*arguments))
            return calls[-1]

        far = torch.full((1_300_000,), 1000.0)  # several threads
        far[::2] += 1e-3
        table = [
            torch.randn(70_000),
            far,
            torch.full((33,), 1e-20),
            torch.tensor([1.0, torch.nan] * 20),
            torch.zeros(50),
            torch.empty(0),
        ]
        alone = [oracle.measured(fused, [x])[0] for x in table]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "_kernel", fused._kernel._replace(rows=counted))
            rows = oracle.measured(fused, table)
            assert calls == [1]
            assert fused.row_of(far, DEFAULT_EPS) == rows[1].tolist()
            assert fused.row_of(table[3], DEFAULT_EPS) is None
            assert calls == [1, 0, 1]
        for x, row, single in zip(table, rows, alone, strict=True):
            assert torch.allclose(row, single, rtol=0, atol=0, equal_nan=True)
            oracle.check(views(row), x)
        mean = far.double().sum() / len(far)
        assert abs(rows[1][Column.SUM] / len(far) - mean) < 1e-12 * mean

    @pytest.mark.parametrize("offset", [1, 3, 7])
    def test_memory_that_is_not_aligned(self, fused: CppStatistics, offset: int) -> None:
        for dtype in NARROW:
            x = torch.randn(10_000).to(dtype)[offset:]
            oracle.check(views(oracle.measured(fused, [x])[0]), x)

    def test_a_negative_view_has_its_own_sign(self, fused: CppStatistics) -> None:
        x = torch._neg_view(torch.rand(1000) + 1)
        assert fused.row_of(x, DEFAULT_EPS) is None
        oracle.check(views(oracle.measured(fused, [x])[0]), x)

    @pytest.mark.parametrize("size", [100, 100_000, 1_000_003], ids=str)
    def test_the_row_is_the_same_to_the_bit_alone_together_and_with_any_threads(self, fused: CppStatistics, size: int) -> None:
        x, threads = torch.randn(size), torch.get_num_threads()
        alone = fused.row_of(x, DEFAULT_EPS)
        try:
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                assert fused.row_of(x, DEFAULT_EPS) == alone
                together = oracle.measured(fused, [torch.randn(7), x, torch.randn(300_000), x])
                assert together[1].tolist() == together[3].tolist() == alone
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_differences_and_scales_across_chunks(self, fused: CppStatistics, dtype: torch.dtype) -> None:
        scale = torch.tensor(0.37)
        tensors = [torch.randn(size).to(dtype) for size in (65_535, 65_537, 131_073, 196_650)]
        less = [torch.randn_like(x) for x in tensors]
        for row, x, y in zip(oracle.measured(fused, tensors, minus=less), tensors, less, strict=True):
            oracle.check(views(row), x.float() - y.float())
        for row, x in zip(oracle.measured(fused, tensors, inverse_scale=scale), tensors, strict=True):
            oracle.check(views(row), x.float() * scale)

    @pytest.mark.parametrize("value", [0.1, -7e-5, 123.4, 1e-25, 1e25, 0.0])
    def test_constants_large_and_tiny(self, fused: CppStatistics, value: float) -> None:
        x = torch.full((1_000_000,), value)
        oracle.check(views(oracle.measured(fused, [x])[0]), x)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_inf(self, fused: CppStatistics, bad: float) -> None:
        x = torch.randn(200_000)
        x[77_777] = bad
        oracle.check(views(oracle.measured(fused, [x])[0]), x)

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("size", [9, 300, 500_000, 3_000_000], ids=str)
    def test_a_small_std_beside_a_large_mean(self, fused: CppStatistics, size: int, dtype: torch.dtype) -> None:
        for spread in (1e-4, 0.0):
            x = (0.1 + spread * torch.randn(size)).to(dtype)
            for row in (
                oracle.measured(fused, [x])[0],
                torch.tensor(fused.row_of(x, DEFAULT_EPS), dtype=torch.float64),
            ):
                oracle.check(views(row), x)

    def test_near_zero_in_real_numbers(self, fused: CppStatistics) -> None:
        # 1e-8 is no float32: its neighbours below and above must fall on different sides
        below = torch.tensor(1e-8).item() if torch.tensor(1e-8).item() <= 1e-8 else None
        limit = torch.tensor(1e-8)
        if below is None:
            limit = torch.nextafter(limit, torch.tensor(0.0))
        x = torch.full((51_200,), float(limit))
        x[:100] = torch.nextafter(limit, torch.tensor(1.0))
        assert oracle.measured(fused, [x])[0, Column.NEAR_ZERO] == 51_100

    def test_many_kinds_at_once(self, fused: CppStatistics) -> None:
        wanted = torch.randn(300, 400)
        sparse = torch.sparse_coo_tensor([[1, 3]], [2.0, 5.0], (100,))
        tensors = [wanted, torch.randn(5), torch.randn(SMALL * 2).double(), wanted.t(), wanted[:, ::2], torch.empty(0), sparse]
        rows = oracle.measured(fused, tensors)
        for row, x in zip(rows, tensors, strict=True):
            oracle.check(views(row), x.to_dense())
        tensors.pop()
        less = [torch.randn_like(x) for x in tensors]
        for row, x, y in zip(oracle.measured(fused, tensors, minus=less), tensors, less, strict=True):
            oracle.check(views(row), x.double() - y.double())
        scale = torch.tensor(0.125)
        for row, x in zip(oracle.measured(fused, tensors, inverse_scale=scale), tensors, strict=True):
            oracle.check(views(row), x.double() * 0.125)

    @pytest.mark.parametrize("columns", [{Column.SQUARE_SUM}, {Column.SUM, Column.MAX}, {Column.NEAR_ZERO}, set()], ids=str)
    def test_any_columns_of_any_size(self, fused: CppStatistics, columns: set[Column]) -> None:
        tensors = [torch.randn(size) for size in (200_001, 200_192, 256 * 800, 7)]
        rows, every = oracle.measured(fused, tensors, frozenset(columns)), oracle.measured(fused, tensors)
        wanted = sorted({*columns, Column.COUNT, Column.NONFINITE})
        torch.testing.assert_close(rows[:, wanted], every[:, wanted], rtol=1e-6, atol=0)

    def test_scale_and_difference_of_each_dtype(self, fused: CppStatistics) -> None:
        scale = torch.tensor(0.37)
        for dtype in NARROW:
            x, y = torch.randn(70_001).to(dtype), torch.randn(70_001).to(dtype)
            oracle.check(views(oracle.measured(fused, [x], inverse_scale=scale)[0]), x.float() * scale)
            oracle.check(views(oracle.measured(fused, [x], minus=[y])[0]), x.float() - y.float())
            both = oracle.measured(fused, [x], inverse_scale=scale, minus=[y])[0]
            oracle.check(views(both), x.float() * scale - y.float())
            row = fused.row_of(x, DEFAULT_EPS, scale)
            assert row is not None
            oracle.check(views(torch.tensor(row, dtype=torch.float64)), x.float() * scale)

    def test_a_difference_to_another_dtype(self, fused: CppStatistics) -> None:
        x, y = torch.randn(1000).bfloat16(), torch.randn(1000)
        oracle.check(views(oracle.measured(fused, [x], minus=[y])[0]), x.float() - y)

    def test_a_partner_of_another_shape_is_refused_as_by_stock_operations(self, fused: CppStatistics) -> None:
        with pytest.raises(RuntimeError, match="size"):
            oracle.measured(fused, [torch.randn(300_000)], minus=[torch.randn(10)])

    def test_a_scaled_difference_is_rounded_as_torch_rounds_it(self, fused: CppStatistics) -> None:
        x, scale = torch.randn(100_000), torch.tensor(0.37)
        row = oracle.measured(fused, [x], inverse_scale=scale, minus=[x * scale])[0]
        assert row[Column.ABS_SUM] == 0

    def test_the_row_is_the_same_whatever_columns_are_asked_for(self, fused: CppStatistics) -> None:
        x = torch.randn(10_000) + 3  # looked at twice, since the mean is large
        for columns in ({Column.SQUARE_SUM}, {Column.SUM, Column.SQUARE_SUM}, ALL_COLUMNS):
            assert oracle.measured(fused, [x], frozenset(columns))[0].tolist() == fused.row_of(x, DEFAULT_EPS)
            assert torch.equal(oracle.measured(fused, [x], frozenset(columns)), oracle.measured(fused, [x]))

    def test_all_threads_take_subnormal_numbers_for_what_the_caller_does(self, fused: CppStatistics) -> None:
        x, threads = torch.full((4_000_000,), 1e-40), torch.get_num_threads()
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush")
        try:
            torch.set_num_threads(1)
            expected = fused.row_of(x, 0.0)
            torch.set_num_threads(2)
            assert all(fused.row_of(x, 0.0) == expected for _ in range(5))
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(threads)

    def test_memory_that_was_freed_is_not_read(self, fused: CppStatistics) -> None:
        x = torch.randn(1000)
        x.untyped_storage().resize_(0)
        assert fused.row_of(x, DEFAULT_EPS) is None

    def test_it_makes_no_copy(self, fused: CppStatistics) -> None:
        x = torch.randn(5_000_000)
        with _Passes() as passes:
            oracle.measured(fused, [x], minus=[torch.ones_like(x)])  # looked at twice, since the mean is large
        assert passes.made <= x.numel() + 100  # the ones

    @pytest.mark.slow
    def test_loading_it_leaves_subnormal_numbers_alone_and_starts_no_threads_of_its_own(self) -> None:
        program = """
            import os, sys, torch
            threads = lambda: len(os.listdir("/proc/self/task"))
            torch.set_num_threads(2)
            x = torch.randn(4_000_000)
            (x @ x, x.exp().sum())
            tiny, before = torch.full((64,), 1e-40), threads()
            from torch_gradmon.statistics.cpp import CppStatistics, compiled
            from torch_gradmon.statistics.request import Request
            CppStatistics(compiled()).rows([x] * 4, Request())
            assert (tiny * 1.0).gt(0).all()
            assert threads() == before, (before, threads())
            assert "torch._inductor.codecache" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

    def test_a_monitor_that_uses_it_measures_the_same_and_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        states = []
        for with_kernel in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3))
            optimizer = torch.optim.AdamW(model.parameters())
            monkeypatch.setenv("GRADMON_KERNEL", "build" if with_kernel else "torch")
            monitor = ModuleMonitor(model)
            monitor.add_gradient_metric("norm")
            monitor.attach(optimizer)
            for _ in range(3):
                model(torch.randn(4, 300)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append((model.state_dict(), monitor.get_step_metrics(), torch.get_rng_state()))
            monitor.detach()
        (plain, expected, rng), (watched, found, rng_after) = states
        assert all(torch.equal(plain[name], watched[name]) for name in plain)
        assert torch.equal(rng, rng_after)
        assert found == pytest.approx(expected, rel=1e-6)


def test_without_a_compiler_it_says_so_and_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    compiled.cache_clear()
    monkeypatch.setattr(cpp, "found", lambda: (None, "none"))
    with pytest.warns(GradmonWarning, match=r"(?i)could not be compiled.*no C\+\+ compiler was found"):
        statistics = Statistics(WarningLog(), compiled=True)
    x = torch.randn(100_000)
    oracle.check(views(statistics.measure([x], ALL_COLUMNS)[0]), x)


@pytest.mark.thorough
@needs_compiler
def test_every_build_of_the_kernel_gives_the_same_bits(portable: None, tmp_path: Path) -> None:
    kernels = [kernel(name) for name in KERNELS]
    for by_turns in ("true", "false"):  # the ways in which processors read
        library, way = tmp_path / f"{by_turns}.so", f"-DTORCH_GRADMON_BY_TURNS={by_turns}"
        kernel_build.compile_to(library, [("-march=native", way), (way,)])
        kernels.append(cpp.loaded(str(library)))
    generator = torch.Generator().manual_seed(0)

    def drawn(offset: float) -> list[Tensor]:
        return [(torch.randn(size, generator=generator) + offset).to(dtype) for size in (*SIZES, 100_003) for dtype in NARROW]

    tensors, others, wide = drawn(0), drawn(0), drawn(3)  # the last with sums in float64
    zeros = torch.ones(1024)
    zeros[16:32], zeros[512:528] = 0.0, -0.0  # whichever of the two is read first
    calls = [
        lambda each: oracle.measured(each, [*tensors, zeros, -zeros]),
        lambda each: oracle.measured(each, wide),
        lambda each: oracle.measured(each, tensors, minus=others),
        lambda each: each.inner_products(tensors, others),
    ]
    for call in calls:
        first, *rest = (call(CppStatistics(each)).view(torch.int64) for each in kernels)
        assert all(torch.equal(first, found) for found in rest)


@needs_compiler
def test_the_kernel_that_came_with_the_package_is_used_without_asking(portable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "compiler", lambda: pytest.fail("nothing is to be compiled"))
    found.cache_clear()
    for asked, is_used in ((None, True), (True, True), (False, False)):
        backend = Statistics(WarningLog(), compiled=asked)._of.get("cpu")
        assert isinstance(backend, CppStatistics) == is_used
    found.cache_clear()


def test_a_kernel_of_another_source_or_system_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "DIRECTORY", tmp_path)
    place = kernel_build._path(_CAPABILITY if kernel_build._VARIANTS.get("x86_64", {}).get(_CAPABILITY) else "DEFAULT")
    found.cache_clear()
    assert found()[0] is None
    assert Statistics(WarningLog())._of["cpu"].__class__ is EagerStatistics
    place.write_bytes(b"no library")
    found.cache_clear()
    assert found()[0] is None
    other = tmp_path / "kernel.cpp"
    other.write_text("// of the next version")
    monkeypatch.setattr(kernel_build, "SOURCE", other)
    assert kernel_build._path("AVX2") != place
    found.cache_clear()


@needs_compiler
def test_a_build_removes_kernels_of_other_versions_and_leaves_current_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_build, "DIRECTORY", tmp_path)
    (tmp_path / "0123456789ab-avx2.so").touch()
    built_now = kernel_build.build()
    assert sorted(tmp_path.iterdir()) == sorted(built_now)
    times = [path.stat().st_mtime_ns for path in built_now]
    assert [path.stat().st_mtime_ns for path in kernel_build.build()] == times


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor_or_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apple, broken = tmp_path / "apple", tmp_path / "broken"
    apple.write_text('#!/bin/sh\ncase "$*" in *-march=native*) echo no such processor >&2; exit 1;; esac\nexec g++ "$@"\n')
    broken.write_text("#!/bin/sh\necho the words of the compiler >&2\nexit 1\n")
    for script in (apple, broken):
        script.chmod(0o755)
    monkeypatch.setenv("CXX", str(apple))
    compiled.cache_clear()
    x = torch.randn(1_000_000)
    oracle.check(views(oracle.measured(CppStatistics(compiled()), [x])[0]), x)
    monkeypatch.setenv("CXX", f"{shutil.which('g++')} -D_GLIBCXX_ASSERTIONS")  # as hardened compilers have it
    compiled.cache_clear()
    oracle.check(views(oracle.measured(CppStatistics(compiled()), [x])[0]), x)
    for name, words in ((str(broken), "the words of the compiler"), ("/nowhere/g++ -m64", r"\$CXX .*not found.*/nowhere/g\+\+")):
        monkeypatch.setenv("CXX", name)
        compiled.cache_clear()
        with pytest.raises(RuntimeError, match=words):
            compiled()
    compiled.cache_clear()


# --- the cost, in counts -----------------------------------------------------------------------------------------------------


class _Passes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls, and elements that are read by them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.read = self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.calls += 1
            flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(x, Tensor)]
            self.read += sum(x.numel() for x in flat)
            out = (kwargs or {}).get("out")
            if isinstance(result, Tensor) and out is None and not function._schema.is_mutable:
                self.made += result.numel()
        return result


def test_a_thousand_small_tensors_cost_a_few_calls_each_chunk() -> None:
    tensors = [torch.randn(900 + index % 200) for index in range(1000)]
    eager = EagerStatistics()
    oracle.measured(eager, tensors)
    with _Passes() as passes:
        oracle.measured(eager, tensors)
    assert passes.calls < 1000  # where a loop over tensors would take six thousand
    assert passes.made < 0.2 * sum(x.numel() for x in tensors)


def test_a_large_tensor_is_read_a_handful_of_times_and_never_copied() -> None:
    x = torch.randn(8_000_000)
    eager = EagerStatistics()
    oracle.measured(eager, [x])
    with _Passes() as passes:
        oracle.measured(eager, [x])
    assert passes.read <= 8.1 * x.numel()
    assert passes.made < 0.03 * x.numel()  # the sums of its runs, in both widths


def test_what_nobody_asked_for_is_not_computed() -> None:
    x = torch.randn(2_000_000)
    eager = EagerStatistics()
    with _Passes() as passes:
        oracle.measured(eager, [x], frozenset({Column.SQUARE_SUM}))
    assert passes.read <= 1.05 * x.numel()


@pytest.mark.parametrize("others", [0, 1, 7, 300])
def test_a_row_does_not_depend_on_what_is_measured_beside_it(others: int) -> None:
    tensors = [torch.randn(size) for size in (3, 256, 257, 5000, SMALL, SMALL + 1, 700_000)]
    eager = EagerStatistics()
    alone = torch.cat([oracle.measured(eager, [x]) for x in tensors])
    more = [torch.randn(torch.randint(1, 3000, ()).item()) for _ in range(others)]  # type: ignore[call-overload]
    together = oracle.measured(eager, [*more, *tensors])[others:]
    assert torch.equal(alone, together)
    some = oracle.measured(EagerStatistics(), tensors, frozenset({Column.SUM, Column.SQUARE_SUM}))
    assert torch.equal(some[:, [Column.SUM, Column.SQUARE_SUM]], alone[:, [Column.SUM, Column.SQUARE_SUM]])
