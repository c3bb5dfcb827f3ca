"""A live change of detail: what it says, in words, in a file, and in the few numbers by which ranks tell it to each other."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import validation as check
from ..core.errors import display
from ..step.presets import PRESETS

#: Beside the run's own file. ``gradmon detail`` writes it whole, under another name, and renames it.
FILE_NAME = "tune.json"
FORMAT = 1
#: No file of ours is larger than this, in bytes.
_LARGEST_FILE = 4096
#: Numbers up to this one are exact in float64, in which they travel between ranks.
_LARGEST = 2**53
_PRESETS = tuple(PRESETS)


@dataclass(frozen=True)
class DetailRequest:
    """What is to be measured, and how often, for a while. One that names neither a cadence nor a preset goes back to the script's.

    Attributes:
        every: monitor the steps that are divisible by it; None for the script's own cadence.
        preset: measure what it stands for, in place of the script's preset; None for that one.
        steps: for so many steps of training; None until further notice.
        first: not before the step of that number; None from the next one on.
        number: grows from one change of a run to the next.
    """

    every: int | None = None
    preset: str | None = None
    steps: int | None = None
    first: int | None = None
    number: int = 0

    @property
    def is_reset(self) -> bool:
        """Whether it goes back to what the script asked for."""
        return self.every is None and self.preset is None

    def facts(self) -> dict[str, Any]:
        """What it says, without what it leaves open."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def numbers(self) -> tuple[float, ...]:
        """The same as five numbers that are exact in float64; the first one is never zero."""
        preset = 0 if self.preset is None else 1 + _PRESETS.index(self.preset)
        first = 0 if self.first is None else 1 + self.first
        return tuple(map(float, (self.number, self.every or 0, preset, self.steps or 0, first)))

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> DetailRequest:
        """The inverse of :meth:`numbers`."""
        number, every, preset, steps, first = map(int, numbers)
        return cls(every or None, _PRESETS[preset - 1] if preset else None, steps or None, first - 1 if first else None, number)


def detail_request(
    every: object = None, preset: object = None, steps: object = None, first: object = None, number: object = 0
) -> DetailRequest:
    """A change of these arguments.

    Raises:
        ValueError: one of them is not what it should be.
    """
    for name, value in (("every", every), ("steps", steps)):
        if value is not None:
            check.positive_int(name, value)
    if preset is not None:
        check.one_of("preset", preset, _PRESETS)
    for name, value in (("from_step", first), ("number", number)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 0")
    for name, value in (("every", every), ("steps", steps), ("from_step", first), ("number", number)):
        if isinstance(value, int) and value >= _LARGEST:
            raise ValueError(f"{name}={display(value)} is too large; no training has that many steps")
    return DetailRequest(every, preset, steps, first, number)  # type: ignore[arg-type]


def request_text(facts: Mapping[str, Any]) -> str:
    """What :meth:`DetailRequest.facts` or the context of a record says, for people.

    >>> in_words({"every": 1, "preset": "full", "steps": 200, "number": 3})
    'every step, preset full, for 200 steps'
    """
    words = []
    if (every := facts.get("every")) is not None:
        words.append("every step" if every == 1 else f"steps divisible by {every}")
    if (preset := facts.get("preset")) is not None:
        words.append(f"preset {preset}")
    if not words:
        words.append("what the script asked for")
    if (steps := facts.get("steps")) is not None:
        words.append(f"for {steps} step{'s' if steps > 1 else ''}")
    if (first := facts.get("first")) is not None:
        words.append(f"from step {first} on")
    return ", ".join(words)


# --- the file ----------------------------------------------------------------------------------------------------------------------


def write(directory: Path, change: DetailRequest, session: str) -> None:
    """Put ``change`` into the run directory, for the monitor that calls itself ``session``; whoever reads sees all of it or nothing.

    Raises:
        OSError: it could not be written.
    """
    text = json.dumps({"format": FORMAT, "session": session, **change.facts()}) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=directory)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # the training may run under another account
        os.replace(name, directory / FILE_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> tuple[DetailRequest, str]:
    """What a file says, and to which session. Never waits, whatever the file is.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what :func:`write` writes; the message says what is wrong, in one line.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe in its place would wait for somebody to write
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no ordinary file")
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"it is larger than {_LARGEST_FILE} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {' '.join(str(error).split())[:80]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds {display(found)} and no object")
    if found.get("format") != FORMAT:
        raise ValueError(f"its format is {display(found.get('format'))}, expected {FORMAT}")
    if not isinstance(session := found.get("session"), str):
        raise ValueError(f"its session is {display(session)}")
    unknown = found.keys() - {"format", "session", *vars(DetailRequest())}
    if unknown:
        raise ValueError(f"it says {display(sorted(unknown))}, which is not known")
    change = detail_request(**{name: value for name, value in found.items() if name not in ("format", "session")})
    if not change.number:
        raise ValueError("it has no number")
    return change, session


def numbered(change: DetailRequest, number: int) -> DetailRequest:
    """The same under another number."""
    return replace(change, number=number)
