"""The stand-in that sees calls of attention: where it stands, when it goes, and that it changes nothing."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_gradmon.capture.attention import ATTENTION_PATCH

ORIGINAL = F.scaled_dot_product_attention  # a name of this module, where the replacement will be too
Q = torch.randn(1, 2, 3, 4)


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """A module that has imported the function by its name."""
    module = types.ModuleType("elsewhere_of_the_spy")
    module.attend = ORIGINAL  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


class CallObserver:
    """Observes the calls that one thread makes, between :meth:`enter` and :meth:`leave`, as a recorder of attention does."""

    def __init__(self, saw: Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        self._observer, self._kept = lambda: saw, None

    def enter(self) -> None:
        self._kept = ATTENTION_PATCH.add(self._observer)

    def leave(self) -> None:
        ATTENTION_PATCH.discard(self._observer)


def spying() -> tuple[CallObserver, list[Any]]:
    seen: list[Any] = []
    return CallObserver(lambda args, kwargs, result: seen.append((len(args), kwargs, result))), seen


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


class Keeping(nn.Module):
    """Keeps the function that it finds in its first forward, in a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.attend = self.attend or functools.partial(F.scaled_dot_product_attention, is_causal=True)
        return self.attend(x, x, x)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_patch_that_is_kept_is_saved_as_the_original(is_inside: bool, duplicate: Callable[[Any], Any]) -> None:
    original, model = [ORIGINAL], Keeping()
    spy, seen = spying()
    spy.enter()
    model(Q)
    function = F.scaled_dot_product_attention
    if not is_inside:
        spy.leave()
    assert function is not original[0]
    assert duplicate(function) is original[0]
    twin = pickle.loads(pickle.dumps(model))
    spy.leave()
    assert twin.attend.func is original[0]
    assert torch.equal(twin(Q), model(Q))
    assert len(seen) == 1
    spy.enter()
    model(Q)  # what it keeps is what is used again
    spy.leave()
    assert len(seen) == 2


def test_patch_has_the_names_of_the_original_and_is_no_method() -> None:
    original, (spy, _) = [ORIGINAL], spying()
    spy.enter()
    function = F.scaled_dot_product_attention

    class Held:
        attend = F.scaled_dot_product_attention

    spy.leave()
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(function, name) == getattr(original[0], name)
    assert torch.equal(Held().attend(Q, Q, Q), original[0](Q, Q, Q))


def test_patch_in_several_threads_is_one() -> None:
    (one, by_one), (other, by_other) = spying(), spying()
    step = threading.Barrier(2)

    def in_other_thread() -> None:
        step.wait(30)
        other.enter()
        F.scaled_dot_product_attention(Q, Q, Q)
        step.wait(30)
        step.wait(30)  # the first one leaves and comes back
        F.scaled_dot_product_attention(Q, Q, Q)
        other.leave()
        step.wait(30)

    thread = threading.Thread(target=in_other_thread, daemon=True)
    thread.start()
    original = [ORIGINAL]
    one.enter()
    function = [F.scaled_dot_product_attention]
    step.wait(30)
    step.wait(30)
    one.leave()
    assert F.scaled_dot_product_attention is function[0]
    one.enter()
    F.scaled_dot_product_attention(Q, Q, Q)
    assert F.scaled_dot_product_attention is function[0]
    step.wait(30)
    step.wait(30)
    thread.join(30)
    F.scaled_dot_product_attention(Q, Q, Q)
    one.leave()
    assert (len(by_one), len(by_other)) == (2, 2)
    assert F.scaled_dot_product_attention is original[0]
    assert function[0].original is original[0]


def test_patch_is_left_by_another_thread() -> None:
    original, (spy, _) = [ORIGINAL], spying()
    spy.enter()
    thread = threading.Thread(target=spy.leave)
    thread.start()
    thread.join(30)
    assert F.scaled_dot_product_attention is original[0]


def test_patch_under_the_patch_of_others_is_observed_once() -> None:
    """Somebody wraps the function that stands there, in one thread, and restores it after a forward has ended in another."""
    original, (one, by_one) = [ORIGINAL], spying()
    other, by_other = spying()
    one.enter()
    found = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *args, **kwargs: 2 * found(*args, **kwargs)
    try:
        other.enter()
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), 2 * original[0](Q, Q, Q))
        assert (len(by_one), len(by_other)) == (1, 1)
        one.leave()
        other.leave()
        F.scaled_dot_product_attention(Q, Q, Q)
    finally:
        F.scaled_dot_product_attention = found  # what they had found
    assert (len(by_one), len(by_other)) == (1, 1)
    one.enter()
    F.scaled_dot_product_attention(Q, Q, Q)
    one.leave()
    assert len(by_one) == 2
    assert F.scaled_dot_product_attention is original[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_patch_is_scripted_as_the_original() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    spy, _ = spying()
    spy.enter()
    try:
        scripted = torch.jit.script(Attend())
    finally:
        spy.leave()
    assert torch.equal(scripted(Q), Attend()(Q))
