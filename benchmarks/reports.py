"""Size of a report, and time to write and to open it: ``python -m benchmarks.reports``."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.browser import available, browser, wait_for
from torch_gradmon.analysis.report.page import write
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import ALL_COLUMNS, Column
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs.writer import RunWriter

from .machine import machine
from .report import write_section

#: Time until the page shows its findings, and until it has drawn its visible part, in milliseconds since it was asked for.
_WATCH = """new MutationObserver(() => {
    for (const mark of ["told", "ready"]) if (document.body?.dataset[mark] && !window[mark]) window[mark] = performance.now();
}).observe(document, { attributes: true, childList: true, subtree: true });"""
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reports.json"


def made_up(path: Path, layers: int, steps: int) -> None:
    """A run directory with gradients before and after clipping, updates every tenth step and parameters, and one spike."""
    generator = torch.Generator().manual_seed(0)
    names = tuple(f"model.layers.{place // 10}.part_{place % 10}.weight" for place in range(layers))
    level = torch.randn(layers, generator=generator, dtype=torch.float64)
    store = RunWriter(path, {"torch": torch.__version__})

    def table(scale: torch.Tensor) -> StatsTable:
        rows = torch.zeros(layers, len(Column), dtype=torch.float64)
        rows[:, Column.COUNT] = 1000
        rows[:, Column.SQUARE_SUM] = scale.square()
        rows[:, Column.ABS_SUM] = scale * 25
        rows[:, Column.NEAR_ZERO] = 10
        rows[:, Column.MIN], rows[:, Column.MAX] = -scale / 10, scale / 10
        return StatsTable(names, rows, ALL_COLUMNS)

    for step in range(steps):
        norms = (level + 0.3 * torch.randn(layers, generator=generator, dtype=torch.float64)).exp()
        if step == steps // 3:
            norms[layers // 2] *= 1e4
        whole = float(norms.norm())
        tables = {
            "gradient_before_clip": table(norms),
            "gradient": table(norms / max(whole, 1.0)),
            "parameter": table(level.exp() * 100),
        }
        if step % 10 == 0:
            tables["update"] = table(level.exp() * 0.1)
        values = {
            Key("gradmon", "", "grad_norm"): whole,
            Key("gradmon", "", "grad_norm_after_clip"): min(whole, 1.0),
            Key("gradmon", "", "clip_fraction"): 1.0,
            Key("gradmon", "", "update_ratio"): 1e-3,
            Key("", "loss", ""): 2.0 + math.exp(-step / 1000),
        }
        store.log(StepRecord(step, float(step), True, values, tables, {"lr": [1e-3]}))
    store.close()


def opened(page: Path, times: int) -> tuple[list[float], list[float]]:
    """Seconds from the request until the findings can be read, and until everything visible is drawn, in headless Chromium."""
    told, found = [], []
    for _ in range(times):
        with browser(1280, 940) as driver:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
            driver.get(page.as_uri())
            wait_for(lambda driver=driver: driver.execute_script("return document.body.dataset.ready"))
            words, pictures = driver.execute_script("return [told, ready]")
            told.append(words / 1000)
            found.append(pictures / 1000)
    return told, found


def measured(layers: int, steps: int, times: int) -> dict[str, Any]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        made_up(path, layers, steps)
        begin = time.perf_counter()
        page = write(path)
        seconds = time.perf_counter() - begin
        told, opening = opened(page, times) if available() else ([], [])
        return {
            "layers": layers,
            "steps": steps,
            "megabytes": page.stat().st_size / 1e6,
            "seconds_to_write": seconds,
            "seconds_to_tell": statistics.median(told) if told else None,
            "seconds_to_open": statistics.median(opening) if opening else None,
            "fastest": min(opening, default=None),
            "slowest": max(opening, default=None),
        }


def markdown(result: dict[str, Any]) -> str:
    """The section of the documentation."""
    lines = [
        "| layers | steps | size | written in | findings after | all drawn after |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        told = opening = "not run"
        if row["seconds_to_open"] is not None:
            told = f"{row['seconds_to_tell']:.1f} s"
            opening = f"{row['seconds_to_open']:.1f} s ({row['fastest']:.1f} to {row['slowest']:.1f})"
        lines.append(
            f"| {row['layers']:,} | {row['steps']:,} | {row['megabytes']:.1f} MB | {row['seconds_to_write']:.1f} s | {told} | {opening} |"
        )
    found = result["machine"]
    return "\n".join([*lines, "", f"{found['processor']} ({found['cores']} cores), headless Chromium; {result['date']}."])


def main() -> None:
    """Measure, print the table and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="how often a page is opened")
    parser.add_argument("--quick", action="store_true", help="small runs, nothing kept")
    arguments = parser.parse_args()
    cases = [(20, 100)] if arguments.quick else [(150, 10_000), (1_000, 2_000)]
    rows = [measured(layers, steps, 1 if arguments.quick else arguments.times) for layers, steps in cases]
    result = {"machine": machine(), "date": datetime.date.today().isoformat(), "rows": rows}
    print(markdown(result))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("reports", markdown(result))


if __name__ == "__main__":
    main()
