"""The values of a step in flight: what replaces, what merges, and the one way to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import oracle
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.core import keys as n
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column
from torch_gradmon.statistics.cpp import CppStatistics
from torch_gradmon.statistics.dispatch import Statistics
from torch_gradmon.statistics.request import DEFAULT_EPS, threshold_of_squares
from torch_gradmon.step.buffer import DeviceToHostCopy, PendingReadback, StepBuffer

from .oracle import measure

KEY = Key("gradient", "w", "mine")


def _buffer(raising: bool = True) -> StepBuffer:
    return StepBuffer(0, WarningLog(raising))


def _value(parts: list[Any], aggregation: Any, buffer: StepBuffer | None = None) -> float:
    buffer = buffer or _buffer()
    for part in parts:
        buffer.merge_value(KEY, part, aggregation)
    return buffer.flush()[1][KEY]


def _norms(buffer: StepBuffer, source: str = n.GRADIENT) -> dict[str, float]:
    table = buffer.flush()[0][source]
    return dict(zip(table.names, VIEWS["norm"].compute(table.rows).tolist(), strict=True))


def _put(how: Callable, source: str, **tensors: list[float]) -> None:
    how(source, list(tensors), measure([torch.tensor(x) for x in tensors.values()]), ALL_COLUMNS)


# --- rows --------------------------------------------------------------------------------------------------------------------


def test_rows_that_are_put_replace_and_rows_that_are_merged_add_up() -> None:
    buffer = _buffer()
    _put(buffer.put_rows, n.GRADIENT, a=[100.0], b=[5.0])
    _put(buffer.put_rows, n.GRADIENT, a=[3.0], b=[6.0])
    _put(buffer.put_rows, n.GRADIENT, b=[7.0])
    _put(buffer.put_rows, n.GRADIENT, b=[8.0], c=[9.0])
    assert _norms(buffer) == {"a": 3.0, "b": 8.0, "c": 9.0}
    merged = _buffer()
    _put(merged.merge_rows, n.ACTIVATION, a=[3.0], b=[1.0])
    _put(merged.merge_rows, n.ACTIVATION, a=[4.0])
    assert _norms(merged, n.ACTIVATION) == {"a": 5.0, "b": 1.0}


def test_putting_the_first_names_again_after_others_still_replaces() -> None:
    buffer = _buffer()
    _put(buffer.put_rows, n.GRADIENT, a=[1.0], b=[1.0])
    _put(buffer.put_rows, n.GRADIENT, a=[2.0])
    _put(buffer.put_rows, n.GRADIENT, a=[3.0], b=[3.0])
    assert _norms(buffer) == {"a": 3.0, "b": 3.0}


def test_tables_of_several_sources_have_their_own_rows_whatever_the_order_of_blocks() -> None:
    buffer = _buffer()
    _put(buffer.put_rows, n.PARAMETER, a=[1.0], b=[2.0], c=[3.0])
    _put(buffer.put_rows, n.GRADIENT, a=[4.0], b=[5.0])
    _put(buffer.put_rows, n.GRADIENT, c=[6.0])
    _put(buffer.merge_rows, n.ACTIVATION, x=[7.0], y=[8.0])
    _put(buffer.merge_rows, n.INPUT, y=[9.0])
    _put(buffer.merge_rows, n.ACTIVATION, x=[24.0])
    buffer.clear(n.PARAMETER, ["b"])
    tables = buffer.flush()[0]
    assert {source: dict(zip(t.names, t.rows[:, 3].sqrt().tolist(), strict=True)) for source, t in tables.items()} == {
        n.PARAMETER: {"a": 1.0, "c": 3.0},
        n.GRADIENT: {"a": 4.0, "b": 5.0, "c": 6.0},
        n.ACTIVATION: {"x": 25.0, "y": 8.0},
        n.INPUT: {"y": 9.0},
    }


def test_a_table_claims_only_columns_that_all_its_rows_have() -> None:
    buffer = _buffer()
    for columns in (ALL_COLUMNS, frozenset({Column.SUM, Column.MAX})):
        buffer.merge_rows(n.ACTIVATION, ["a"], measure([torch.ones(2)], columns), columns)
    assert buffer.flush()[0][n.ACTIVATION].columns == {Column.SUM, Column.MAX}


def test_absorbing_merges_rows_values_and_reasons() -> None:
    whole, part = _buffer(), _buffer()
    for buffer, x in ((whole, 3.0), (part, 4.0)):
        _put(buffer.merge_rows, n.GRADIENT_LOCAL, a=[x])
        buffer.merge_value(KEY, torch.tensor([x, x]), "sum")
    part.absent[n.GRADIENT_LOCAL, "b"] = "a reason"
    whole.absorb(part)
    tables, values, _ = whole.flush()
    assert VIEWS["norm"].compute(tables[n.GRADIENT_LOCAL].rows).tolist() == [5.0]
    assert values == {KEY: 14.0}
    assert whole.absent == {(n.GRADIENT_LOCAL, "b"): "a reason"}


@pytest.mark.parametrize("names", [None, ["a", "b", "c"], ["a"], []], ids=str)
def test_clearing_forgets_the_named_tensors_of_one_source_only(names: list[str] | None) -> None:
    buffer = _buffer()
    for source in (n.GRADIENT, n.PARAMETER):
        _put(buffer.put_rows, source, a=[1.0], b=[1.0])
        _put(buffer.merge_rows, source, c=[1.0])
        for name in "abc":
            buffer.put_value(Key(source, name, "mine"), 1.0)
    buffer.clear(n.GRADIENT, names)
    left = set("abc") - set("abc" if names is None else names)
    tables, values, _ = buffer.flush()
    assert {(source, name) for source, table in tables.items() for name in table.names} == {
        *((n.GRADIENT, name) for name in left),
        *((n.PARAMETER, name) for name in "abc"),
    }
    assert values.keys() == {Key(n.GRADIENT, name, "mine") for name in left} | {Key(n.PARAMETER, name, "mine") for name in "abc"}


def test_absorbing_puts_the_others_rows_in_the_place_of_what_was_cleared() -> None:
    here, there = _buffer(), _buffer()
    for buffer, x, names in ((here, 1.0, "ab"), (there, 2.0, "a")):
        _put(buffer.put_rows, n.GRADIENT_BEFORE_CLIP, **{name: [x] for name in names})
        for name in names:
            buffer.put_value(Key(n.GRADIENT_BEFORE_CLIP, name, "mine"), x)
    _put(here.put_rows, n.GRADIENT_BEFORE_CLIP, gone=[1.0])
    here.clear(n.GRADIENT_BEFORE_CLIP, ["a", "gone"])
    here.absorb(there)
    tables, values, _ = here.flush()
    table = tables[n.GRADIENT_BEFORE_CLIP]
    assert dict(zip(table.names, table.rows[:, Column.SUM].tolist(), strict=True)) == {"a": 2.0, "b": 1.0}
    assert {key.name: value for key, value in values.items()} == {"a": 2.0, "b": 1.0}


def test_rows_that_are_put_again_and_again_hold_a_bounded_number_of_tensors() -> None:
    buffer = _buffer()
    for x in range(1000):
        _put(buffer.put_rows, n.GRADIENT, **({"a": [float(x)], "b": [1.0]} if x % 3 else {"a": [0.0]}))
    assert len(list(buffer._on_device())) <= 64
    assert _norms(buffer) == {"a": 0.0, "b": 1.0}


def test_values_that_are_put_again_and_again_replace_each_other() -> None:
    buffer, others = _buffer(), [Key(n.OPTIMIZER, name, "exp_avg_norm") for name in ("v", "w")]
    for x in range(1000):
        buffer.put_values(others, torch.tensor([x, -x], dtype=torch.float64))
        buffer.put_values([KEY], torch.tensor([x + 1.0], dtype=torch.float64))
    assert len(list(buffer._on_device())) <= 2
    assert buffer.flush()[1] == {others[0]: 999.0, others[1]: -999.0, KEY: 1000.0}


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_many_micro_batches_are_the_same_as_their_concatenation(count: int) -> None:
    parts = [torch.randn(size % 5 + 1) for size in range(count)]
    buffer = _buffer()
    for part in parts:
        buffer.merge_rows(n.ACTIVATION, ["a"], measure([part]), ALL_COLUMNS)
        for name in ("mean", "sum", "min", "max"):
            buffer.merge_value(Key("", name, ""), part, name)
        buffer.merge_value(Key("", "median", ""), part, torch.median)
    tables, values, _ = buffer.flush()
    row, whole = tables[n.ACTIVATION].rows, torch.cat(parts).double()
    oracle.check({name: view.compute(row).item() for name, view in VIEWS.items() if view.defined(row)}, whole)
    expected = {name: getattr(whole, name)().item() for name in ("mean", "sum", "min", "max", "median")}
    assert {key.name: value for key, value in values.items()} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_many_micro_batches_hold_a_bounded_number_of_tensors() -> None:
    buffer = _buffer()
    for _ in range(1000):
        buffer.merge_rows(n.ACTIVATION, ["a"], measure([torch.ones(1)]), ALL_COLUMNS)
        buffer.merge_value(KEY, 1.0)
    assert len(list(buffer._on_device())) <= 128


# --- values ------------------------------------------------------------------------------------------------------------------

PARTS = [[1.0, 2.0, 6.0], [5.0]]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("mean", 3.5), ("sum", 14.0), ("min", 1.0), ("max", 6.0), (torch.max, 6.0), (len, 4.0), (lambda v: v.prod(), 60.0)],
)
def test_values_of_micro_batches_merge_by_their_reducer(aggregation: Any, expected: float) -> None:
    assert _value([torch.tensor(part) for part in PARTS], aggregation) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0), (True, 1.0), (0.1, 0.1), (torch.tensor(3), 3.0), (torch.tensor(True), 1.0), (torch.tensor([[1.5, 2.5]]), 2.0),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5), (torch.tensor(2**53 - 1), 2.0**53 - 1), (torch.ones((), requires_grad=True), 1.0),
    ],
)  # fmt: skip
def test_numbers_and_tensors_of_any_dtype_become_plain_floats(value: Any, expected: float) -> None:
    found = _value([value], "mean")
    assert type(found) is float
    assert found == expected


def test_the_mean_of_a_half_precision_tensor_is_taken_in_full_precision() -> None:
    x = torch.full((3000,), 60000.0, dtype=torch.float16)
    assert _value([x, x], "mean") == 60000.0


def test_a_value_that_is_put_replaces() -> None:
    buffer = _buffer()
    buffer.merge_value(KEY, 1.0)
    buffer.put_value(KEY, 2.0, "sum")
    assert _value([3.0], "sum", buffer) == 5.0


def test_an_aggregation_may_return_several_values() -> None:
    buffer = _buffer()
    for key in (KEY, Key("", "loss/per token", "")):
        buffer.merge_value(key, torch.tensor([1.0, 2.0]), lambda v: {"low": v.min(), "a/b": float(v.max()), 3: 3})
    assert buffer.flush()[1] == {
        **{KEY._replace(metric=f"mine.{name}"): value for name, value in {"low": 1.0, "a.b": 2.0, "3": 3.0}.items()},
        **{Key("", f"loss/per token.{name}", ""): value for name, value in {"low": 1.0, "a.b": 2.0, "3": 3.0}.items()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("aggregation", ["mean", "sum", "min", "max", lambda v: v.sum()])
def test_a_value_is_taken_when_it_is_given_whatever_becomes_of_its_tensor(aggregation: Any, dtype: torch.dtype) -> None:
    x, buffer = torch.tensor([2.0, 5.0], dtype=dtype), _buffer()
    buffer.merge_value(KEY, x[0], aggregation)
    x.mul_(100)
    assert buffer.flush()[1][KEY] == 2.0


def test_a_failing_aggregation_loses_its_own_key_only() -> None:
    buffer = _buffer(raising=False)
    buffer.merge_value(KEY, 1.0, lambda v: 1 / 0)
    buffer.merge_value(Key("", "loss", ""), 2.0)
    with pytest.warns(GradmonWarning, match=r"the aggregation <lambda> of gradient/w/mine failed.*ZeroDivisionError"):
        assert buffer.flush()[1] == {Key("", "loss", ""): 2.0}
    assert "ZeroDivisionError" in buffer.absent["gradient", "w"]


@pytest.mark.parametrize(
    ("value", "error"), [("text", TypeError), (None, TypeError), (torch.empty(0), ValueError), (torch.tensor(1j), TypeError)]
)
def test_what_is_no_number_is_refused_with_the_key(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="gradient/w/mine"):
        _buffer().merge_value(KEY, value)


class _Counting(TorchDispatchMode):
    """Counts reads of values by the host, and copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.counts["read"] += 1
        from_device = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args)
        if from_device and isinstance(result, Tensor) and result.device.type == "cpu":
            self.counts["copy"] += 1
        return result


