"""``gradmon detail``: more detail for a while, of a training that goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runs import detail_request as changes
from ...runs.detail_request import DetailRequest, detail_request, request_text
from ...runs.liveness import RunStatus, run_status
from ...runs.writer import file_in
from ...step.presets import PRESETS
from .common import WrongRequest, add_parser, positive

EXAMPLES = (
    ("gradmon detail runs/first --every 1 --preset full --for 200", "everything, of the next 200 steps"),
    ("gradmon detail runs/first --every 10 --wait", "every 10th step until further notice"),
    ("gradmon detail runs/first --every 1 --for 50 --first 12000", "of the 50 steps from there on"),
    ("gradmon detail runs/first --reset", "back to what the script asks for"),
    ("gradmon detail runs/first --status", "what is in force, and what is asked for"),
)
_NOTES = """\
The training looks for a change at most once a second, at the end of a step, and takes it for the next one. A change takes the
place of the one before it, and training does not see it: its parameters end as the same bits. Where several ranks exchange
anything they change together, and tell each other in steps that are monitored: with a large cadence that may take a while.
A change of the cadence stands above every=, monitor_step_fn= and overhead_budget= of the script. Where a model is compiled,
activations and attention stay as the script asked for. Updates are measured in steps divisible by 10, as by the presets. A run that is
resumed does what its script asks for: give the change again.

