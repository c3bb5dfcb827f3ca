"""When a call inside a run of the reference stands for a call of the model, and when it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_gradmon.capture.reference import ReplayedForward


class Box:
    """What cannot be compared."""


def _run(args: Any, kwargs: Any, note: list[tuple[Tensor, Tensor]]) -> ReplayedForward:
    run = ReplayedForward()
    for pair in note:
        run.note(*pair)
    run.note_call(True, "part", args, kwargs)
    run.note_call(False, "part", args, torch.full((2,), 7.0))
    return run


def _found(run: ReplayedForward, args: Any, kwargs: Any, number: int = 0) -> bool:
    outputs = run.outputs_for("part", number, args, kwargs)
    assert outputs is None or outputs[""].tolist() == [7.0, 7.0]
    return outputs is not None


def test_the_same_tensors_and_values_in_the_same_places() -> None:
    x, copy = torch.zeros(2), torch.zeros(2)
    run = _run((copy, [None, 2.0]), {"mask": copy, "name": "a"}, [(x, copy)])
    assert _found(run, (x, [None, 2.0]), {"mask": x, "name": "a"})
    for args, kwargs in [
        ((x, [None, 2.5]), {"mask": x, "name": "a"}),
        ((x, (None, 2.0)), {"mask": x, "name": "a"}),
        ((x, [0, 2.0]), {"mask": x, "name": "a"}),
        ((x, [None]), {"mask": x, "name": "a"}),
        ((x, [None, 2.0]), {"mask": x}),
        ((x.clone(), [None, 2.0]), {"mask": x, "name": "a"}),
        ((x[:], [None, 2.0]), {"mask": x, "name": "a"}),
    ]:
        assert not _found(run, args, kwargs)
    assert not _found(run, (x, [None, 2.0]), {"mask": x, "name": "a"}, number=1)


@pytest.mark.parametrize("written", ["copy", "tensor"])
def test_a_tensor_that_was_written_to_is_another_one(written: str) -> None:
    x, copy = torch.zeros(2), torch.zeros(2)
    run = ReplayedForward()
    run.note(x, copy)
    (copy if written == "copy" else x).add_(1)
    run.note_call(True, "part", (copy,), {})
    run.note_call(False, "part", (copy,), torch.full((2,), 7.0))
    assert not _found(run, (x,), {})


def test_what_cannot_be_compared_or_came_from_elsewhere_is_not_kept() -> None:
    x, copy = torch.zeros(2), torch.zeros(2)
    for args in ((copy, Box()), (copy, torch.zeros(2)), (copy, {"cache": Box()})):
        run = _run(args, {}, [(x, copy)])
        assert run.outcome("part", 0) is None
        assert not _found(run, (x, None), {})
    with torch.inference_mode():
        blind = torch.zeros(2)  # which does not tell of writing
    assert _run((copy,), {}, [(blind, copy)]).outcome("part", 0) is None


def test_a_call_that_raised_leaves_no_outcome_and_the_one_around_it_has_its_own() -> None:
    run = ReplayedForward(keeps_all=True)
    run.note_call(True, "outer", (), {})
    run.note_call(True, "inner", (), {})
    run.note_call(False, "outer", (), torch.ones(1))
    assert run.outcome("inner", 0) is None
    outer = run.outcome("outer", 0)
    assert outer is not None
    assert outer.outputs == {"": torch.ones(1)}
