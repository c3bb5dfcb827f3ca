"""The tables that ``gradmon demo`` prints. Needs rich."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class DemoRow:
    """A row of the table: one matrix, or all norm layers together. Values that were not measured are NaN."""

    layer: str
    before_clip: float
    after_clip: float
    share: float
    update_ratio: float
    sparsity: float


@dataclass(frozen=True)
class DemoResult:
    """The result of a demo.

    Attributes:
        step: the last step that measured updates; the values are of this step.
        values: all values of it by key.
        rows: the table of layers.
        steps: number of steps.
        overhead_pct: time spent in the monitor, mean over all steps.
        run_dir: the run directory.
        spoiled: the step and the layer whose gradient was spoiled on purpose; None if none was.
    """

    step: int
    values: Mapping[str, float]
    rows: Sequence[DemoRow]
    steps: int
    overhead_pct: float
    run_dir: Path
    spoiled: tuple[int, str] | None = None


def rows(values: Mapping[str, float], elements: Mapping[str, int]) -> list[DemoRow]:
    """A row for each matrix, and one for all norm layers; ``elements`` are the sizes of the parameters by name."""
    groups: dict[str, list[str]] = {}
    for name in elements:
        groups.setdefault("all norms" if "norm" in name else name.removesuffix(".weight"), []).append(name)
    groups["all norms"] = groups.pop("all norms")  # to the end
    whole = values["gradmon/grad_norm"]
    found = []
    for layer, names in groups.items():
        before = _norm_of(values, "gradient_before_clip", names)
        update, parameter = (_norm_of(values, source, names) for source in ("update", "parameter"))
        near_zero = sum(values[f"gradient_before_clip/{name}/sparsity"] * elements[name] for name in names)
        found.append(
            DemoRow(
                layer,
                before,
                _norm_of(values, "gradient", names),
                (before / whole) ** 2,
                update / parameter if parameter > 0 else math.nan,
                near_zero / sum(elements[name] for name in names),
            )
        )
    return found


def _norm_of(values: Mapping[str, float], source: str, names: Sequence[str]) -> float:
    return math.hypot(*(values.get(f"{source}/{name}/norm", math.nan) for name in names))


def report(console: Console, result: DemoResult) -> None:
    """Print the whole-model values, the table of layers, and the next steps."""
    values = result.values
    summary = Table.grid(padding=(0, 2))
    for name, meaning in (
        ("grad_norm", "norm of all gradients before the clip"),
        ("clipped_share", "of the last 100 steps had their gradients clipped"),
        ("update_ratio", "norm of the update over that of the parameters"),
        ("spike_score", "robust deviations of grad_norm above normal"),
    ):
        summary.add_row(f"[bold]{name}", _number(values.get(f"gradmon/{name}", math.nan), name), f"[dim]{meaning}")
    overhead = f"of the time is spent in the monitor, mean of {result.steps} steps"
    summary.add_row("[bold]overhead_pct", f"{result.overhead_pct:.1f}%", f"[dim]{overhead}")
    console.print(f"\nWhole model, step {result.step}, loss {values['loss']:.3f}", style="bold cyan")
    console.print(summary)

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layer", no_wrap=True)
    for heading in (
        "gradient\nbefore clip",
        "gradient\nafter clip",
        "share of\nsquared norm",
        "update\nratio",
        "gradient\nsparsity",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max(result.rows, key=lambda row: row.share)
    for row in result.rows:
        table.add_row(
            row.layer,
            _number(row.before_clip),
            _number(row.after_clip),
            f"{row.share:.1%}",
            _number(row.update_ratio, "update_ratio"),
            f"{row.sparsity:.1%}",
            style="bold yellow" if row is largest else None,
        )
    console.print(f"\nLayers, step {result.step}", style="bold cyan")
    console.print(table)

    run = json.dumps(str(result.run_dir))
    console.print("\nFrom here", style="bold cyan")
    for what, how in (
        ("read the run", f'torch_gradmon.load_run({run}).series("gradmon/grad_norm")'),
        ("all values", f"{result.run_dir / 'metrics.jsonl'}, one line a step"),
        ("your model", "monitor = torch_gradmon.watch(model, optimizer)"),
    ):
        console.print(f"{what:14}{how}", markup=False, soft_wrap=True)


def picture(result: DemoResult) -> str:
    """The tables as SVG."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, highlight=False)
    report(console, result)
    console.print()  # otherwise the frame cuts the underscores of the last line
    drawn = console.export_svg(title="gradmon demo")
    # some viewers drop leading spaces, so move the text instead
    return re.sub(r'x="([0-9.]+)" y="([0-9.]+)" textLength="([0-9.]+)"([^>]*)>((?:&#160;)+)(?=[^<&])', _moved, drawn)


def _moved(match: re.Match[str]) -> str:
    x, y, length = (float(number) for number in match.groups()[:3])
    shift = 12.2 * match[5].count("&")  # the width of a character in rich's pictures
    return f'x="{x + shift:g}" y="{y:g}" textLength="{length - shift:g}"{match[4]}>'


def _number(value: float, kind: str = "") -> str:
    if math.isnan(value):
        return "-"
    if kind == "update_ratio":
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0%}" if kind == "clipped_share" else f"{value:.1f}" if kind == "spike_score" else f"{value:.3f}"
