"""Statistics on accelerators: the rows are those of the float64 method, however the tensors are laid out and merged."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torch_gradmon.capture import module_values
from torch_gradmon.capture.gradients import copies
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.moments import ALL_COLUMNS, ALWAYS, Column
from torch_gradmon.statistics import on_device
from torch_gradmon.statistics.eager import inner_product, measure_precisely
from torch_gradmon.statistics.on_device import DeviceStatistics
from torch_gradmon.statistics.request import Batch, Request
from torch_gradmon.step.buffer import StepBuffer

_SHAPES = [(), (1,), (0,), (5,), (1024,), (1025,), (33, 40), (7, 3, 2), (5000,), (2048, 2)]
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.complex64, torch.bool]


@pytest.fixture(params=[(2, 2), (3, 4), (8, 64), (4096, 64)], ids=str)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables with few rows, and levels that merge few of them."""
    rows, fan = request.param
    monkeypatch.setattr(on_device, "ROWS", rows)
    monkeypatch.setattr(on_device, "FAN", fan)


def _tensor(draw: random.Random) -> Tensor:
    shape, dtype = draw.choice(_SHAPES), draw.choice(_DTYPES)
    found = torch.randn(shape) * 10 ** draw.uniform(-3, 3) + draw.choice([0.0, 0.0, 10.0, -100.0])
    if draw.random() < 0.2 and found.numel():
        found.view(-1)[draw.randrange(found.numel())] = draw.choice([math.nan, math.inf, -math.inf])
    if draw.random() < 0.2:
        found = found * (torch.rand(shape) > 0.5)
    if dtype == torch.complex64:
        found = torch.complex(found, found * 2)
    else:
        found = found.to(dtype) if dtype.is_floating_point else found.nan_to_num(0, 0, 0).to(dtype)
    if found.dim() == 2 and draw.random() < 0.5:
        found = found.t()
    return found.to_sparse() if found.dim() == 2 and draw.random() < 0.2 and not found.is_complex() else found


def _partner(tensor: Tensor, draw: random.Random) -> Tensor:
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.layout != torch.strided:
        return tensor.clone()
    return (tensor * 0.5).to(draw.choice([tensor.dtype, torch.float32]))


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_the_float64_method(seed: int, layout: None) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tensors = [_tensor(draw) for _ in range(draw.randint(1, 12))]
    minus = [_partner(tensor, draw) for tensor in tensors] if draw.random() < 0.4 else None
    scale = torch.tensor(0.25) if minus is None and draw.random() < 0.4 else None
    columns = ALL_COLUMNS if draw.random() < 0.6 else frozenset(draw.sample(list(Column), 3))
    request, batch = Request(columns, draw.choice([1e-8, 0.5]), scale), Batch.read(tensors, minus)
    expected, found = measure_precisely(batch, request), DeviceStatistics().rows(batch, request)
    for column in columns | ALWAYS:
        size = expected[:, Column.ABS_SUM if column is Column.SUM else column].abs().nan_to_num(1, 1, 1)
        ours, right = found[:, column], expected[:, column]
        # infinities and NaN are equal, numbers nearly
        assert (ours.isclose(right, rtol=1e-12, atol=0, equal_nan=True) | ((ours - right).abs() <= 1e-12 * size)).all(), column


def test_a_row_has_the_same_bits_in_any_company_that_is_laid_out_alike(layout: None) -> None:
    torch.manual_seed(0)
    statistics, tensor = DeviceStatistics(), torch.randn(5000)
    first = statistics.rows(Batch.read([tensor], None), Request())
    assert torch.equal(statistics.rows(Batch.read([tensor], None), Request()), first)
    again = statistics.rows(Batch.read([torch.randn(2000), torch.randn(3), tensor, torch.randn(0)], None), Request())
    torch.testing.assert_close(again[2:3], first, rtol=1e-14, atol=0)


def test_inner_products_of_many_pairs(layout: None) -> None:
    torch.manual_seed(0)
    first = [torch.randn(shape) for shape in [(3,), (), (40, 41), (0,), (5000,)]]
    second = [first[0], torch.randn(()), torch.randn(41, 40).t(), torch.randn(0), torch.randn(5000).to(torch.float64)]
    found = DeviceStatistics().inner_products(first, second)
    expected = torch.stack([inner_product(a, b) for a, b in zip(first, second, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_layouts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_CACHED", 10)
    monkeypatch.setattr(on_device, "_FEWEST", 1)
    statistics = DeviceStatistics()
    for size in range(1, 20):
        statistics.rows(Batch.read([torch.ones(size)] * 4, None), Request())
    assert sum(count for count, _ in statistics._layouts.values()) <= 10


def test_copies_have_memory_of_their_own() -> None:
    tensors = [torch.randn(3, 4), torch.randn(4, 3).t(), torch.ones(()), torch.ones(0)]
    found = copies(tensors)
    assert all(map(torch.equal, found, tensors))
    assert not {tensor.data_ptr() for tensor in found if tensor.numel()} & {tensor.data_ptr() for tensor in tensors}


class _Counted:
    """Statistics that count what is measured at once; with a kernel of their own, or without."""

    def __init__(self, has_kernel: bool) -> None:
        self._has_kernel, self._statistics = has_kernel, DeviceStatistics()
        self.calls: list[int] = []

    def has_kernel(self, device: torch.device) -> bool:
        return self._has_kernel

    def measure(self, tensors: list[Tensor], columns: frozenset[Column]) -> Tensor:
        self.calls.append(len(tensors))
        return self._statistics.rows(Batch.read(tensors, None), Request(columns))


def test_copies_wait_until_they_fill_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_values, "spare_memory", lambda device: 4000)
    monkeypatch.setattr(module_values, "DEVICE_ROWS_CAPACITY", 100)
    counted, buffer = _Counted(has_kernel=True), StepBuffer(0, WarningLog())
    rows = module_values.DeviceRows(counted, WarningLog())  # type: ignore[arg-type]
    rows.begin(buffer)
    tensors = [torch.full((200,), float(number)) for number in range(12)]  # 800 bytes each
    for number, tensor in enumerate(tensors):
        assert rows.measure("activation", f"layer.{number}", ALL_COLUMNS, tensor, None)
        tensor.zero_()  # as a later part of the model does that works in place
    assert not rows.measure("activation", "head", ALL_COLUMNS, torch.ones(251), None)  # more than a fourth
    assert counted.calls == [5, 5]
    rows.flush()
    assert counted.calls == [5, 5, 2]
    found = buffer.merged_rows_of_calls()
    assert [row[Column.MAX].item() for row in found.values()] == list(range(12))


def test_without_a_kernel_few_copies_wait() -> None:
    counted, buffer = _Counted(has_kernel=False), StepBuffer(0, WarningLog())
    rows = module_values.DeviceRows(counted, WarningLog())  # type: ignore[arg-type]
    rows.begin(buffer)
    for refused in (torch.ones(2**20 + 1), torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64)):
        assert not rows.measure("activation", "head", ALL_COLUMNS, refused, None)
    for number in range(5):
        assert rows.measure("activation", f"layer.{number}", ALL_COLUMNS, torch.ones(2**20), None)
    assert counted.calls == [4]
