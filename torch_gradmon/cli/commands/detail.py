"""``gradmon detail``: more detail of a running training for a while."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.formatting import printable
from ...runs import detail_request
from ...runs.detail_request import DetailRequest, request_text
from ...runs.format import directory_of, has_run
from ...runs.liveness import RunStatus, run_status
from .common import UsageError, wrong_request

# --- what is printed ---


def state_of(found: RunStatus) -> Mapping[str, Any]:
    """The state that the monitor has written into its run."""
    state: Mapping[str, Any] = found.meta.get("tune", {})
    return state


def script_text(found: RunStatus) -> str:
    every, preset = found.meta.get("every"), found.meta.get("preset")
    cadence = "the steps of monitor_step_fn" if every is None else request_text({"every": every})
    return cadence if preset is None else f"{cadence}, preset {preset}"


def current_text(found: RunStatus) -> str:
    state = state_of(found).get("in_force")
    return f"{script_text(found)}, as in the script" if state is None else change_text(state)


def change_text(state: Mapping[str, Any]) -> str:
    """A change, and the steps in which it is in force."""
    parts = [f"{request_text({**state, 'first': None})} (number {state['number']})"]
    since, until = state.get("since"), state.get("until")
    if since is not None:
        parts.append(f"from step {since} {'on' if until is None else f'to {until}'}")
    elif state.get("first") is not None:
        parts.append(f"not before step {state['first']}")
    if state.get("ended"):
        parts.append(state["ended"])
    return "; ".join(parts)


def status_lines(found: RunStatus) -> Iterator[str]:
    state = state_of(found)
    yield f"the script: {script_text(found)}"
    for name, title in (("in_force", "in force"), ("waits", "requested and not yet in force"), ("last", "the last one")):
        if state.get(name):
            yield f"{title}: {change_text(state[name])}"
    if state.get("why"):
        yield state["why"]
    if found.has_ended:
        return
    if not state.get("listens"):
        yield "nothing reads changes here: another rank than the first, or an earlier version of torch_gradmon, wrote this run"
    elif not (state.get("in_force") or state.get("waits")):
        yield "only the settings of the script are in force"


def warnings(change: DetailRequest, found: RunStatus) -> Iterator[str]:
    if change.first is not None and found.step is not None and change.first <= found.step:
        yield f"step {change.first} is over, so the change begins with the next step"
    if not change.is_reset and change.every is None:
        yield f"without --every the cadence stays that of the script: {script_text(found)}"
    every = change.every or found.meta.get("every")
    if not change.is_reset and change.steps is not None and every is not None and every > change.steps:
        yield f"possibly none of {change.steps} steps in a row is divisible by {every}; then nothing is measured"
    if found.looks_alive is False:
        yield "if the run was killed, it will not read the change; a resumed run does what its script requests"


def result_of(state: Mapping[str, Any], change: DetailRequest, session: str) -> tuple[bool, str] | None:
    """Whether the change was applied, and the reason; None if that is still open."""
    for name, title in (("in_force", "in force"), ("last", "applied")):
        found = state.get(name) or {}
        if state.get("session") == session and found.get("number", 0) >= change.number and found.get("since") is not None:
            if found["number"] > change.number or {**found, **change.facts()} != found:  # two requests at once: one wins
                return False, f"another change replaced it: {change_text(found)}"
            return True, f"{title}: {change_text(found)}"
    if state.get("session") != session or state.get("ended"):
        return False, "it was not applied: the run has ended"
    if state.get("number", 0) > change.number or (state.get("number", 0) == change.number and not state.get("waits")):
        return False, f"it was not applied: {state.get('why') or 'another change replaced it'}"
    return None


# --- the command ---


#: Seconds between two checks whether a change was applied.
_PAUSE = 0.2


def run(options: argparse.Namespace) -> int:
    """Request the change, or print the status; returns 1 if a change was waited for and not applied."""
    if options.status and _given(options):
        raise UsageError("--status changes nothing, and excludes all other options")
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout is the limit of --wait; give both")
    change = None if options.status else _change(options)
    directory = _directory(options.run)
    found = _liveness(directory)
    print(found)
    if change is None:
        print("\n".join(status_lines(found)))
        _print_unread(directory, found)
        return 0
    session = _session(found, directory)
    change = replace(change, number=1 + _requested_number(directory, _last_number(found)))
    print(f"until now: {current_text(found)}")
    detail_request.write(directory, change, session)
    print(f"requested, number {change.number}: {request_text(change.facts())}")
    if waits := state_of(found).get("waits"):
        print(f"it replaces one that was not in force yet: {change_text(waits)}")
    for warning in warnings(change, found):
        print(warning)
    if options.wait:
        return _wait(directory, change, session, options.timeout)
    print(f"to see whether it was applied: gradmon detail {printable(options.run)} --status")
    return 0


def _given(options: argparse.Namespace) -> list[str]:
    values = {"--every": options.every, "--preset": options.preset, "--for": options.steps, "--first": options.first}
    flags = {"--reset": options.reset, "--wait": options.wait, "--timeout": options.timeout}
    return [name for name, given in values.items() if given is not None] + [name for name, given in flags.items() if given]


def _change(options: argparse.Namespace) -> DetailRequest:
    if options.reset:
        if others := [name for name in _given(options) if name not in ("--reset", "--wait", "--timeout")]:
            raise UsageError(f"--reset returns to the settings of the script, and {others[0]} contradicts it; give one of them")
        return DetailRequest()
    if options.every is None and options.preset is None:
        raise UsageError("no change was given; add --every, --preset, --reset or --status")
    with wrong_request(ValueError):
        return detail_request.detail_request(options.every, options.preset, options.steps, options.first)


def _directory(path: str) -> Path:
    directory = directory_of(path)
    first = directory / "rank0"
    if not has_run(directory) and has_run(first):
        raise UsageError(f"in {path!r} each rank has its own run directory, and the first rank decides: name {str(first)!r}")
    return directory


def _liveness(directory: Path) -> RunStatus:
    with wrong_request(FileNotFoundError, ValueError):
        return run_status(directory)


def _session(found: RunStatus, directory: Path) -> str:
    state = state_of(found)
    if found.has_ended:
        raise UsageError("this run has ended; after it is resumed it follows its script, and a change can be requested then")
    if not state.get("session") or not state.get("listens"):
        raise UsageError(
            f"nothing reads changes in {str(directory)!r}: it was written by an earlier version of torch_gradmon, or by another rank "
            "than the first, which decides for all"
        )
    return str(state["session"])


def _last_number(found: RunStatus) -> int:
    return int(state_of(found).get("number", 0))


def _requested_number(directory: Path, last: int) -> int:
    try:
        return max(last, detail_request.read(directory / detail_request.FILE_NAME, last)[0].number)
    except (OSError, ValueError):  # an unreadable request is overwritten
        return last


def _print_unread(directory: Path, found: RunStatus) -> None:
    """Print a request that the training has not read yet."""
    try:
        change, session = detail_request.read(directory / detail_request.FILE_NAME, _last_number(found))
    except (OSError, ValueError):
        return
    if session == state_of(found).get("session") and change.number > _last_number(found) and not found.has_ended:
        print(f"requested, and not yet read by the training: {change_text(change.facts())}")


def _wait(directory: Path, change: DetailRequest, session: str, timeout: int | None) -> int:
    until = None if timeout is None else time.monotonic() + timeout
    printed: str | None = None
    has_warned = False
    while until is None or time.monotonic() < until:
        found = _liveness(directory)
        state = state_of(found)
        result = result_of(state, change, session)
        if result is not None:
            is_applied, text = result
            print(text)
            return 0 if is_applied else 1
        if state.get("number", 0) >= change.number and (why := state.get("why", "")) != printed:
            print(why or f"the training has read it: {change_text(state.get('waits') or change.facts())}")
            printed = why
        if found.looks_alive is False and not has_warned:
            print(f"{found}; Ctrl-C ends the wait, and the request stays")
            has_warned = True
        time.sleep(_PAUSE)
    print(f"it was not in force within {timeout} s; the request stays, and may still be applied")
    return 1