The exit code is 0 if the change was asked for (with --wait: if it is in force, or was), 1 if it was waited for and did not come, and 2 if
nothing looks for changes in that directory, or nothing is to be changed."""
#: Seconds between two looks at whether a change was taken.
_PAUSE = 0.2


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    detail = add_parser(
        commands,
        "detail",
        "change what a running training measures",
        "Change how often a running training is monitored, and what is measured, for a while, without a restart.",
        EXAMPLES,
        _NOTES,
    )
    detail.add_argument("run", metavar="RUN", help="the run directory of a training that goes on")
    detail.add_argument("--every", type=positive, metavar="N", help="monitor the steps that are divisible by it")
    detail.add_argument("--preset", choices=tuple(PRESETS), help="measure what this preset measures, in place of the script's")
    detail.add_argument(
        "--for", type=positive, dest="steps", metavar="N", help="for so many steps (default: until further notice)"
    )
    detail.add_argument("--first", type=_number, metavar="STEP", help="from this step on (default: the next one)")
    detail.add_argument("--reset", action="store_true", help="go back to what the script asks for")
    detail.add_argument("--status", action="store_true", help="tell what is in force, and what is asked for; changes nothing")
    detail.add_argument("--wait", action="store_true", help="wait until the change is in force")
    detail.add_argument(
        "--timeout", type=positive, metavar="SECONDS", help="wait no longer than this (default: as long as it takes)"
    )


def run(options: argparse.Namespace) -> int:
    """Ask for the change, or tell of those that were asked for; 1 where one was waited for and is not taken.

    Raises:
        WrongRequest: there is no such run, nothing that would look at a change, or nothing to be changed.
    """
    if options.status and _named(options):
        raise WrongRequest("--status changes nothing, and goes with no other option")
    if options.timeout is not None and not options.wait:
        raise WrongRequest("--timeout says how long to --wait; give both")
    change = None if options.status else _change(options)
    directory = _directory(options.run)
    found = _felt(directory)
    print(found)
    if change is None:
        _tell(found)
        _tell_unread(directory, found)
        return 0
    session = _session(found, directory)
    change = changes.numbered(change, 1 + max(_told(found.meta), _written(directory)))
    print(f"until now: {_until_now(found)}")
    changes.write(directory, change, session)
    print(f"asked for, number {change.number}: {request_text(change.facts())}")
    if waits := found.meta.get("tune", {}).get("waits"):
        print(f"it takes the place of one that was not in force yet: {_described(waits)}")
    _warn(change, found)
    if options.wait:
        return _wait(directory, change, session, options.timeout)
    print(f"whether it was taken tells: gradmon detail {options.run} --status")
    return 0


def _named(options: argparse.Namespace) -> list[str]:
    given = {"--every": options.every, "--preset": options.preset, "--for": options.steps, "--first": options.first}
    named = [name for name, value in given.items() if value is not None]
    flags = {"--reset": options.reset, "--wait": options.wait, "--timeout": options.timeout}
    return named + [name for name, value in flags.items() if value]


def _change(options: argparse.Namespace) -> DetailRequest:
    if options.reset:
        if others := [name for name in _named(options) if name not in ("--reset", "--wait", "--timeout")]:
            raise WrongRequest(
                f"--reset goes back to what the script asks for, and {others[0]} says something else; give one of them"
            )
        return DetailRequest()
    if options.every is None and options.preset is None:
        raise WrongRequest("nothing is to be changed; give --every, --preset, --reset or --status")
    try:
        return detail_request(options.every, options.preset, options.steps, options.first)
    except ValueError as error:
        raise WrongRequest(str(error)) from error


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a step")
    return int(text)


# --- the run -----------------------------------------------------------------------------------------------------------------------


def _directory(path: str) -> Path:
    directory = file_in(path).parent
    first = directory / "rank0"
    if not file_in(directory).is_file() and file_in(first).is_file():
        raise WrongRequest(
            f"in {path!r} each rank has a run directory of its own, and the first rank decides: name {str(first)!r}"
        )
    return directory


def _felt(directory: Path) -> RunStatus:
    try:
        return run_status(directory)
    except (FileNotFoundError, ValueError) as error:
        raise WrongRequest(str(error)) from error


def _session(found: RunStatus, directory: Path) -> str:
    """What the monitor calls itself that looks at changes.

    Raises:
        WrongRequest: none does.
    """
    state = found.meta.get("tune", {})
    if found.has_ended:
        raise WrongRequest(
            "this run has ended; when it is resumed it does what its script asks for, and a change can be asked for then"
        )
    if not state.get("session") or not state.get("listens"):
        raise WrongRequest(
            f"nothing looks for changes in {str(directory)!r}: it was written by an earlier version of torch_gradmon, or by another rank "
            "than the first, which decides for all"
        )
    return str(state["session"])


def _told(meta: Mapping[str, Any]) -> int:
    return int(meta.get("tune", {}).get("number", 0))


def _written(directory: Path) -> int:
    try:
        return changes.read(directory / changes.FILE_NAME)[0].number
    except (OSError, ValueError):  # what cannot be read is written over
        return 0


# --- in words ----------------------------------------------------------------------------------------------------------------------


def _script(found: RunStatus) -> str:
    every, preset = found.meta.get("every"), found.meta.get("preset")
    cadence = "the steps of monitor_step_fn" if every is None else request_text({"every": every})
    return cadence if preset is None else f"{cadence}, preset {preset}"


def _until_now(found: RunStatus) -> str:
    state = found.meta.get("tune", {}).get("in_force")
    return f"{_script(found)}, as the script asks" if state is None else _described(state)


def _described(state: Mapping[str, Any]) -> str:
    words = [f"{request_text({**state, 'first': None})} (number {state['number']})"]
    since, until = state.get("since"), state.get("until")
    if since is not None:
        words.append(f"from step {since} {'on' if until is None else f'to {until}'}")
    elif state.get("first") is not None:
        words.append(f"not before step {state['first']}")
    if state.get("ended"):
        words.append(state["ended"])
    return "; ".join(words)


def _tell(found: RunStatus) -> None:
    state = found.meta.get("tune", {})
    print(f"the script: {_script(found)}")
    for name, title in (("in_force", "in force"), ("waits", "asked for and not yet in force"), ("last", "the last one")):
        if state.get(name):
            print(f"{title}: {_described(state[name])}")
    if state.get("why"):
        print(state["why"])
    if found.has_ended:
        return
    if not state.get("listens"):
        print(
            "nothing looks for changes here: another rank than the first has written this, or an earlier version of torch_gradmon"
        )
    elif not (state.get("in_force") or state.get("waits")):
        print("nothing is in force but what the script asks for")


def _tell_unread(directory: Path, found: RunStatus) -> None:
    """What was asked for, and the training has not looked at."""
    try:
        change, session = changes.read(directory / changes.FILE_NAME)
    except (OSError, ValueError):
        return
    state = found.meta.get("tune", {})
    if session == state.get("session") and change.number > _told(found.meta) and not found.has_ended:
        print(f"asked for, and the training has not looked yet: {_described(change.facts())}")


def _warn(change: DetailRequest, found: RunStatus) -> None:
    """What whoever asked may not have thought of."""
    if change.first is not None and found.step is not None and change.first <= found.step:
        print(f"step {change.first} is over, so that it begins with the next step")
    if not change.is_reset and change.every is None:
        print(f"without --every the cadence stays that of the script: {_script(found)}")
    every = change.every or found.meta.get("every")
    if not change.is_reset and change.steps is not None and every is not None and every > change.steps:
        print(f"of {change.steps} steps in a row it may be that none is divisible by {every}: then nothing is measured")
    if found.looks_alive is False:
        print("if the run was killed, nobody will look at it; a run that is resumed does what its script asks for")


# --- waiting -----------------------------------------------------------------------------------------------------------------------


def _wait(directory: Path, change: DetailRequest, session: str, timeout: int | None) -> int:
    until = None if timeout is None else time.monotonic() + timeout
    said: str | None = None
    doubts = False
    while until is None or time.monotonic() < until:
        found = _felt(directory)
        state = found.meta.get("tune", {})
        outcome = _outcome(state, change, session)
        if outcome is not None:
            taken, words = outcome
            print(words)
            return 0 if taken else 1
        if state.get("number", 0) >= change.number and (why := state.get("why", "")) != said:
            print(why or f"the training has seen it: {_described(state.get('waits') or change.facts())}")
            said = why
        if found.looks_alive is False and not doubts:
            print(f"{found}; Ctrl-C ends the waiting, and the change still stands")
            doubts = True
        time.sleep(_PAUSE)
    print(f"it was not in force within {timeout} s; it still stands, and may come yet")
    return 1


def _outcome(state: Mapping[str, Any], change: DetailRequest, session: str) -> tuple[bool, str] | None:
    """Whether the change was taken, and what became of it; None where that is still open."""
    for name, title in (("in_force", "in force"), ("last", "taken")):
        told = state.get(name) or {}
        if state.get("session") == session and told.get("number", 0) >= change.number and told.get("since") is not None:
            if (
                told["number"] > change.number or {**told, **change.facts()} != told
            ):  # of two that were asked for at once one wins
                return False, f"another one took its place: {_described(told)}"
            return True, f"{title}: {_described(told)}"
    if state.get("session") != session or state.get("ended"):
        return False, "it was not taken: the run has ended"
    if state.get("number", 0) > change.number or (state.get("number", 0) == change.number and not state.get("waits")):
        return False, f"it was not taken: {state.get('why') or 'another one took its place'}"
    return None
