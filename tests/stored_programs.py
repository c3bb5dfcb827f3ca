"""A run of several writers, with all that a run directory can hold; and what `load_run` finds in one, as JSON.

`python -m tests.stored_programs DIRECTORY` makes the run of a released format that stays readable: its files, and `expected.json`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.moments import Column
from torch_gradmon.runs.reader import RunReader


def write_run(path: Path, steps: int = 8) -> None:
    """Train ``steps`` steps, then resume twice, each time some steps before the end; values come late, and one batch is NaN."""
    for writer, first in enumerate((0, steps - 4, steps - 1)):
        torch.manual_seed(writer)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / (1 + writer))
        with warnings.catch_warnings(), gradmon.watch(model, optimizer, run_dir=path, preset="full", start_step=first) as monitor:
            warnings.simplefilter("ignore")  # of NaN
            for step in range(first, first + (4 if writer else steps)):
                x = torch.randn(16, 6)
                if writer == 1 and step == first + 2:
                    x[3, 2] = torch.nan
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                monitor.log_scalar("train/loss", float(loss))
                if step % 3 == 0:
                    monitor.log_scalar(f"eval of writer {writer}/accuracy", step / 7)


def found_in(path: Path) -> dict[str, Any]:
    """Steps, segments, facts, values and rows of a run."""
    run = read_run(path)
    return {
        "segments": [list(bounds) for bounds in run.segments],
        "damage": run.damage,
        "parameters": list(run.meta["parameters"]),
        "events": [[event.step, event.signal, repr(event.value)] for event in run.events],
        "steps": {str(step): _step(run, step) for step in run.steps},
    }


def _step(run: RunReader, step: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for source in run.sources:
        table = run.table(source, step)
        if table is not None:
            columns = sorted(table.columns | {Column.COUNT, Column.NONFINITE})
            values = table.rows[:, columns].tolist()
            rows[source] = {
                "columns": [column.name.lower() for column in columns],
                "rows": {name: list(map(repr, row)) for name, row in zip(table.names, values, strict=True)},
            }
    context = run.context(step)
    values = {key: repr(value) for key, value in run.metrics(step).items()}
    return {"time": repr(context["time"]), "applied": context["applied"], "lr": context["lr"], "values": values, "rows": rows}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write_run(place)
    (place / "expected.json").write_text(json.dumps(found_in(place), separators=(",", ":")) + "\n", encoding="utf-8")
