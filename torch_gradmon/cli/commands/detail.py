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
from ...runs.format import directory_of, is_run
from ...runs.liveness import run_status
from .common import UsageError, wrong_request

#: Seconds between two checks whether a change was applied.
_PAUSE = 0.2


class _Training:
    """A training, as its run directory shows it now; ``state`` is what its monitor has written about changes."""

    def __init__(self, directory: Path) -> None:
        with wrong_request(FileNotFoundError, ValueError):
            self.status = run_status(directory)
        meta = self.status.meta
        self.directory, self.every = directory, meta.get("every")
        self.state: Mapping[str, Any] = meta.get("tune", {})
        self.number = int(self.state.get("number", 0))  # of the last change that it has read
        cadence = "the steps of monitor_step_fn" if self.every is None else request_text({"every": self.every})
        self.script = cadence if meta.get("preset") is None else f"{cadence}, preset {meta['preset']}"

    def request(self) -> tuple[DetailRequest, str] | None:
        """The last request, and the session that it is addressed to; None if there is none that can be read."""
        try:
            return detail_request.read(self.directory / detail_request.FILE_NAME, self.number)
        except (OSError, ValueError):  # an unreadable request is overwritten
            return None

    def session(self) -> str:
        """The session that reads changes. Raises UsageError if nothing does."""
        if self.status.has_ended:
            raise UsageError("this run has ended; after it is resumed it follows its script, and a change can be requested then")
        if not self.state.get("session") or not self.state.get("listens"):
            raise UsageError(
                f"nothing reads changes in {str(self.directory)!r}: it was written by an earlier version of torch_gradmon, or by another "
                "rank than the first, which decides for all"
            )
        return str(self.state["session"])


def run(options: argparse.Namespace) -> int:
    """Request the change, or print the status; returns 1 if a change was waited for and not applied."""
    if options.status and _given(options):
        raise UsageError("--status changes nothing, and excludes all other options")
    if options.timeout is not None and not options.wait:
        raise UsageError("--timeout is the limit of --wait; give both")
    change = None if options.status else _change(options)
    found = _Training(_directory(options.run))
    print(found.status)
    if change is None:
        print("\n".join(_status_lines(found)))
        return 0
    session, last = found.session(), found.request()
    change = replace(change, number=1 + max(found.number, 0 if last is None else last[0].number))
    state = found.state.get("in_force")
    print(f"until now: {f'{found.script}, as in the script' if state is None else _text(state)}")
    detail_request.write(found.directory, change, session)
    print(f"requested, number {change.number}: {request_text(change.facts())}")
    if waits := found.state.get("waits"):
        print(f"it replaces one that was not in force yet: {_text(waits)}")
    for warning in _warnings(change, found):
        print(warning)
    if options.wait:
        return _wait(found.directory, change, session, options.timeout)
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
    has_run, has_ranks = (is_run(path.name for path in each.glob("*")) for each in (directory, first))
    if has_ranks and not has_run:
        raise UsageError(f"in {path!r} each rank has its own run directory, and the first rank decides: name {str(first)!r}")
    return directory


def _text(change: Mapping[str, Any]) -> str:
    """A change, and the steps in which it is in force."""
    parts = [f"{request_text({**change, 'first': None})} (number {change['number']})"]
    since, until = change.get("since"), change.get("until")
    if since is not None:
        parts.append(f"from step {since} {'on' if until is None else f'to {until}'}")
    elif change.get("first") is not None:
        parts.append(f"not before step {change['first']}")
    if change.get("ended"):
        parts.append(change["ended"])
    return "; ".join(parts)


def _status_lines(found: _Training) -> Iterator[str]:
    state = found.state
    yield f"the script: {found.script}"
    for name, title in (("in_force", "in force"), ("waits", "requested and not yet in force"), ("last", "the last one")):
        if state.get(name):
            yield f"{title}: {_text(state[name])}"
    if state.get("why"):
        yield state["why"]
    if found.status.has_ended:
        return
    if not state.get("listens"):
        yield "nothing reads changes here: another rank than the first, or an earlier version of torch_gradmon, wrote this run"
    elif not (state.get("in_force") or state.get("waits")):
        yield "only the settings of the script are in force"
    if (last := found.request()) is not None and last[1] == state.get("session") and last[0].number > found.number:
        yield f"requested, and not yet read by the training: {_text(last[0].facts())}"


def _warnings(change: DetailRequest, found: _Training) -> Iterator[str]:
    status, every = found.status, change.every or found.every
    if change.first is not None and status.step is not None and change.first <= status.step:
        yield f"step {change.first} is over, so the change begins with the next step"
    if not change.is_reset and change.every is None:
        yield f"without --every the cadence stays that of the script: {found.script}"
    if not change.is_reset and change.steps is not None and every is not None and every > change.steps:
        yield f"possibly none of {change.steps} steps in a row is divisible by {every}; then nothing is measured"
    if status.looks_alive is False:
        yield "if the run was killed, it will not read the change; a resumed run does what its script requests"


def _result(found: _Training, change: DetailRequest, session: str) -> tuple[bool, str] | None:
    """Whether the change was applied, and the reason; None if that is still open."""
    state, number = found.state, found.number
    for name, title in (("in_force", "in force"), ("last", "applied")):
        known = state.get(name) or {}
        if state.get("session") == session and known.get("number", 0) >= change.number and known.get("since") is not None:
            if known["number"] > change.number or {**known, **change.facts()} != known:  # two requests at once: one wins
                return False, f"another change replaced it: {_text(known)}"
            return True, f"{title}: {_text(known)}"
    if state.get("session") != session or state.get("ended"):
        return False, "it was not applied: the run has ended"
    if number > change.number or (number == change.number and not state.get("waits")):
        return False, f"it was not applied: {state.get('why') or 'another change replaced it'}"
    return None


def _wait(directory: Path, change: DetailRequest, session: str, timeout: int | None) -> int:
    until = None if timeout is None else time.monotonic() + timeout
    printed: str | None = None
    has_warned = False
    while until is None or time.monotonic() < until:
        found = _Training(directory)
        if (result := _result(found, change, session)) is not None:
            print(result[1])
            return 0 if result[0] else 1
        if found.number >= change.number and (why := found.state.get("why", "")) != printed:
            print(why or f"the training has read it: {_text(found.state.get('waits') or change.facts())}")
            printed = why
        if found.status.looks_alive is False and not has_warned:
            print(f"{found.status}; Ctrl-C ends the wait, and the request stays")
            has_warned = True
        time.sleep(_PAUSE)
    print(f"it was not in force within {timeout} s; the request stays, and may still be applied")
    return 1
