"""Turn results into the README's table and plot.

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
START, END = "<!-- benchmark -->", "<!-- /benchmark -->"
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
    """Three digits where they mean something."""
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
    """How many times as fast, a row for each pair."""
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


def idle_line(idle: Mapping[str, Any]) -> str:
    """A step that is not monitored, in a sentence."""
    return (
        f"- **A step that is not monitored** ({idle['parameters']} parameters): {with_spread(idle['python_us'])} µs of Python, "
        f"{idle['hooks_on_parameters']} hooks on parameters. Beside a loop without a monitor such a step takes "
        f"{with_spread(idle['difference_us'])} µs longer; a loop without a monitor whose parameters once had a hook, since removed, "
        f"{with_spread(idle['once_hooked_us'])} µs; a second loop without anything {with_spread(idle['two_bare_loops_us'])} µs."
    )


def markdown(results: Sequence[Result]) -> str:
    """All that the README says about measured times."""
    parts = []
    for result in results:
        parts.append(f"{describe_machine(result)}; {result['date']}. Medians, quartiles in brackets.")
        for where, sections in by_place(result):
            parts.append(f"**{where}**")
            parts += ["\n".join(table) for table in (ratios_table(sections), faster_table(sections))]
        lines = [step_line(step) for step in result["training"]]
        if result["idle"] is not None:
            lines.append(idle_line(result["idle"]))
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def update_readme(text: str, results: Sequence[Result]) -> str:
    """``text`` with what is between the markers written anew.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"the README needs one {START} and after it one {END}, each on a line of its own")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n\n{markdown(results)}\n\n{END}{rest.partition(END)[2]}"


def load() -> list[dict[str, Any]]:
    """What was measured, CPU first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("benchmark_*.json"))]


def main() -> None:
    """Write the plot and the README's table."""
    from .plot import draw

    results = load()
    if not results:
        raise SystemExit("there are no results yet: run python -m benchmarks.run")
    draw(results, PLOT)
    readme = ROOT / "README.md"
    readme.write_text(update_readme(readme.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"wrote {PLOT.relative_to(ROOT)} and the table in README.md")


if __name__ == "__main__":
    main()
