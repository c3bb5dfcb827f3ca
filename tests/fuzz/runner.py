"""Runs one program three times, and says what is wrong; makes a program that fails as small as it can be."""

from __future__ import annotations

import gc
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..loops import differences
from . import checks, drawing
from .loop import Loop
from .observer import Observer
from .program import Program
from .recorder import Recorder
from .rules import excluded
from .surroundings import SEEING
from .watcher import Watcher

Warned = list[warnings.WarningMessage]


def problems(p: Program, leaks: bool = False) -> list[str]:
    """What is wrong with the monitor in this program; nothing if all is well."""
    with tempfile.TemporaryDirectory() as place:
        return _told_once(_problems(p, Path(place), leaks))


def _told_once(found: Iterator[str]) -> list[str]:
    """Problems that differ in numbers only are one."""
    kinds: dict[str, list[str]] = {}
    for problem in found:
        kinds.setdefault(kind_of(problem), []).append(problem)
    return [same[0] + (f"  ({len(same)} like it)" if len(same) > 1 else "") for same in kinds.values()]


def kind_of(problem: str) -> str:
    """What problems of one kind have in common: not where they were seen, and no numbers."""
    return re.sub(r"[-\d.e+]+|nan|inf", "", problem.partition(": ")[2].partition(" is ")[0] or problem)


def _problems(p: Program, place: Path, leaks: bool) -> Iterator[str]:
    bare, plain, error = _run(p, Observer(), catch=p.surroundings == "anomaly")
    if error:
        return  # it diverges, which anomaly mode does not let pass
    if p.on_spike == "skip" and not all(bool(q.isfinite().all()) for q in bare["parameters"].values()):
        return  # it diverges, and steps that are not finite are skipped
    recorder = Recorder()
    sees = p.surroundings in SEEING
    recorded = bare if sees else _run(p, recorder)[0]
    if different := differences(bare, recorded):
        raise AssertionError(f"the recorder changes what it records: {different}")
    watcher = Watcher(place)
    watched, told, error = _run(p, watcher, catch=True)
    if error:
        yield f"with a monitor the loop raises: {error}"
        return
    if different := differences(bare, watched):
        yield f"training is changed: {', '.join(different[:8])}"
    if not sees:
        yield from checks.values(p, recorder.record, watcher.seen)
        yield from checks.said(p, recorder.record, watcher.seen, told, plain)
    if p.run_dir:
        yield from checks.stored(p, watcher.seen, recorder.record, place / "run")
    if leaks and p.players != "in_backward":  # whose own hooks keep it alive
        del watched, bare, recorded, told
        watcher.loop = None  # type: ignore[assignment]
        gc.collect()
        yield from checks.alive(watcher.seen)


def _run(p: Program, observer: Observer, catch: bool = False) -> tuple[dict[str, Any], Warned, str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return Loop(p, observer).run(), told, ""
        except Exception:
            if not catch:
                raise
            return {}, told, traceback.format_exc(limit=-5)


def smaller(p: Program, fails: Callable[[Program], bool]) -> Program:
    """The plainest program that still ``fails``: one choice after the other is taken back."""
    while True:
        candidates = [q for q in [*drawing.plainer(p), *_shorter(p)] if not excluded(q)]
        found = next((q for q in candidates if fails(q)), None)
        if found is None:
            return p
        p = found


def _shorter(p: Program) -> list[Program]:
    last = max((at for at, _ in p.events), default=0) + 1
    return [
        replace(p, steps=steps) for steps in dict.fromkeys((1, p.steps // 2, p.steps - 1)) if last <= steps < p.steps and steps
    ]
