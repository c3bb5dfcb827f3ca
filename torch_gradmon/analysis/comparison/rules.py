"""Which values of two runs are compared, under which names, and with which tolerances."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core import keys as n
from ...core.errors import display
from ...core.keys import Key, compile_pattern, format_key
from ...core.records import is_loss

#: Words in the names of clocks, speeds and memory, which differ from run to run.
_CLOCKS = frozenset(
    {"time", "second", "seconds", "secs", "sec", "ms", "elapsed", "eta", "duration", "latency", "timestamp", "walltime"}
    | {"throughput", "speed", "fps", "mfu", "tflops", "flops", "memory", "mem", "overhead"}
)
#: Values that follow from earlier steps.
_WITH_MEMORY = frozenset({"spike_score", "clipped_share", "steps_not_applied", "steps_skipped", "clip_limit", "dead"})
Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@dataclass(frozen=True)
class Rules:
    """How two runs are compared.

    Attributes:
        rtol: tolerated difference relative to the larger value.
        atol: tolerated absolute difference, added to that.
        tolerances: patterns with their own ``rtol``; the first one found in a key decides.
        only: a key must match one of these patterns; without any, all keys except those of clocks are compared.
        ignore: a key must match none of these patterns.
        rename: patterns in the names of the first run's tensors, with their replacements in the second.
        with_memory: whether to compare values that follow from earlier steps, which differ if the runs have other earlier steps.
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
        """Check the arguments of a user.

        Raises:
            TypeError, ValueError: with the value and the remedy.
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
        """The key in the second run of a value of the first run."""
        if key.source not in n.TENSOR_SOURCES and key.source not in n.NAME_SOURCES:
            return key
        name = key.name
        for pattern, place in self.rename:
            name = pattern.sub(place, name)
        return key if name == key.name else key._replace(name=name)

    def tolerance(self, key: Key, other: Key) -> float | None:
        """The relative tolerance for ``key``, which is ``other`` in the second run; None if it is not compared."""
        texts = {format_key(key), format_key(other)}
        if (not _found(self.only, texts) if self.only else self.leaves_out(key)) or _found(self.ignore, texts):
            return None
        return next((value for pattern, value in self.tolerances if _found([pattern], texts)), self.rtol)

    def leaves_out(self, key: Key) -> bool:
        """Whether a value is compared only if ``only`` asks for it."""
        return is_clock(key) or (has_memory(key) and not self.with_memory)

    def check_use(self, keys: Iterable[str], names: Iterable[str]) -> None:
        """Refuse a pattern that matches nothing: after a typo, a comparison would pass.

        Args:
            keys: of both runs.
            names: of tensors of the first run.

        Raises:
            ValueError: a pattern is found in none of the keys, or names.
        """
        for argument, patterns, texts in (
            ("only", self.only, list(keys)),
            ("ignore", self.ignore, list(keys)),
            ("tolerances", [pattern for pattern, _ in self.tolerances], list(keys)),
            ("rename", [pattern for pattern, _ in self.rename], list(names)),
        ):
            for pattern in patterns:
                if not any(map(pattern.search, texts)):
                    like = f"; one of them is {texts[0]!r}" if texts else ""
                    what = "name of a tensor of the first run" if argument == "rename" else "key of the two runs"
                    raise ValueError(f"{argument}: {pattern.pattern!r} matches no {what}{like}")


def renamer(rename: Mapping[str, str] | None) -> Callable[[str], str]:
    """The function from the name of a tensor or module in the first run to that in the second.

    Raises:
        TypeError, ValueError: ``rename`` is wrong, see :meth:`Rules.of`.
    """
    rules = Rules.of(0.0, 0.0, None, None, None, rename)
    return lambda name: rules.renamed(Key(n.PARAMETER, name, "")).name


def has_memory(key: Key) -> bool:
    """Whether a value follows from earlier monitored steps as well."""
    return key.source == n.SPIKE_SCORE or key.metric in _WITH_MEMORY


def is_clock(key: Key) -> bool:
    """Whether a value is a time, a speed or an amount of memory.

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
        raise TypeError(f"rename[{pattern!r}] must be its replacement (str), got {display(place)}")
    try:
        compile_pattern(pattern, "rename").sub(place, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"rename: {place!r} cannot replace {pattern!r}: {error}") from error
    return place
