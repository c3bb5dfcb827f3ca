"""The losses of single rows: the largest of each step, and those that make a spike."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.spikes.attribution import rows_text
from torch_gradmon.step.buffer import KEPT, largest_of, merged_losses

from .ranks import on_ranks


def _train(
    *,
    steps: int = 60,
    bad: int = -1,
    value: float = 300.0,
    micro: int = 1,
    names: str = "list",
    watched: bool = True,
    **options: Any,
) -> tuple[list[Tensor], list[dict[int, float]], list[str], Any]:
    """Parameters, true losses by row and step, spikes as text, and the monitor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(1024, 4)
    y = x.sum(1)
    if bad >= 0:
        y[bad] = value
    spikes: list[str] = []
    monitor = gradmon.watch(model, optimizer, on_spike=lambda e: spikes.append(str(e)), **options) if watched else None
    true = []
    for step in range(steps):
        optimizer.zero_grad()
        rows: dict[int, float] = {}
        for part in range(micro):
            ids = torch.arange(16 * part, 16 * part + 16) + 16 * micro * step
            each = (model(x[ids])[:, 0] - y[ids]).square()
            (each.mean() / micro).backward()
            rows.update(zip(ids.tolist(), each.detach().double().tolist(), strict=True))
            if monitor is not None:
                named: Any = ids if names == "tensor" else [f"row {i}" for i in ids.tolist()] if names == "text" else ids.tolist()
                monitor.log_sample_losses(named, each)
                monitor.log_scalar("loss", each.mean())
        true.append(rows)
        optimizer.step()
    if monitor is not None:
        monitor.detach()
    return [p.detach().clone() for p in model.parameters()], true, spikes, monitor


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("names", ["list", "tensor", "text"])
def test_the_largest_losses_of_each_step_are_in_the_run_directory(micro: int, names: str, tmp_path: Path) -> None:
    _, true, _, _ = _train(steps=6, micro=micro, names=names, run_dir=tmp_path / "run")
    run = gradmon.load_run(tmp_path / "run")
    for step, rows in enumerate(true):
        found, expected = run.record(step).context["rows"], sorted(rows.items(), key=lambda row: -row[1])[:KEPT]
        assert found["ids"] == [f"row {i}" if names == "text" else i for i, _ in expected]
        assert found["losses"] == pytest.approx([loss for _, loss in expected])
        assert found["sum"] == pytest.approx(sum(rows.values()))
        assert (found["count"], found["nonfinite"]) == (16 * micro, 0)


def test_a_spike_names_the_row_that_makes_it() -> None:
    _, true, spikes, monitor = _train(bad=666, steps=50)
    share = true[41][666] / sum(true[41].values())
    assert share > 0.9
    assert any(f"of 16 rows the largest shares of the loss are those of 666 ({share:.1%})" in spike for spike in spikes)
    assert "rows with the largest losses, of 16 with a sum of" in monitor.why(41)


def test_rows_without_a_number_are_named() -> None:
    _, _, spikes, _ = _train(bad=666, value=math.nan, steps=42)
    assert any("of 16 rows 1 have a loss that is NaN or infinite: 666" in spike for spike in spikes)


def test_training_is_the_same_with_and_without() -> None:
    for ours, theirs in zip(_train(steps=5)[0], _train(steps=5, watched=False)[0], strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_kept_of_a_step_that_is_not_monitored(tmp_path: Path) -> None:
    _train(steps=4, every=2, run_dir=tmp_path / "run")
    run = gradmon.load_run(tmp_path / "run")
    assert run.steps == [0, 2]
    assert all("rows" in run.record(step).context for step in run.steps)


def test_rows_that_come_after_the_step_are_lost_with_a_warning() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer)
    each = model(torch.randn(3, 2)).square()[:, 0]
    each.mean().backward()
    optimizer.step()
    with pytest.warns(gradmon.GradmonWarning, match=r"call it before optimizer\.step\(\)"):
        monitor.log_sample_losses([1, 2, 3], each)


