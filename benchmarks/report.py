"""Turn results into the tables and the plot of the documentation.

    python -m benchmarks.report

Reads ``benchmarks/results/benchmark_*.json``, which ``benchmarks.run`` wrote, on this machine or on others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "images" / "benchmark.svg"
ABSENT = "–"  # noqa: RUF001 (a dash in a table)

Result = Mapping[str, Any]


def describe_machine(result: Result) -> str:
    """One line."""
    machine = result["machine"]
    processor = f"{machine['processor']} ({machine['cores']} cores, {machine['instructions']})"
    hardware = f"{machine['gpu']}, {processor}" if result["device"] == "cuda" else processor
    versions = [f"{name} {version}" for name, version in result["versions"].items() if version is not None]
    return f"{hardware}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}; {', '.join(versions)}"


def by_place(result: Result) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The sections on gradients, by device and number of threads."""
    for threads in sorted({section["threads"] for section in result["gradients"]}):
        where = "GPU" if result["device"] == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
        yield where, [section for section in result["gradients"] if section["threads"] == threads]


def figure(value: float) -> str:
    """Three significant digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def with_spread(values: Mapping[str, float]) -> str:
    """Median and quartiles."""
    return f"{figure(values['median'])} ({figure(values['quartile_1'])} to {figure(values['quartile_3'])})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratios_table(sections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each contender, a column for each set."""
    yield _row(["time over the floor", *(section["title"] for section in sections)])
    yield _row(["---", *("---:" for _ in sections)])
    yield _row(["the floor itself, ms", *(with_spread(section["floor_ms"]) for section in sections)])
    labels = {name: contender["label"] for section in sections for name, contender in section["contenders"].items()}
    for name, label in labels.items():
        found = (section["contenders"].get(name) for section in sections)
        yield _row([label, *(ABSENT if each is None else with_spread(each["ratio"]) for each in found)])


