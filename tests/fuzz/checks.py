"""Compares what a monitor said with what is true."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_gradmon import load_run

from . import reasons, remarks
from .oracle import Expected, Key, logged, norm_of
from .program import Program
from .rules import FUSED
from .truth import Record, Truth
from .watcher import Seen
from .whole_model import expected, rows, shown

#: Values that have no oracle: of clocks, and scores of a rule that has tests of its own.
UNJUDGED = re.compile(r"gradmon/(overhead_fraction|spike_score)$|spike_score/|RCC ")


def values(p: Program, record: Record, seen: Seen) -> Iterator[str]:
    """Numbers, staleness and reasons: everything that was read at some time."""
    steps = sorted(seen.history)
    yield from _steps(p, record, seen, steps)
    monitored = [record.steps[number] for number in steps if number in record.steps]
    truths = {each.number: each for each in monitored}
    known = {
        number: expected(p, record, truth, [each for each in monitored if each.number <= number])
        for number, truth in truths.items()
    }
    for number, found in seen.history.items():
        if number in known:
            yield from _numbers(p, known[number], found, f"history of step {number}")
            yield from _promised(p, known[number], found, f"history of step {number}")
    for number, found in seen.rows:
        if number in known:
            yield from _numbers(p, known[number], found, f"sink, step {number}")
    for poll, (true_step, so_far) in zip(seen.polls, record.polls, strict=True):
        if poll.step != true_step:
            yield f"last_step is {poll.step} where step {true_step} has ended last"
        elif poll.values and poll.step in known:
            known_then = {key: number for key, number in known[poll.step].items() if key.source} | logged(so_far)
            yield from _numbers(p, known_then, poll.values, f"poll of step {poll.step}")
            yield from _top(p, truths[poll.step], poll.top)
            earlier = [each for each in monitored if each.number <= poll.step]
            yield from _missing(p, record, known_then, poll.values, poll.missing, truths[poll.step], earlier)
        elif poll.values:
            yield f"values were given for step {poll.step}, which is not monitored: {sorted(poll.values)[:3]}"


def _steps(p: Program, record: Record, seen: Seen, steps: Sequence[int]) -> Iterator[str]:
    """Every step that is monitored has a record, and no other one."""
    wanted = [number for number, truth in record.steps.items() if number % p.every == 0 or truth.tuned]
    lost = [number for number in wanted if number not in steps] if not p.max_overhead else []
    phantoms = [number for number in steps if number not in record.steps]
    extra = [number for number in steps if number not in wanted and number in record.steps]
    if lost:
        yield f"steps {lost} have no record"
    if phantoms:
        yield f"steps {phantoms} have a record and never were"
    if extra and not (p.preset != "none" and p.post_spike_steps):
        yield f"steps {extra} have a record and are not monitored"


def _numbers(p: Program, known: Expected, found: dict[str, float], where: str) -> Iterator[str]:
    by_text = {key.text(p): (key, number) for key, number in known.items()}
    wrong = []
    for text, value in found.items():
        if type(value) is not float:
            wrong.append(f"{where}: {text} is {value!r}, no float")
        elif text in by_text and not by_text[text][1].fits(value):
            true = by_text[text][1]
            wrong.append(f"{where}: {text} is {value!r}, should be {'absent' if true.value is None else repr(true.value)}")
        elif text not in by_text and not UNJUDGED.search(text):
            wrong.append(f"{where}: {text} = {value!r} was never asked for")
    yield from wrong


def _top(p: Program, truth: Truth, top: list[tuple[str, float]]) -> Iterator[str]:
    squares = {p.name(name): norm_of([t]).value ** 2 for name, t in truth.before.items()}  # type: ignore[operator]
    total = sum(squares.values())
    for name, share in top:
        if not abs(share - squares.get(name, 0.0) / total) <= 1e-6 * share:
            yield f"step {truth.number}: top_parameters says {share} of {name}, should be {squares.get(name, 0.0) / total}"


def _promised(p: Program, known: Expected, found: dict[str, float], where: str) -> Iterator[str]:
    lost = [
        f"{where}: {key.text(p)} is absent, should be {n.value!r}"
        for key, n in known.items()
        if n.value is not None and n.promised and key.text(p) not in found
    ]
    yield from lost


def _missing(
    p: Program,
    record: Record,
    known: Expected,
    found: dict[str, float],
    missing: dict[str, str],
    truth: Truth,
    earlier: Sequence[Truth],
) -> Iterator[str]:
    where, wrong = f"step {truth.number}", []
    by_text = {key.text(p): key for key in known}
    for text, reason in missing.items():
        if "RCC " in text:
            continue
        key = by_text.get(text) or _unjudged(p, truth, text)
        if text in found:
            wrong.append(f"{where}: {text} is there and missing ({reason})")
        elif key is None:
            wrong.append(f"{where}: {text} is called missing and was never asked for ({reason})")
        elif (truly := _holds(reason, reasons.Case(p, record, truth, earlier, key))) is not True:
            wrong.append(f"{where}: {text} is missing, and the reason is {'unknown' if truly is None else 'untrue'}: {reason}")
    for key in known:
        is_asked = (
            known[key].promised
            and key.metric
            and not truth.tuned
            and not key.source.startswith("attention")
            and not _is_inside(key.name)
        )
        if is_asked and key.text(p) not in found and key.text(p) not in missing:
            wrong.append(f"{where}: {key.text(p)} is neither there nor missing")
    yield from wrong


def _holds(reason: str, case: reasons.Case) -> bool | None:
    members = dict(rows(case.p, case.record)).get(case.key.name, []) if case.p.layers else []
    if case.key.source not in ("gradient_before_clip", "update") or case.key.name in case.record.names or not members:
        return reasons.is_true(reason, case)
    return reasons.is_true_of_layers(reason, case, members)


def _is_inside(name: str) -> bool:
    """Whether it is a tensor in a container, for which its module stands."""
    return "[" in name or ".head_" in name or name.endswith((".each", ".last"))


def _unjudged(p: Program, truth: Truth, text: str) -> Key | None:
    names = {Key("gradmon", "", name).text(p): Key("gradmon", "", name) for name in shown(p, truth)}
    return names.get(text)


def said(
    p: Program, record: Record, seen: Seen, told: Sequence[warnings.WarningMessage], plain: Sequence[warnings.WarningMessage]
) -> Iterator[str]:
    """Each warning must be true; what the loop brings about without a monitor is none of ours."""
    theirs = {str(each.message)[:60] for each in plain}  # what follows may be a stack
    for each in told:
        message = str(each.message)
        if message[:60] not in theirs and (truly := remarks.is_true(message, p, record)) is not True:
            yield f"{'an unknown' if truly is None else 'an untrue'} warning: {message}"
    for finding in seen.findings:
        if (fact := remarks.FINDINGS.get(finding.rule)) is not None and not fact(p):
            yield f"an untrue finding: {finding.rule}, {finding.cause}"
    if any(b"torch_gradmon" in pickled for pickled in seen.saved):
        yield "a model that was saved while it is watched has something of the monitor in it"
    attempts = [truth for truth in record.steps.values() if truth.stepped]
    true = len(attempts), sum(truth.applied for truth in attempts)
    # what a fused optimizer refuses stays on the device until a step is monitored
    late = p.scaler and p.optimizer in FUSED and (p.every > 1 or bool(p.max_overhead))
    if p.attached and (seen.counts.attempted, seen.counts.applied) != true and not (late or p.has_event("raise_closure")):
        yield f"counts are {seen.counts}, of {true[0]} attempts {true[1]} were applied"


def stored(p: Program, seen: Seen, record: Record, place: Path) -> Iterator[str]:
    """What the run directory has is what was in memory, and what it has besides is true."""
    run = load_run(place)
    try:
        if (there := [step for step in run.steps if step in seen.history]) != sorted(seen.history):
            yield f"the run directory has the steps {there}, and in memory are {sorted(seen.history)}"
        wrong = []
        for text in {text for found in seen.history.values() for text in found} if not p.style else ():
            series = run.series(text)
            for step, found in seen.history.items():
                # what is promised of a standard deviation far below the mean
                more = 3e-7 * found.get(text[:-3] + "norm", 0.0) if text.endswith("/std") else 0.0
                beyond = abs(found.get(text, 0.0)) > _LARGEST  # in the run directory it is infinite
                if text in found and not beyond and not _same(found[text], series.get(step), more):
                    wrong.append(f"run directory: {text} of step {step} is {series.get(step)!r}, in memory {found[text]!r}")
        yield from sorted(wrong)
    finally:
        run.close()


#: Of what a run directory has of tensors, in float32.
_LARGEST = 3.4028234663852886e38


def _same(one: float, other: float | None, more: float) -> bool:
    if other is None:
        return False
    return str(one) == str(other) or abs(one - other) <= 1e-6 * abs(one) + more


def alive(seen: Seen) -> Iterator[str]:
    """Nothing lives that was dropped."""
    for reference in seen.alive:
        if (what := reference()) is not None:
            yield f"a {type(what).__name__} is still alive"


__all__: list[Any] = ["alive", "said", "stored", "values"]
