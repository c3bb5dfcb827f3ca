"""A request for a live change of detail: as text, as a file, and as the numbers that ranks exchange."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import validation as check
from ..core.errors import display
from ..core.files import opened, replacing
from ..step.planner import PRESETS

#: In the run directory. ``gradmon detail`` writes a temporary file and renames it.
FILE_NAME = "tune.json"
FORMAT = 1
#: Upper bound of the file's size, in bytes.
_LARGEST_FILE = 4096
#: Numbers below this are exact in float64, which ranks exchange.
_LARGEST = 2**53
#: A number that is higher above the last one would leave none for later requests.
_AHEAD = 1000
_PRESETS = tuple(PRESETS)


@dataclass(frozen=True)
class DetailRequest:
    """What to measure, and how often, for a while. Without a cadence and a preset it restores the script's settings."""

    every: int | None = None  # monitor steps divisible by it; None for the script's cadence
    preset: str | None = None  # replaces the script's preset; None keeps it
    steps: int | None = None  # duration in training steps; None until further notice
    first: int | None = None  # the first step to which it applies; None for the next one
    number: int = 0  # increases with each request of a run

    @property
    def is_reset(self) -> bool:
        return self.every is None and self.preset is None

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def numbers(self) -> tuple[float, ...]:
        """Five numbers, exact in float64, for the exchange between ranks; the first is never zero."""
        preset = 0 if self.preset is None else 1 + _PRESETS.index(self.preset)
        first = 0 if self.first is None else 1 + self.first
        return tuple(map(float, (self.number, self.every or 0, preset, self.steps or 0, first)))

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> DetailRequest:
        number, every, preset, steps, first = map(int, numbers)
        return cls(every or None, _PRESETS[preset - 1] if preset else None, steps or None, first - 1 if first else None, number)


def detail_request(
    every: object = None, preset: object = None, steps: object = None, first: object = None, number: object = 0
) -> DetailRequest:
    """A validated request. Raises ValueError if an argument is invalid."""
    if preset is not None:
        check.one_of("preset", preset, _PRESETS)
    for name, value in (("every", every), ("steps", steps), ("first", first), ("number", number)):
        if value is None:
            continue
        if name in ("every", "steps"):
            check.positive_int(name, value)
        elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 0")
        if isinstance(value, int) and value >= _LARGEST:
            raise ValueError(f"{name}={display(value)} is too large; no training has that many steps")
    return DetailRequest(every, preset, steps, first, number)  # type: ignore[arg-type]


def request_text(facts: Mapping[str, Any]) -> str:
    """Describe :meth:`DetailRequest.facts`, or the same facts from the context of a record.

    >>> request_text({"every": 1, "preset": "full", "steps": 200, "number": 3})
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


def write(directory: Path, request: DetailRequest, session: str) -> None:
    """Write ``request`` atomically into the run directory, addressed to the monitor ``session``. Raises OSError."""
    text = json.dumps({"format": FORMAT, "session": session, **request.facts()}) + "\n"
    with replacing(directory / FILE_NAME) as file:
        file.write(text.encode())


def read(path: Path, last: int = 0) -> tuple[DetailRequest, str]:
    """The request in a file, and the session it is addressed to; ``last`` is the number of the last one that the training has read.

    Never blocks, whatever the file is. Raises OSError, and ValueError, with the reason in one line, if it is not a file of :func:`write`.
    """
    handle = opened(path)  # a link may lead to what is nobody's business
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is not a regular file")
        owner = os.fstat(handle).st_uid
        if owner not in (0, user := getattr(os, "geteuid", lambda: owner)()):
            raise ValueError(f"user {owner} made it, and the training is of user {user}")
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"it is larger than {_LARGEST_FILE} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {' '.join(str(error).split())[:80]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    if found.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    if not isinstance(session := found.get("session"), str):
        raise ValueError("its session is no text")
    unknown = found.keys() - {"format", "session", *vars(DetailRequest())}
    if unknown:
        raise ValueError("it has unknown fields")
    request = detail_request(**{name: value for name, value in found.items() if name not in ("format", "session")})
    if not request.number:
        raise ValueError("it has no number")
    if request.number > last + _AHEAD:
        raise ValueError(f"its number {request.number} is far above that of the last one, {last}")
    return request, session


#: Seconds between two looks at the file.
PERIOD = 1.0


class RequestFile:
    """Checks ``tune.json`` at most once a second, and reads it only if it has changed.

    An invalid file does not stop training. Requests for an earlier monitor have another ``session``, and are ignored.
    """

    def __init__(
        self,
        directory: Path,
        session: str,
        warn: Callable[[str, str], None],
        is_ours: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._session = directory / FILE_NAME, session
        self._warn, self._is_ours, self._clock = warn, is_ours, clock
        self.due = clock()
        self._seen: tuple[int, ...] | None = None
        self._last = DetailRequest()

    def look(self) -> DetailRequest | None:
        now = self._clock()
        if now < self.due:
            return None
        self.due = now + PERIOD
        if not self._is_ours():
            return None
        try:
            there, before = os.stat(self._path), self._seen
            self._seen = there.st_mtime_ns, there.st_size, there.st_ino
            if self._seen == before:
                return None
            found, session = read(self._path, self._last.number)
        except (FileNotFoundError, NotADirectoryError):
            self._seen = None
            return None
        except (OSError, ValueError) as error:
            # only the error's text: strict monitors re-raise an error, but training is not responsible for this file
            self._warn("tune:file", f"{self._path} is ignored, and training continues unchanged: {error}")
            return None
        if session == self._session and found.number >= self._last.number and found != self._last:
            self._last = found
            return found
        return None