def faster_table(sections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Speed ratios, a row for each pair."""
    labels = {name: contender["label"] for section in sections for name, contender in section["contenders"].items()}
    found = {(entry["ours"], entry["than"]): None for section in sections for entry in section["times_faster"]}
    if not found:
        return
    yield _row(["", "times as fast as", *(section["title"] for section in sections)])
    yield _row(["---", "---", *("---:" for _ in sections)])
    for ours, than in found:
        entries = (
            next((e for e in section["times_faster"] if (e["ours"], e["than"]) == (ours, than)), None) for section in sections
        )
        cells = (ABSENT if entry is None else with_spread(entry) for entry in entries)
        yield _row([labels[ours], labels[than], *cells])


def step_line(step: Mapping[str, Any]) -> str:
    """A whole training step in a sentence."""
    threads = f", {step['threads']} thread{'s' * (step['threads'] > 1)}" if step["device"] == "cpu" else ""
    return (
        f"- **Whole steps** ({step['title']}, {step['parameters']:,} parameters, {step['tokens']:,} tokens, AdamW, clipping"
        f"{threads}; {figure(step['step_ms']['median'])} ms): the monitor's own time is {with_spread(step['own_pct'])} % of a "
        f"step, {figure(step['own_pct_mean'])} % in the mean, {with_spread(step['own_pct_with_updates'])} % on steps that measure "
        f"updates. With the monitor a step takes {with_spread(step['difference_pct'])} % longer than without."
    )


def markdown(results: Sequence[Result]) -> str:
    """The section on times."""
    parts = []
    for result in results:
        parts.append(f"{describe_machine(result)}; {result['date']}. Medians, quartiles in brackets.")
        for where, sections in by_place(result):
            parts.append(f"**{where}**")
            parts += ["\n".join(table) for table in (ratios_table(sections), faster_table(sections))]
        lines = [step_line(step) for step in result["training"]]
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def watched_table(section: Mapping[str, Any]) -> Iterator[str]:
    """A row for each way to watch activations."""
    yield f"| {section['title']} | added, ms | reads of all outputs | difference of forwards, ms | % of a step |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for each in section["contenders"].values():
        cells = (with_spread(each[column]) for column in ("ms", "ratio", "difference_ms", "added_pct"))
        yield f"| {' | '.join([each['label'], *cells])} |"
    yield ""
    yield from faster_table([section])
    yield (
        f"\n{section['outputs']} outputs of {section['elements']:,} numbers; the floor takes {with_spread(section['floor_ms'])} ms, "
        f"a bare forward {with_spread(section['forward_ms'])} ms, a bare step {with_spread(section['step_ms'])} ms, "
        f"the stopwatch {figure(section['stopwatch_ms']['median'])} ms."
    )


def activations_markdown(result: Result) -> str:
    """The section on the cost of activations."""
    machine = result["machine"]
    parts = [
        f"{machine['processor']} ({machine['cores']} cores), torch {machine['torch']}; {result['date']}. Medians, quartiles in brackets."
    ]
    for section in result["activations"]:
        parts += [f"**{section['threads']} thread{'s' * (section['threads'] > 1)}**", "\n".join(watched_table(section))]
    return "\n\n".join(parts)


def sinks_table(result: Result) -> Iterator[str]:
    """A row for each sink: for each number of values its cost, the cost by hand, and the quotient."""
    sizes = sorted({section["values"] for section in result["sinks"]})
    yield _row(
        ["microseconds for a row", *(f"{size:,} values" for size in sizes), *(f"over that by hand, {size:,}" for size in sizes)]
    )
    yield _row(["---", *("---:" for _ in sizes), *("---:" for _ in sizes)])
    found = {(section["sink"], section["values"]): section for section in result["sinks"]}
    for sink in dict.fromkeys(section["sink"] for section in result["sinks"]):
        rows = [found[sink, size] for size in sizes]
        label = f"{sink} (by hand: {rows[0]['by_hand']})"
        yield _row([label, *(with_spread(row["ours_us"]) for row in rows), *(with_spread(row["ratio"]) for row in rows)])


def sinks_markdown(result: Result) -> str:
    """The section on the cost of sinks."""
    machine = result["machine"]
    where = f"{machine['processor']} ({machine['cores']} cores), Python {machine['python']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n\n".join(
        ["\n".join(sinks_table(result)), f"{where}; {versions}; {result['date']}. Medians, quartiles in brackets."]
    )


def exchange_table(result: Result) -> Iterator[str]:
    """A row for each wrapper and number of ranks."""
    yield _row(
        ["ranks", "wrapper", "steps", "collectives", "bytes from each rank, counted", "by the formula", "bytes to each rank"]
    )
    yield _row(["---:", "---", "---", *("---:" for _ in range(4))])
    for row in result["rows"]:
        formula = row["formula"]
        cells = (row["ranks"], row["wrap"], row["steps"], row["collectives"])
        yield _row([*map(str, cells), f"{row['sent']:,}", f"{formula['sent']:,}", f"{formula['received']:,}"])


def exchange_markdown(result: Result) -> str:
    """The section on the exchange between ranks."""
    large = "; ".join(
        f"{row['ranks']:,} ranks: {row['sent'] / 1e3:,.0f} kB from each, {row['received'] / 1e3:,.0f} kB to each, in "
        f"{row['collectives']} collective{'s' * (row['collectives'] > 1)}"
        for row in result["of 70B"]
    )
    tensors = max(row["tensors"] for row in result["rows"])
    return (
        f"A GPT of {tensors} parameters, preset `standard`, with clipping; torch {result['torch']}.\n\n"
        + "\n".join(exchange_table(result))
        + f"\n\nBy the formula, a model of 70 billion parameters in 723 tensors would exchange, in most steps: {large}."
    )


def write_section(name: str, new: str) -> Path:
    """Write ``new`` between the markers of this name, on the one page that has them, and return the page.

    Raises:
        ValueError: no page has them, or several have.
    """
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if f"<!-- {name} -->" in page.read_text(encoding="utf-8")]
    if len(pages) != 1:
        raise ValueError(f"one page of docs/ needs the marker <!-- {name} -->, and {len(pages)} have it")
    pages[0].write_text(with_section(pages[0].read_text(encoding="utf-8"), name, new), encoding="utf-8")
    return pages[0]


def with_section(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between the markers of this name.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"the page needs one {start} and after it one {end}, each on a line of its own")
    before, _, rest = text.partition(start)
    return f"{before}{start}\n\n{new}\n\n{end}{rest.partition(end)[2]}"


_SECTIONS = ("idle", "stored", "sinks", "spikes", "exchange", "acting", "activations")


def load() -> list[dict[str, Any]]:
    """The stored results, CPU first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("benchmark_*.json"))]


def main() -> None:
    """Write the plot and the tables."""
    from .acting import markdown as acting_markdown
    from .idle import markdown as idle_markdown
    from .plot import draw
    from .spikes.table import markdown as spikes_markdown
    from .stored import markdown as stored_markdown

    results = load()
    if not results:
        raise SystemExit("there are no results yet: run python -m benchmarks.run")
    draw(results, PLOT)
    stored = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in _SECTIONS}
    sections = {
        "benchmark": markdown(results),
        "idle": idle_markdown(stored["idle"]),
        "stored": stored_markdown(stored["stored"]),
        "sinks": sinks_markdown(stored["sinks"]),
        "spikes": spikes_markdown(stored["spikes"]),
        "exchange": exchange_markdown(stored["exchange"]),
        "acting": acting_markdown(stored["acting"]),
        "activations": activations_markdown(stored["activations"]),
    }
    pages = {str(write_section(name, text).relative_to(ROOT)) for name, text in sections.items()}
    print(f"wrote {PLOT.relative_to(ROOT)} and the tables in {', '.join(sorted(pages))}")


if __name__ == "__main__":
    main()