@pytest.mark.parametrize(
    ("ids", "losses", "error", "words"),
    [
        ([1, 2], [1.0, 2.0], TypeError, "losses as a tensor"),
        ([1, 2], torch.ones(2, 3), ValueError, r"a dense tensor \[rows\]"),
        ([1, 2], torch.ones(2).to_sparse(), ValueError, r"a dense tensor \[rows\]"),
        ([1], torch.ones(2), ValueError, "each of the 2 losses"),
        (torch.ones(2), torch.ones(2), TypeError, "whole numbers"),
        (torch.ones(2, dtype=torch.bool), torch.ones(2), TypeError, "whole numbers"),
        (7, torch.ones(2), TypeError, "or as a list"),
        ("ab", torch.ones(2), TypeError, "or as a list"),
        ({1, 2}, torch.ones(2), TypeError, "or as a list"),
        ({1: 0, 2: 0}, torch.ones(2), TypeError, "or as a list"),
        ({1: 0, 2: 0}.keys(), torch.ones(2), TypeError, "or as a list"),
        ([], torch.ones(0), ValueError, r"a dense tensor \[rows\]"),
    ],
)
def test_wrong_arguments_are_refused(ids: Any, losses: Any, error: type[Exception], words: str) -> None:
    model = nn.Linear(2, 1)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(error, match=words):
        monitor.log_sample_losses(ids, losses)