def test_everything_of_a_device_goes_to_the_host_in_one_copy() -> None:
    with FakeTensorMode(), _Counting() as counting:
        tensors = [
            torch.ones(2, 8, device="xpu"),
            torch.ones((), device="xpu"),
            torch.ones(3),
            torch.ones(4, device="xpu").bool(),
        ]
        assert [x.shape for x in DeviceToHostCopy(tensors).land()] == [x.shape for x in tensors]
        assert counting.counts == {"copy": 1}


def test_a_flush_of_rows_of_many_sources_is_one_copy() -> None:
    with FakeTensorMode(), _Counting() as counting:
        buffer = _buffer()
        for source in (n.GRADIENT, n.PARAMETER, n.UPDATE):
            buffer.put_rows(source, ["a", "b"], torch.ones(2, 8, device="xpu", dtype=torch.float64), ALL_COLUMNS)
        buffer.flush()
        assert counting.counts == {"copy": 1}


@pytest.mark.gpu
def test_measuring_on_a_gpu_does_not_wait_for_it_and_a_flush_is_one_copy() -> None:
    x, buffer = torch.randn(4, 5, device="cuda"), _buffer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with _Counting() as counting:
            buffer.merge_rows(n.ACTIVATION, ["a"], measure([x]), ALL_COLUMNS)
            buffer.put_rows(n.GRADIENT, ["w"], measure([x], inverse_scale=torch.ones((), device="cuda")), ALL_COLUMNS)
            buffer.put_value(KEY, x.abs(), "mean")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not counting.counts
    with _Counting() as counting:
        tables, values, _ = buffer.flush()
    assert counting.counts["copy"] == 1
    assert values[KEY] == pytest.approx(x.double().abs().mean().item(), rel=1e-6)
    for table in tables.values():
        row = table.rows
        oracle.check({name: view.compute(row).item() for name, view in VIEWS.items() if view.defined(row)}, x.cpu())


