"""Values as families of metrics with labels, as Prometheus and OpenTelemetry know them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..core import keys as n
from ..core.keys import parse_key
from ..step.built_ins import VIEW_BUILT_INS
from ..step.summary_keys import DOCUMENTATION, ON_REQUEST

_WHOLE = {**DOCUMENTATION, **ON_REQUEST}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


class Family(NamedTuple):
    """Metrics of one kind.

    Attributes:
        parts: of the name, such as ``("gradient", "norm")``.
        label: by which its values differ: ``tensor`` or ``key``; empty for a single value.
        help: its meaning.
        unit: ``1`` for a number without one.
    """

    parts: tuple[str, ...]
    label: str
    help: str
    unit: str

    def name(self, separator: str) -> str:
        """The whole name, in characters that both systems allow."""
        return separator.join(("gradmon", *(_NOT_IN_NAMES.sub("_", part).strip("_") for part in self.parts)))


def families(
    values: Mapping[str, float], separator: str, key_style: str = "seed", prefix: str = ""
) -> dict[str, tuple[Family, dict[str, float]]]:
    """The values by label, by the name of their family. Logged values are one family, ``logged``, with their keys as labels; a name that
    two families would have gets a number.

    Args:
        values: by key.
        separator: of the parts of a name.
        key_style, prefix: of the keys, as for the monitor.
    """
    found: dict[Family, dict[str, float]] = {}
    for text, value in values.items():
        key = parse_key(encodable(text), key_style, prefix)
        if key.source == n.SUMMARY:
            found.setdefault(Family(("model", key.metric), "", _WHOLE.get(key.metric, key.metric), _unit(key.metric)), {})[""] = (
                value
            )
        elif key.source and key.metric:
            built_in = VIEW_BUILT_INS.get(key.source, {}).get(key.metric)
            meaning = f"{key.metric} of {key.source}" if built_in is None else built_in.documentation
            family = Family((key.source, key.metric), "tensor", meaning, "1" if built_in is None else built_in.unit)
            found.setdefault(family, {})[key.name] = value
        else:
            found.setdefault(Family(("logged",), "key", "values that the script logged", "1"), {})[key.name] = value
    named: dict[str, tuple[Family, dict[str, float]]] = {}
    for family, of_label in sorted(found.items()):
        name = family.name(separator)
        number = sum(
            known == name or (known.rpartition("_")[0] == name and known.rpartition("_")[2].isdigit()) for known in named
        )
        named[f"{name}_{number + 1}" if number else name] = family, of_label
    return named


def encodable(text: str) -> str:
    """The same with escapes for half characters, which no protocol can send."""
    return text.encode("utf-8", "backslashreplace").decode()


def _unit(metric: str) -> str:
    return "%" if metric.endswith("_pct") else "1"
