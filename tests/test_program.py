"""Loops that straight programs follow, and the general path: both say the same, bit for bit; and a test that can fail."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from torch_gradmon import ModuleMonitor
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.monitor.records import Publisher, RecordFactory

from . import loops_in_two_ways as loops
from .fuzz.program import Program
from .loops_in_two_ways import Case, Change

#: A case with a warning, a spike, a run directory and a sink.
RICH = Case(
    Program(steps=8, run_dir=True, sinks=("collecting",), log=("backward",)),
    (Change(4, 0.0, "put", "forward(spoil='nan')"), Change(6, 0.6, "drop"), Change(7, 1.0, "add", "monitor.missing()")),
)


def _check(first: int, count: int) -> None:
    counts: Counter[str] = Counter()
    text = loops.check(range(first, first + count), counts)
    assert not text, text
    followed = counts["general"] - counts["programs"]
    print(f"programs have followed {followed} of {counts['general']} steps")
    assert not loops.has_programs() or followed > 0.3 * counts["general"]


@pytest.mark.parametrize("chunk", range(10))
def test_both_ways_say_the_same(chunk: int) -> None:
    _check(30 * chunk, 30)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_both_ways_say_the_same_in_many_loops(chunk: int) -> None:
    _check(10_000 + 100 * chunk, 100)


# --- it can fail -----------------------------------------------------------------------------------------------------------------


def _moves_a_row(original: Any, *args: Any) -> Any:
    record, signals = original(*args)
    rows = record.tables["update"].rows.view(-1)
    rows[0] = torch.nextafter(rows[0], torch.tensor(9.0))
    return record, signals


#: What is wrong in one way: of which method, and where that must be seen.
DEFECTS: dict[str, tuple[Any, str, Any, str]] = {
    "a row": (RecordFactory, "make", _moves_a_row, "/read/"),
    "a warning": (WarningLog, "warn", lambda *_: None, "/warnings"),
    "its words": (WarningLog, "warn", lambda old, self, text, *more: old(self, f"{text}.", *more), "/warnings"),
    "a sink": (Publisher, "publish", lambda _, self: setattr(self, "_waiting", None), "/rows"),
    "a value": (ModuleMonitor, "get_step_metrics", lambda _, self: {}, "/read/"),
    "a reason": (ModuleMonitor, "missing", lambda old, self: dict.fromkeys(old(self), "no reason"), "/read/"),
    "the order": (ModuleMonitor, "state_dict", lambda old, self: dict(reversed(old(self).items())), "/read/"),
    "a parameter": (torch.nn.Module, "zero_grad", lambda *_, **__: None, "/training/"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_one_way_is_seen(defect: str) -> None:
    owner, name, around, where = DEFECTS[defect]
    original = getattr(owner, name)

    def patched() -> Any:
        return mock.patch.object(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    found = loops.difference(RICH, Counter(), patched)
    assert any(each.startswith(where) for each in found), found


def test_a_case_that_fails_is_made_smaller() -> None:
    small = loops.smallest(loops.draw(7), lambda case: case.program.steps > 3)
    assert small == Case(Program(seed=7, steps=4), (), small.after)