def _on_a_rank(rank: int, directory: str) -> tuple[Any, list[str]]:
    """A broken row on rank 1, which alone logs its rows; what rank 0 has in its record, and the spikes that a rank reports."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    spikes: list[str] = []
    run_dir = Path(directory) / "run" if not rank else None
    monitor = gradmon.watch(model, optimizer, on_spike=lambda e: spikes.append(str(e)), run_dir=run_dir)
    x = torch.randn(2, 60, 8, 4, generator=torch.Generator().manual_seed(3))[rank]
    for step in range(60):
        each = (model(x[step])[:, 0] - x[step].sum(1)).square()
        if rank and step == 50:
            each = each * torch.tensor([1.0] * 7 + [1e6])
        if rank:
            monitor.log_sample_losses(torch.arange(8) + 8 * step, each)
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
    monitor.detach()
    records = monitor._runtime.pipeline.history.sampled()
    return [record.context.get("rows", {}).get("ids", [])[:1] for record in records if record.step == 50], spikes


@pytest.mark.ranks
def test_each_rank_names_its_own_rows(tmp_path: Path) -> None:
    (first, spikes), (second, others) = on_ranks(2, _on_a_rank, str(tmp_path))
    assert (first, second) == ([[]], [[407]])
    assert any("step 50" in spike for spike in spikes)
    assert not any("row" in spike for spike in spikes)
    assert any("those of 407" in spike for spike in others)


def rows_of(losses: Sequence[float], ids: Any = None, dtype: torch.dtype = torch.float64) -> tuple[Any, int, Tensor]:
    """One call, as it arrives on the host."""
    ids = list(range(len(losses))) if ids is None else ids
    return ids, len(losses), largest_of(torch.tensor(losses, dtype=dtype), ids)


def test_rows_alike_and_too_few() -> None:
    rows = merged_losses([rows_of([1.0, 1.1, 0.9, 1.0, 1.0, 1.0], list("abcdef"))])
    assert rows_text(rows) == "no row of 6 stands out: the largest share of the loss, of row b, is 18.3%"
    assert rows_text(merged_losses([rows_of([1.0])])) == rows_text({}) == ""
    assert rows_text(merged_losses([rows_of([-1.0, -2.0])])) == ""
    assert rows_text(merged_losses([rows_of([0.0] * 16)])) == ""


def test_shares_of_losses_below_zero_mean_nothing() -> None:
    assert rows_text(merged_losses([rows_of([-5.0] * 40 + [1000.0] + [1.0] * 10)])) == ""


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_a_row_stands_out_among_few_and_among_many(count: int) -> None:
    rows = merged_losses([rows_of([1.0] * (count - 1) + [100.0])])
    assert (
        rows_text(rows) == f"of {count} rows the largest shares of the loss are those of {count - 1} ({100 / (count + 99):.1%})"
    )


def test_several_rows_stand_out_together_but_none_for_being_the_first_of_the_rest() -> None:
    assert "those of 0 (98.1%)" in rows_text(merged_losses([rows_of([1e3, 10.0] + [1.0] * 9)]))
    rows = merged_losses([rows_of([1.0, 50.0, 1.0, 60.0, 1.0])])
    assert rows_text(rows) == "of 5 rows the largest shares of the loss are those of 3 (53.1%), 1 (44.2%)"


def test_all_rows_without_a_number_are_counted() -> None:
    rows = merged_losses([rows_of([math.nan, 3.0] * 50), rows_of([math.inf], ["last"])])
    assert re.fullmatch(r"of 101 rows 51 have a loss that is NaN or infinite: \w+, \w+, \w+ and 48 more", rows_text(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identities_are_exact(dtype: torch.dtype) -> None:
    """Also where numbers travel as float32."""
    ids = torch.tensor([2**53 + 1, -1, 2**63 - 1, -(2**63), 2**24 + 1, 0])
    numbers = largest_of(torch.arange(6.0), ids).to(dtype)
    assert merged_losses([(ids, 6, numbers)])["ids"] == ids.flip(0).tolist()


def test_numpy_and_other_lists() -> None:
    numpy = pytest.importorskip("numpy")
    for ids in (numpy.arange(5, 8), range(5, 8), (5, 6, 7), [torch.tensor(5), torch.tensor(6), torch.tensor(7)]):
        monitor = _monitor(lambda monitor, each, ids=ids: monitor.log_sample_losses(ids, each))
        assert monitor["ids"] == [7, 6, 5]


def test_a_list_or_tensor_that_is_filled_anew() -> None:
    for buffer in ([0, 0, 0], torch.zeros(3, dtype=torch.int64)):

        def log(monitor: Any, each: Tensor, buffer: Any = buffer) -> None:
            for part in range(2):
                buffer[:] = torch.arange(3) + 3 * part if isinstance(buffer, Tensor) else [3 * part, 3 * part + 1, 3 * part + 2]
                monitor.log_sample_losses(buffer, each + 3 * part)
            buffer[:] = torch.zeros(3) if isinstance(buffer, Tensor) else [0, 0, 0]

        assert _monitor(log)["ids"] == [5, 4, 3, 2, 1, 0]


def test_a_row_of_several_calls_has_the_sum() -> None:
    rows = merged_losses([rows_of([1.0, 5.0, 2.0]), rows_of([1.0, 4.0, 2.0])])
    assert (rows["ids"], rows["losses"], rows["sum"], rows["count"]) == ([1, 2, 0], [9.0, 4.0, 2.0], 15.0, 6)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_of_a_closure_the_last_rows_count(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer)
    x, evaluations = torch.randn(6, 2), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        each = (model(x)[:, 0] - x.sum(1)).square()
        for part in (slice(0, 3), slice(3, 6)):
            monitor.log_sample_losses(torch.arange(6)[part], each[part])
        evaluations.append(each.detach().double())
        each.mean().backward()
        return each.mean()

    optimizer.step(closure)
    monitor.detach()
    found = monitor._runtime.pipeline.history.sampled()[-1].context["rows"]
    assert (found["count"], sorted(found["ids"])) == (6, [0, 1, 2, 3, 4, 5])
    assert found["sum"] == pytest.approx(evaluations[-1].sum().item())
    assert (len(evaluations) > 1) == (kind is torch.optim.LBFGS)


def _monitor(log: Callable[[Any, Tensor], None]) -> dict[str, Any]:
    """The rows of one step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer)
    model(torch.ones(3, 2)).sum().backward()
    log(monitor, torch.arange(1.0, 4.0))
    optimizer.step()
    monitor.detach()
    found: dict[str, Any] = monitor._runtime.pipeline.history.sampled()[-1].context["rows"]
    return found


def test_what_names_the_rows_is_not_kept_after_detach() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    losses = model(torch.ones(4, 3))[:, 0].square()
    losses.mean().backward()
    ids = torch.arange(4)
    kept = weakref.ref(ids)
    monitor.log_sample_losses(ids, losses)
    optimizer.step()
    monitor.detach()
    del ids
    gc.collect()
    assert kept() is None