def test_a_step_reads_no_value_before_its_flush_but_one_flag_for_each_call_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, on_metric_error="raise", preset="full")
    monitor.add_gradient_metric("mine", lambda g: g.abs().max())
    monitor.add_activation_metric("mine", lambda x: x.abs().max())
    calls: Counter[str] = Counter()
    for owner, name in ((Statistics, "measure"), (CppStatistics, "at_once")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, of=original, **k: (calls.update(["measure"]), of(*a, **k))[1])
    before_flush = {}
    depart = PendingReadback.__init__

    def counted(self: PendingReadback, buffer: StepBuffer) -> None:
        before_flush.update(reads=counting.counts["read"], calls=calls["measure"])
        depart(self, buffer)

    monkeypatch.setattr(PendingReadback, "__init__", counted)
    x = torch.randn(3, 4)
    monitor.attach(optimizer)
    threshold_of_squares(DEFAULT_EPS)  # a number that is made once in a process
    with _Counting() as counting:
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert before_flush["calls"] >= 4
    assert before_flush["reads"] <= before_flush["calls"]


def test_a_part_of_a_buffer_counts_what_is_put_there_later_as_the_newest() -> None:
    buffer = _buffer()
    for source in (n.PARAMETER, n.GRADIENT_BEFORE_CLIP, n.GRADIENT):
        buffer.put_rows(source, ["a", "b"], measure([torch.ones(1), torch.ones(1)], ALL_COLUMNS), ALL_COLUMNS)
    part = buffer.part([n.GRADIENT])
    part.put_exchanged(n.GRADIENT, ["a"], measure([torch.full((1,), 100.0)], ALL_COLUMNS), ALL_COLUMNS)  # of all ranks
    assert _norms(part) == {"a": 100.0, "b": 1.0}
    assert _norms(buffer) == {"a": 1.0, "b": 1.0}


def test_values_that_another_buffer_replaces_keep_their_keys() -> None:
    """Those of one vector need not stand together there."""
    first, later = _buffer(), _buffer()
    keys = [Key(n.OPTIMIZER, name, "exp_avg_norm") for name in "abcd"]
    first.put_values(keys, torch.arange(4.0))
    later.put_values(keys[::2], torch.tensor([10.0, 12.0]))
    later.put_values(keys[1::2], torch.tensor([11.0, 13.0]))
    first.absorb(later)
    assert first.flush()[1] == dict(zip(keys, (10.0, 11.0, 12.0, 13.0), strict=True))
