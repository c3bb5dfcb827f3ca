"""One table with a column for each contender, and longer texts below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .cost import AIM, LAYERS
from .traces import KINDS

Result = Mapping[str, Any]
#: One contender's results to a cell.
Cell = Callable[[Result], str]
NONE = "-"


def table(result: Result) -> Iterator[str]:
    """The lines of the table."""
    contenders = result["contenders"]
    rows: list[tuple[str, list[str]]] = [("", list(contenders))]
    rows += [(label, [cell(each) for each in contenders.values()] if cell else []) for label, cell in _rows(result)]
    first = max(len(label) for label, cells in rows if cells)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows if cells), strict=True)]
    for label, cells in rows:
        yield "  ".join([label.ljust(first), *map(str.rjust, cells, widths)]).rstrip()


def _rows(result: Result) -> Iterator[tuple[str, Cell | None]]:
    """Label and cell of each row; a title has no cell."""
    for kind in KINDS:
        counted = result["traces"][kind]
        if counted["count"]:
            yield f"{kind}: {counted['count']} traces, {counted['samples']:,} samples, {counted['events']} spikes", None
            yield from ((label, _of_kind(kind, cell)) for label, cell in _TOTALS)
    yield f"clean scenarios, {result['seeds']} signals each: false alarms / flagged steps", None
    yield from ((f"  {name}", _clean(name)) for name in result["scenarios"]["clean"])
    yield "spiked scenarios: recall + false alarms", None
    yield from ((f"  {name}", _spiked(name)) for name in result["scenarios"]["spiked"])
    yield "steps from a ramp's start to the flag: median, most", None
    yield from ((f"  {name}", _delay(name)) for name in result["scenarios"]["ramps"])
    yield "invariants", None
    yield from ((f"  {name}", _invariant(name)) for name in result["invariants"])
    yield "cost", None
    yield f"  one update, us (aim: {AIM:g})", lambda each: f"{each['cost_us']['median']:.1f}"
    if any(each["vectorised_us"] for each in result["contenders"].values()):
        yield f"  {LAYERS:,} layers, us", lambda each: f"{each['vectorised_us']['median']:.0f}" if each["vectorised_us"] else NONE


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _worst(totals: Result) -> str:
    worst = totals["worst"]
    return NONE if worst is None else f"{worst['missed']}/{worst['events']} + {worst['false_steps']}"


_TOTALS: tuple[tuple[str, Cell], ...] = (
    ("  recall", lambda totals: _share(totals["recall"])),
    ("  precision", lambda totals: _share(totals["precision"])),
    ("  FA: false alarms per 10,000", lambda totals: f"{totals['false_alarms_per_10000']:.1f}"),
    ("  FS: falsely flagged steps per 10,000", lambda totals: f"{totals['false_steps_per_10000']:.1f}"),
    ("  false alarms in the warm-up", lambda totals: str(totals["warmup_alarms"])),
    ("  longest run of flags", lambda totals: str(totals["longest_run"])),
    ("  worst trace: missed + false steps", _worst),
)


def _of_kind(kind: str, cell: Cell) -> Cell:
    return lambda each: cell(each[kind])


def _clean(name: str) -> Cell:
    return lambda each: f"{each['scenarios'][name]['false_alarms']}/{each['scenarios'][name]['false_steps']}"


def _spiked(name: str) -> Cell:
    return lambda each: f"{_share(each['scenarios'][name]['recall'])} + {each['scenarios'][name]['false_alarms']}"


def _delay(name: str) -> Cell:
    def cell(each: Result) -> str:
        delay = each["scenarios"][name]["delay"]
        return NONE if delay is None else f"{delay['median']:g}, {delay['most']}"

    return cell


def _invariant(name: str) -> Cell:
    return lambda each: "FAILED" if each["invariants"][name] else "passed"


def notes(result: Result) -> Iterator[str]:
    """The worst trace, and the first failure of each invariant."""
    for name, each in result["contenders"].items():
        for kind in KINDS:
            worst = each[kind]["worst"]
            if worst is not None:
                yield f"{name}, worst {kind}: {worst['trace']}"
        for invariant, failures in each["invariants"].items():
            if failures:
                yield f"{name}, {invariant}: {len(failures)} failures, such as {failures[0]}"


def legend(result: Result) -> Sequence[str]:
    """The source of the figures."""
    return (
        f"traces: {result['directory']}; scenarios: seeds {result['first_seed']} to {result['first_seed'] + result['seeds'] - 1}",
        result["tuned_on"],
    )


def markdown(result: Result) -> str:
    """The table of the documentation: a row for each rule."""
    kinds = [kind for kind in KINDS if result["traces"][kind]["count"]]
    names = {"gnorm": "gradient norms", "loss": "losses"}
    titles = [f"{names[kind]}: recall / precision / FA" for kind in kinds]
    rows = [
        ["rule", *titles, "lowest recall in a scenario", "false alarms in clean scenarios", "invariants that fail", "µs a value"],
        ["---", *("---:" for _ in kinds), "---:", "---:", "---", "---:"],
    ]
    for name, each in result["contenders"].items():
        spiked = [(each["scenarios"][scenario]["recall"], scenario) for scenario in result["scenarios"]["spiked"]]
        lowest, where = min((recall, scenario) for recall, scenario in spiked if recall is not None)
        clean = sum(each["scenarios"][scenario]["false_alarms"] for scenario in result["scenarios"]["clean"])
        totals = [
            f"{_share(t['recall'])} / {_share(t['precision'])} / {t['false_alarms_per_10000']:.1f}" for t in map(each.get, kinds)
        ]
        failed = ", ".join(invariant for invariant, failures in each["invariants"].items() if failures) or "none"
        bottom = f"{lowest:.2f}" + (f" ({where})" if lowest < 1 else "")
        rows.append([name, *totals, bottom, str(clean), failed, f"{each['cost_us']['median']:.1f}"])
    counted = [f"{result['traces'][kind]['events']} spikes in {result['traces'][kind]['count']} {names[kind]}" for kind in kinds]
    tuned = result["tuned_on"].replace("\n", " ")
    return "\n\n".join(
        [
            "\n".join(f"| {' | '.join(row)} |" for row in rows),
            f"{' and '.join(counted)} of real trainings; {len(result['scenarios']['clean'])} clean scenarios and "
            f"{len(result['scenarios']['spiked'])} with spikes, {result['seeds']} signals each. FA: false alarms per 10,000 clean "
            f"values after the 200th. Tuned on what: {tuned}",
        ]
    )
