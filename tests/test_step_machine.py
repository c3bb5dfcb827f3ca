"""The step machine as a table: events in, actions and the phase out. No model, no loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Any

import pytest

from torch_gradmon.core.errors import SpikeError
from torch_gradmon.monitor.machine import StepMachine, StepState


class Phase(Enum):
    """Where in a step the loop is."""

    BETWEEN = "no step is open; logged values belong to the last one"
    FORWARD = "a forward pass opened the step, and no backward pass has ended"
    BACKWARD = "a backward pass has ended, and no optimizer has stepped"
    OPTIMIZER = "an optimizer is stepping, or raised in its step"
    STEPPED = "an optimizer has stepped, and others are still to step"
    ATTEMPTED = "all optimizers have stepped; the scaler's update or the loop ends the step"


def phase_of(state: StepState) -> Phase:
    progress = state.progress
    if not state.is_open:
        return Phase.BETWEEN
    if progress.is_attempted:
        return Phase.ATTEMPTED
    if progress.begun:
        return Phase.OPTIMIZER
    if progress.done or progress.overflowed:
        return Phase.STEPPED
    return Phase.BACKWARD if progress.backwards else Phase.FORWARD


#: Actions that say little about the order of things, and happen around every optimizer step.
_QUIET = {
    "annotate",
    "release_gradients",
    "hold_parameters",
    "was_monitored",
    "has_gradients",
    "let_go",
    "accumulates",
    "was_cleared",
    "shares_parameters",
    "gets_own_gradients",
    "writes_early",
}


class Recording:
    """Boundaries and measurements that write down what is asked of them."""

    has_values = True
    was_monitored = True

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.skips: bool | Exception = False
        self.with_gradients: set[Hashable] = set()
        self.cleared: set[Hashable] = set()
        self.sharing = False
        self.alternates = self.is_skipped = False

    waits_for_step = False

    def __getattr__(self, name: str) -> Any:
        def action(*args: Any, **options: Any) -> None:
            if name not in _QUIET:
                told = [str(each) for each in args if isinstance(each, (int, str)) and each is not False]
                told += [key for key, value in options.items() if value is True]
                self.actions.append(" ".join((name, *told)))

        return action

    def decide(self, optimizer: str, *_: Any) -> bool:
        self.actions.append(f"decide {optimizer}")
        if isinstance(self.skips, Exception):
            raise self.skips
        self.is_skipped = self.skips
        return self.skips

    def has_gradients(self, optimizer: Hashable) -> bool:
        return optimizer in self.with_gradients

    def accumulates(self, optimizer: Hashable) -> bool:
        return optimizer in self.with_gradients

    def was_cleared(self, optimizer: Hashable) -> bool:
        return optimizer in self.cleared

    def shares_parameters(self, optimizer: Hashable, other: Hashable) -> bool:
        return self.sharing

    def gets_own_gradients(self) -> bool:
        return self.alternates

    def writes_early(self, optimizer: Hashable) -> bool:
        return False


class Loop:
    """A machine with optimizers, driven by words."""

    def __init__(self, optimizers: str = "a") -> None:
        self.seen, self.state = Recording(), StepState(is_driven=True)
        self.machine = StepMachine(self.seen, self.state, self.seen, list(optimizers))

    def event(self, word: str) -> Any:
        """``F`` forward, ``E`` forward in evaluation mode, ``B`` backward, ``a`` step of optimizer a, ``[a`` its begin, ``]a`` its
        end, ``{a`` its begin with a closure, ``}a`` the closure's end, ``^a`` the closure raises, ``!a`` it overflows, ``S`` / ``s``
        the scaler's step begins / ends, ``U`` its update, ``<n`` and ``>`` a step by hand, ``~a`` a step within the backward pass.
        """
        machine, kind, name = self.machine, word[0], word[1:]
        match kind:
            case "F":
                return machine.forward_began(in_eval=False, in_closure=bool(name))
            case "E":
                return machine.may_train_in_eval() and machine.forward_began(in_eval=True, in_closure=False)
            case "B":
                return machine.backward_ended(is_nested=False, in_scaler_step=False)
            case "[":
                return machine.step_began(name, has_closure=False, within=False)
            case "{":
                return machine.step_began(name, has_closure=True, within=False)
            case "}":
                return machine.closure_ended(name)
            case "^":
                return machine.closure_raised(name)
            case "]":
                return machine.step_ended(name, within=False, in_scaler_step=False)
            case ")":
                return machine.step_ended(name, within=False, in_scaler_step=True)
            case "!":
                return machine.step_overflowed(name, in_scaler_step=True)
            case "~":
                machine.step_began(name, has_closure=False, within=True)
                return machine.step_ended(name, within=True, in_scaler_step=False)
            case "U":
                return machine.scaler_updated()
            case "<":
                return self.machine.begin_by_hand(int(name))
            case ">":
                return self.machine.end()
            case "X":
                return self.machine.finish()
        raise ValueError(word)

    def run(self, words: Iterable[str]) -> Loop:
        for word in words:
            if word.isalpha() and word.islower():
                self.event(f"[{word}")
                self.event(f"]{word}")
            else:
                self.event(word)
        return self


_OPENS = ["seal 0", "rewind 0", "open 0"]
_STEP = ["measure_parameters", "measure_after_clip a with_unowned", "decide a"]

_OVERFLOWED = ["measure_parameters", "measure_after_clip a with_unowned is_overflowed", "decide a", "attempt_ended True"]

#: Events before, the event, the actions of that event, and the phase after it. ``a`` steps first, ``b`` last where there are two.
TABLE: list[tuple[str, str, str, list[str], Phase]] = [
    # optimizers, events before, event, actions, phase
    ("a", "", "F", _OPENS, Phase.FORWARD),
    ("a", "F", "F", [], Phase.FORWARD),
    ("a", "F", "B", ["pass_ended", "measure_before_clip"], Phase.BACKWARD),
    ("a", "F B", "B", ["pass_ended", "measure_before_clip"], Phase.BACKWARD),
    ("a", "F B", "[a", _STEP, Phase.OPTIMIZER),
    ("a", "F B [a", "]a", ["measure_update a", "attempt_ended", "close"], Phase.BETWEEN),
    ("a", "F B a", "F", ["seal 1", "open 1"], Phase.FORWARD),
    # nothing is seen of the forward, as in a compiled graph
    ("a", "", "B", [*_OPENS[:2], "open 0 hides_forward", "pass_ended", "measure_before_clip"], Phase.BACKWARD),
    ("a", "", "[a", [*_OPENS, "revive_hooks a", *_STEP], Phase.OPTIMIZER),
    # several optimizers
    ("ab", "F B", "[a", ["measure_parameters", "measure_after_clip a", "decide a"], Phase.OPTIMIZER),
    ("ab", "F B [a", "]a", ["measure_update a", "set_aside"], Phase.STEPPED),
    ("ab", "F B a", "[b", ["rejoin 1", "measure_after_clip b with_unowned", "decide b"], Phase.OPTIMIZER),
    ("ab", "F B a [b", "]b", ["measure_update b", "attempt_ended", "close"], Phase.BETWEEN),
    ("ab", "F B a", "F", ["part_began"], Phase.STEPPED),
    ("ab", "F B a", "{b", ["part_began", "rejoin 1"], Phase.OPTIMIZER),
    ("ab", "F B a F B", "[a", ["measure_parameters", "measure_after_clip a", "decide a"], Phase.OPTIMIZER),
    ("ab", "F B a F B a F B", "[b", ["rejoin 2", "measure_after_clip b with_unowned", "decide b"], Phase.OPTIMIZER),
    ("ab", "F B a b F B [a", "]a", ["measure_update a"], Phase.STEPPED),
    ("ab", "F B b", "[a", ["warn_order last 0 a"], Phase.BETWEEN),
    # a scaler around it
    ("a", "F B [a", ")a", ["measure_update a", "attempt_ended"], Phase.ATTEMPTED),
    ("a", "F B [a )a", "U", ["close"], Phase.BETWEEN),
    ("a", "F B [a )a", "F", ["close", "seal 1", "open 1"], Phase.FORWARD),
    ("a", "F B", "!a", _OVERFLOWED, Phase.ATTEMPTED),
    ("a", "F B !a", "U", ["close is_overflowed"], Phase.BETWEEN),
    ("a", "", "U", [], Phase.BETWEEN),
    # the optimizer raised in its step
    ("a", "F B [a", "F", ["close is_overflowed", "seal 1", "open 1"], Phase.FORWARD),
    # closures
    ("a", "", "{a", [*_OPENS, "measure_parameters"], Phase.OPTIMIZER),
    ("a", "{a", "Fc", [], Phase.OPTIMIZER),
    ("a", "{a Fc B", "}a", ["measure_after_clip a with_unowned", "decide a"], Phase.OPTIMIZER),
    ("a", "{a Fc B }a", "}a", ["measure_after_clip a with_unowned"], Phase.OPTIMIZER),
    ("a", "{a Fc ^a", "{a", ["close is_overflowed", "seal 1", "open 1", "measure_parameters"], Phase.OPTIMIZER),
    # evaluation mode
    ("a", "", "E", [*_OPENS[:2], "open 0 is_tentative"], Phase.FORWARD),
    ("a", "E", "F", ["drop was_tentative", "seal 0", "rewind 0", "open 0"], Phase.FORWARD),
    ("a", "E", "B", ["confirm", "pass_ended", "measure_before_clip"], Phase.BACKWARD),
    ("a", "F B a", "E", [], Phase.BETWEEN),
    ("a", "F B a E", "F", ["release", "seal 1", "open 1"], Phase.FORWARD),
    ("a", "F B a E", "B", ["seal 1", "open 1 hides_forward", "pass_ended", "measure_before_clip"], Phase.BACKWARD),
    ("a", "E B a", "E", ["seal 1", "open 1 is_tentative"], Phase.FORWARD),
    # by hand
    ("a", "", "<5", ["seal 5", "rewind 5", "open 5"], Phase.FORWARD),
    ("a", "<5 F B [a", "]a", ["measure_update a", "attempt_ended"], Phase.ATTEMPTED),
    ("a", "<5 F B a", "F", [], Phase.ATTEMPTED),
    ("a", "<5 F B a", ">", ["close"], Phase.BETWEEN),
    ("a", "<5", "<3", ["close", "seal 3", "rewind 3 5", "open 3"], Phase.FORWARD),
    ("a", "F", "<0", ["drop", "seal 0", "rewind 0", "open 0"], Phase.FORWARD),
    # within the backward pass
    ("ab", "F ~a", "~b", ["explain_in_backward b", "measure_after_clip b", "warn_in_backward", "measure_update b"], Phase.STEPPED),
    ("ab", "F ~a ~b", "B", ["pass_ended", "measure_before_clip", "measure_unowned", "attempt_ended", "close"], Phase.BETWEEN),
    # the end of the run
    ("a", "F B", "X", ["drop"], Phase.BETWEEN),
    ("ab", "F B a", "X", ["rejoin 1", "close"], Phase.BETWEEN),
    ("ab", "F B a F B a", "X", ["rejoin 1", "close_part", "seal 1", "parts_closed", "close"], Phase.BETWEEN),
    ("ab", "F B a F B", "X", ["rejoin 1", "close"], Phase.BETWEEN),
    ("ab", "F B a F B a F B", "X", [*["close_part", "seal 1", "close_part", "seal 2"], "parts_closed", "drop"], Phase.BETWEEN),
    ("a", "F B a", "X", [], Phase.BETWEEN),
]  # fmt: skip


def test_steps_end_without_an_optimizer_that_rests() -> None:
    loop = Loop("abc").run([*"FBab"] * 10)
    assert loop.state.ended is None  # as with a critic that steps ten times for each step of the generator
    loop.seen.actions.clear()
    loop.run([*"FBa"])
    assert loop.seen.actions.count("warn_order resting 0 c b") == 1
    assert loop.seen.actions.count("close_part") == 10
    assert loop.state.is_open
    assert loop.state.ended == 9
    loop.run("b")  # which stepped last before a began anew
    assert loop.state.ended == 10
    loop.run([*"FBab"] * 3)
    assert loop.state.ended == 13
    loop.run([*"FBabc"] * 2)  # it steps again, after the step that its backward pass belongs to
    assert (loop.machine.order[-1], loop.state.ended) == ("c", 15)
    assert not any(action.startswith("warn_order last") for action in loop.seen.actions)  # the order was not the user's


def _ended(loop: Loop, words: str) -> int:
    """How many steps end."""
    before = loop.state.attempts
    loop.run([*words])
    return loop.state.attempts - before


def test_each_pass_is_a_step_where_optimizers_share_parameters() -> None:
    loop = Loop("ab")
    loop.seen.sharing = True
    for phase in ("FBa" * 60, "FBb" * 30, "FBa" * 60, "FBb", "FBa" * 5):
        assert _ended(loop, phase + "F") - phase.count("F") in (0, -1)  # the first one ends with the second one
    loop.run("X")
    assert loop.state.attempts == 156
    assert not any(action.startswith("warn") for action in loop.seen.actions)


def test_no_step_is_lost_in_phases_of_several_optimizers() -> None:
    loop = Loop("abc")
    phases = ["FBa" * 20, "FBb" * 20, "FBc" * 20] * 2
    loop.run([*"".join(phases), "X"])
    assert loop.state.attempts == 120


def test_phases_too_short_to_tell_from_rounds_are_known_at_once() -> None:
    loop = Loop("ab")
    assert _ended(loop, "FBaFBaFBaFBb") == 1  # the round of a GAN with three steps of the critic
    assert _ended(loop, "FBb") == 1
    assert loop.seen.actions.count("warn_order joined 3") == 1
    assert _ended(loop, "FBaFBaFBaFBbFBb") == 5


def test_a_critic_has_as_many_steps_in_a_round_as_it_takes() -> None:
    loop = Loop("ab")
    for critics in (5, 5, 1, 5, 7, 5):
        assert _ended(loop, "FBa" * critics + "FBb") == 1
    loop.seen.actions.clear()
    loop.run([*"FBaFBaFBb"])
    assert "set_aside" not in loop.seen.actions


def test_no_step_is_lost_of_a_critic_whose_generator_rests() -> None:
    loop = Loop("ab").run([*"FBaFBb"] * 20)
    assert _ended(loop, "FBa" * 31 + "X") in (30, 31)


def test_an_optimizer_with_gradients_of_many_passes_is_awaited() -> None:
    loop = Loop("ab")
    loop.seen.with_gradients = {"b"}
    assert _ended(loop, "FBa" * 50 + "b") == 1
    assert _ended(loop, "FBa" * 150) > 0


def test_a_loop_that_opens_steps_itself_waits_for_no_optimizer() -> None:
    loop = Loop("ab").run(["<0", *("B", "a") * 30, "b"])
    assert not any(action.startswith("warn_order resting") for action in loop.seen.actions)
    assert loop.machine.order == ["a", "b"]


@pytest.mark.parametrize(
    ("optimizers", "before", "event", "actions", "phase"), TABLE, ids=[f"{row[0]}: {row[1]} -> {row[2]}" for row in TABLE]
)
def test_the_table(optimizers: str, before: str, event: str, actions: list[str], phase: Phase) -> None:
    loop = Loop(optimizers).run(before.split())
    loop.seen.actions.clear()
    loop.run([event])
    assert loop.seen.actions == actions
    assert phase_of(loop.state) is phase


def test_every_phase_is_in_the_table() -> None:
    assert {row[4] for row in TABLE} == set(Phase)


def test_numbers_and_attempts() -> None:
    loop = Loop().run(["F", "B", "a", "F", "B", "a"])
    state = loop.state
    assert (state.step, state.ended, state.next_step, state.attempts, state.stride) == (1, 1, 2, 2, 1)
    loop.run(["F", "B"])
    assert (state.step, state.ended, state.next_attempt) == (2, 1, 2)
    loop.machine.finish()
    assert (state.step, state.ended, state.next_step, state.attempts) == (1, 1, 2, 2)


def test_a_skipped_step_says_so_to_the_optimizer() -> None:
    loop = Loop().run(["F", "B"])
    loop.seen.skips = True
    assert loop.event("[a") is True
    loop.event("]a")
    assert phase_of(loop.state) is Phase.BETWEEN


def test_a_stop_leaves_through_the_optimizer_and_ends_the_step() -> None:
    loop = Loop().run(["F", "B"])
    loop.seen.skips = SpikeError("stop")
    with pytest.raises(SpikeError, match="stop"):
        loop.event("[a")
    assert loop.seen.actions[-1] == "close"
    assert (phase_of(loop.state), loop.state.attempts) == (Phase.BETWEEN, 1)


def test_a_late_optimizer_is_the_last_one_from_then_on() -> None:
    loop = Loop("ab").run(["F", "B", "b", "a"])
    assert loop.machine.order == ["b", "a"]
    loop.run(["F", "B", "b"])
    assert phase_of(loop.state) is Phase.STEPPED
    loop.run("a")
    assert phase_of(loop.state) is Phase.BETWEEN


def test_where_nothing_is_measured_steps_are_counted_all_the_same() -> None:
    loop = Loop()
    loop.seen.has_values = False  # type: ignore[misc]
    loop.run(["F", "a", "F", "a"])
    assert not [action for action in loop.seen.actions if action.startswith("measure_") and "update" not in action]
    assert (loop.state.step, loop.state.attempts) == (1, 2)


def test_while_paused_nothing_opens_or_closes_a_step() -> None:
    loop = Loop()
    loop.state.is_paused = True
    loop.run(["F", "B"])
    assert loop.seen.actions == []


def test_passes_before_the_last_one_are_not_measured_once_their_number_is_known() -> None:
    loop = Loop()
    for _ in range(100):
        loop.run(["F", "B", "F", "B", "F", "B", "a"])
    loop.seen.actions.clear()
    loop.run(["F", "B", "F", "B"])
    assert "measure_before_clip" not in loop.seen.actions
    loop.run(["F", "B"])
    assert loop.seen.actions.count("measure_before_clip") == 1


def test_a_loop_that_is_followed_anew_has_no_habits_yet() -> None:
    loop = Loop()
    loop.run(["F", "B", "F", "B", "a", "~a"])
    loop.machine.finish()
    loop.state.follow()
    patterns = loop.state.patterns
    assert patterns.is_first
    assert (patterns.fewest_backwards, patterns.steps_learned) == (None, 0)
    assert not loop.state.in_backward.known
    assert not loop.state.progress.has_stepped


def test_steps_joined_by_a_late_last_optimizer_are_told_once() -> None:
    loop = Loop("ab")
    loop.seen.with_gradients = {"b"}
    loop.run([*("FBa" * 50 + "FBab" * 5)])
    assert [action.split()[:2] for action in loop.seen.actions].count(["warn_order", "late"]) == 1


def test_cleared_gradients_of_a_late_last_one_split_its_step() -> None:
    loop = Loop("ab")
    loop.seen.with_gradients = {"b"}
    loop.run([*("FBa" * 50)])
    loop.seen.cleared = {"b"}
    loop.run([*("FBaFBb" * 5)])
    told = [action.split()[0] for action in loop.seen.actions]
    assert loop.state.attempts == 55
    assert not any(action.startswith("warn_order late") for action in loop.seen.actions)
    assert told.count("close_part") == 50
