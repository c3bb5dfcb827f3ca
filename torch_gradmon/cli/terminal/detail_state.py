"""The state of a live change of detail, as ``gradmon detail`` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...runs.detail_request import DetailRequest, request_text
from ...runs.liveness import RunStatus


def state_of(found: RunStatus) -> Mapping[str, Any]:
    """The state that the monitor has written into its run."""
    state: Mapping[str, Any] = found.meta.get("tune", {})
    return state


def script_text(found: RunStatus) -> str:
    """The cadence and the preset of the script."""
    every, preset = found.meta.get("every"), found.meta.get("preset")
    cadence = "the steps of monitor_step_fn" if every is None else request_text({"every": every})
    return cadence if preset is None else f"{cadence}, preset {preset}"


def current_text(found: RunStatus) -> str:
    """What is measured now."""
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
    """What is in force, and what was requested."""
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
    """Effects of a change that may be unexpected."""
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
