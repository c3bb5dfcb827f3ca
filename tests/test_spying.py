"""The stand-in that sees calls of attention: where it stands, when it goes, and that it changes nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_gradmon.capture.attention.function_patch import ATTENTION_PATCH, CallObserver

ORIGINAL = F.scaled_dot_product_attention
Q = torch.randn(1, 2, 3, 4)


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """A module that has imported the function by its name."""
    module = types.ModuleType("elsewhere_of_the_spy")
    module.attend = ORIGINAL  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def spying() -> tuple[CallObserver, list[Any]]:
    seen: list[Any] = []
    return CallObserver(ATTENTION_PATCH, lambda args, kwargs, result: seen.append((len(args), kwargs, result))), seen


def test_it_sees_calls_by_every_name_and_goes_without_a_trace(elsewhere: Any) -> None:
    spy, seen = spying()
    spy.enter()
    results = [F.scaled_dot_product_attention(Q, Q, Q, is_causal=True), elsewhere.attend(Q, Q, Q)]
    spy.leave()
    spy.leave()
    assert [(count, kwargs) for count, kwargs, _ in seen] == [(3, {"is_causal": True}), (3, {})]
    assert [result is found for (*_, found), result in zip(seen, results, strict=True)] == [True, True]
    assert torch.equal(results[0], ORIGINAL(Q, Q, Q, is_causal=True))
    assert F.scaled_dot_product_attention is elsewhere.attend is ORIGINAL
    F.scaled_dot_product_attention(Q, Q, Q)
    assert len(seen) == 2


def test_two_of_them_nest() -> None:
    (one, by_one), (other, by_other) = spying(), spying()
    one.enter()
    other.enter()
    F.scaled_dot_product_attention(Q, Q, Q)
    other.leave()
    F.scaled_dot_product_attention(Q, Q, Q)
    one.leave()
    assert (len(by_one), len(by_other)) == (2, 1)
    assert F.scaled_dot_product_attention is ORIGINAL


def test_what_others_put_there_is_called_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 2 * ORIGINAL(*args, **kwargs))
    doubled = F.scaled_dot_product_attention
    spy, seen = spying()
    spy.enter()
    assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), 2 * ORIGINAL(Q, Q, Q))
    spy.leave()
    assert len(seen) == 1
    assert F.scaled_dot_product_attention is doubled
    spy.enter()
    F.scaled_dot_product_attention = ORIGINAL  # in the middle of a forward
    spy.leave()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_left_behind_it_is_taken_away_by_the_next_one_to_enter() -> None:
    spy, seen = spying()
    spy.enter()  # and then somebody presses Ctrl-C
    spy.enter()
    F.scaled_dot_product_attention(Q, Q, Q)
    spy.leave()
    assert F.scaled_dot_product_attention is ORIGINAL
    assert len(seen) == 1


def test_a_function_that_is_compiled_while_it_is_there_calls_the_original() -> None:
    torch._dynamo.reset()
    spy, seen = spying()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
    expected = ORIGINAL(Q, Q, Q)  # a name of this module, where the stand-in will stand too
    spy.enter()
    try:
        found = compiled(Q)
    finally:
        spy.leave()
    assert seen == []
    assert torch.equal(found, expected)
    assert torch.equal(compiled(Q), expected)
