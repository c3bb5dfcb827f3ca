"""Which values of two runs are compared, under which names, and how far they may be apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core import keys as n
from ...core.errors import display
from ...core.keys import Key, compile_pattern, format_key
from ...core.loss_keys import is_loss

#: Words of names by which clocks, speeds and memory are known: they differ from run to run whatever the numbers do.
_CLOCKS = frozenset(
    {"time", "second", "seconds", "secs", "sec", "ms", "elapsed", "eta", "duration", "latency", "timestamp", "walltime"}
    | {"throughput", "speed", "fps", "mfu", "tflops", "flops", "memory", "mem", "overhead"}
)
#: What detectors, counters and windows of steps give.
_WITH_MEMORY = frozenset({"spike_score", "clipped_share", "steps_not_applied", "steps_skipped", "clip_limit", "dead"})
Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@dataclass(frozen=True)
class Rules:
    """How two runs are compared.

    Attributes:
        rtol: how far two values may be apart, relative to the larger one.
        atol: how far they may be apart besides.
        tolerances: patterns with an ``rtol`` of their own; the first that is found in a key decides.
        only: patterns of which one has to be found in a key; without any, all keys are compared but those of clocks.
        ignore: patterns of which none may be found in it.
        rename: patterns in the names of the first run's tensors, with what stands in their place in the second.
        with_memory: compare values that follow from the steps before, too; runs with other steps before have others.
    """

    rtol: float = 1e-5
    atol: float = 0.0
    tolerances: tuple[tuple[re.Pattern[str], float], ...] = ()
    only: tuple[re.Pattern[str], ...] = ()
    ignore: tuple[re.Pattern[str], ...] = ()
    rename: tuple[tuple[re.Pattern[str], str], ...] = ()
    with_memory: bool = True

    @classmethod
    def of(
        cls,
        rtol: float,
        atol: float,
        tolerances: Mapping[str, float] | None,
        only: Patterns | None,
        ignore: Patterns | None,
        rename: Mapping[str, str] | None,
    ) -> Rules:
        """Check what a user gives.

        Raises:
            TypeError, ValueError: it cannot be used, with the value and the remedy.
        """
        own = _mapping("tolerances", tolerances, "{'update/': 1e-3}")
        new = _mapping("rename", rename, "{'^encoder': 'enc'}")
        return cls(
            _tolerance("rtol", rtol),
            _tolerance("atol", atol),
            tuple((compile_pattern(p, "tolerances"), _tolerance(f"tolerances[{p!r}]", v)) for p, v in own.items()),
            _patterns("only", only),
            _patterns("ignore", ignore),
            tuple((compile_pattern(p, "rename"), _replacement(p, place)) for p, place in new.items()),
        )

    def renamed(self, key: Key) -> Key:
        """The key that a value of the first run has in the second."""
        if key.source not in n.TENSOR_SOURCES and key.source not in n.NAME_SOURCES:
            return key
        name = key.name
        for pattern, place in self.rename:
            name = pattern.sub(place, name)
        return key if name == key.name else key._replace(name=name)

    def tolerance(self, key: Key, other: Key) -> float | None:
        """The relative tolerance for ``key``, which is ``other`` in the second run; None where it is not compared."""
        texts = {format_key(key), format_key(other)}
        if (not _found(self.only, texts) if self.only else self.leaves_out(key)) or _found(self.ignore, texts):
            return None
        return next((value for pattern, value in self.tolerances if _found([pattern], texts)), self.rtol)

    def leaves_out(self, key: Key) -> bool:
        """Whether a value is compared only if ``only`` asks for it."""
        return is_clock(key) or (has_memory(key) and not self.with_memory)

    def check_use(self, keys: Iterable[str], names: Iterable[str]) -> None:
        """A pattern that matches nothing is a slip of the pen, by which a comparison would pass.

        Args:
            keys: of both runs.
            names: of tensors of the first.

        Raises:
            ValueError: one is found in none of the keys, or of the names.
        """
        for argument, patterns, texts in (
            ("only", self.only, list(keys)),
            ("ignore", self.ignore, list(keys)),
            ("tolerances", [pattern for pattern, _ in self.tolerances], list(keys)),
            ("rename", [pattern for pattern, _ in self.rename], list(names)),
        ):
            for pattern in patterns:
                if not any(map(pattern.search, texts)):
                    like = f", which are such as {texts[0]!r}" if texts else ""
                    what = "name of a tensor of the first run" if argument == "rename" else "key of the two runs"
                    raise ValueError(f"{argument}: {pattern.pattern!r} is found in no {what}{like}")


def renamer(rename: Mapping[str, str] | None) -> Callable[[str], str]:
    """What a tensor or module of the first run is called in the second.

    Raises:
        TypeError, ValueError: it cannot be used, see :meth:`Rules.of`.
    """
    rules = Rules.of(0.0, 0.0, None, None, None, rename)
    return lambda name: rules.renamed(Key(n.PARAMETER, name, "")).name


def has_memory(key: Key) -> bool:
    """Whether a value follows from the monitored steps before as well."""
    return key.source == n.SPIKE_SCORE or key.metric in _WITH_MEMORY


def is_clock(key: Key) -> bool:
    """Whether a value tells of time, speed or memory.

    >>> is_clock(Key("", "tokens_per_sec", "")), is_clock(Key("", "timestep_loss", "")), is_clock(Key("gradmon", "", "overhead_pct"))
    (True, False, True)
    """
    if key.source not in ("", n.SUMMARY):
        return False
    text = format_key(key)
    return not _CLOCKS.isdisjoint(re.split(r"[^a-z]+", text.lower())) and not is_loss(key)


def _found(patterns: Iterable[re.Pattern[str]], texts: Iterable[str]) -> bool:
    return any(pattern.search(text) for pattern in patterns for text in texts)


def _patterns(argument: str, given: Patterns | None) -> tuple[re.Pattern[str], ...]:
    if given is None:
        return ()
    each = [given] if isinstance(given, (str, re.Pattern)) else given
    if not isinstance(each, Sequence):
        raise TypeError(f"{argument} must be a pattern or a list of them, got {display(given)}")
    return tuple(compile_pattern(pattern, argument) for pattern in each)


def _tolerance(argument: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument} must be a number, such as 1e-5, got {display(value)}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{argument}={value!r} must be a number of at least 0, such as 1e-5")
    return float(value)


def _mapping(argument: str, given: Mapping[str, Any] | None, example: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a dict by pattern, such as {example}, got {display(given)}")
    return given or {}


def _replacement(pattern: str, place: str) -> str:
    if not isinstance(place, str):
        raise TypeError(f"rename[{pattern!r}] must be what stands in its place (str), got {display(place)}")
    try:
        compile_pattern(pattern, "rename").sub(place, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"rename: {place!r} cannot stand in the place of {pattern!r}: {error}") from error
    return place
