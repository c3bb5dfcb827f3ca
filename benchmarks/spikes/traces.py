"""Curves with known spikes, read from a directory. ``data/README.md`` has the origin of ours and the meaning of the labels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: A gradient norm before clipping, or a training loss.
Kind = Literal["gnorm", "loss"]
KINDS: tuple[Kind, ...] = ("gnorm", "loss")

DATA = Path(__file__).parent / "data"
#: Samples that lie no farther apart belong together: spikes to one event, flags to one alarm.
GAP = 5


@dataclass(frozen=True)
class Trace:
    """One curve and its labels.

    Attributes:
        name: its name in tables.
        kind: decides which detector evaluates it.
        values: one for each sample, in the unit of the run; NaN and infinity are spikes.
        events: first and last sample of each spike, both included, in order.
        grey: samples that are not scored, since people would not agree on them.
    """

    name: str
    kind: Kind
    values: tuple[float, ...]
    events: tuple[tuple[int, int], ...] = ()
    grey: frozenset[int] = frozenset()


def groups(indices: Iterable[int], gap: int = GAP) -> list[list[int]]:
    """Rising ``indices``, split wherever two neighbours are more than ``gap`` apart."""
    found: list[list[int]] = []
    for index in indices:
        if found and index - found[-1][-1] <= gap:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def load(directory: Path = DATA) -> list[Trace]:
    """All traces of a directory that have labels, by name.

    ``labels/NAME.json`` goes with ``NAME.csv`` or ``NAME.csv.gz``, whose columns are ``step,value``. Of the labels ``kind``,
    ``n`` (samples), ``spike_index`` and ``grey_index`` (first and last sample of each range) are read.

    Raises:
        ValueError: there are no labels, or they do not fit their curve.
    """
    found = [_read(path) for path in sorted((directory / "labels").glob("*.json"))]
    if not found:
        raise ValueError(
            f"{directory} has no labels/*.json: give a directory of the same layout as {DATA.name}/ of this benchmark"
        )
    return found


def _read(path: Path) -> Trace:
    label = json.loads(path.read_text(encoding="utf-8"))
    values = _values(path.parent.parent / f"{path.stem}.csv")
    if label["kind"] not in KINDS:
        raise ValueError(f"{path.name}: kind must be one of {', '.join(KINDS)}, got {label['kind']!r}")
    if label["n"] != len(values):
        raise ValueError(f"{path.name} is for {label['n']} samples, and the curve has {len(values)}")
    events = tuple((group[0], group[-1]) for group in groups(label["spike_index"]))
    grey = frozenset(index for first, last in label["grey_index"] for index in range(first, last + 1))
    if any(not 0 <= index < len(values) for event in events for index in event):
        raise ValueError(f"{path.name} has a spike outside of its curve")
    return Trace(path.stem, label["kind"], values, events, grey)


def _values(path: Path) -> tuple[float, ...]:
    text = path.read_text(encoding="utf-8") if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes()).decode()
    head, *rows = text.split()
    if head != "step,value":
        raise ValueError(f"{path.name} must begin with step,value, got {head[:40]!r}")
    return tuple(float(row.partition(",")[2]) for row in rows)
