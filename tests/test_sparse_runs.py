"""A run whose steps have different layers takes no more memory than its values do, many times over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_gradmon import load_run
from torch_gradmon.analysis.diagnosis.series import Matrix
from torch_gradmon.analysis.plots.charts import PanelSet, RunPair
from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.terminal.layer_table import summarize
from torch_gradmon.cli.terminal.live import LiveRun
from torch_gradmon.core.keys import GRADIENT
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs import reader as value_matrix
from torch_gradmon.runs.reader import fitting
from torch_gradmon.runs.writer import RunWriter

from .synthetic_run import table

MANY, STEPS, CELLS = 300, 100, 1000


def _written(path: Path, wide: int = 0) -> Path:
    """One step with many layers, and others with one other layer."""
    writer = RunWriter(path)
    for step in range(STEPS):
        names = [f"w{number}" for number in range(MANY)] if step == wide else ["often"]
        writer.log(StepRecord(step, float(step), True, {}, {GRADIENT: _table(names)}, {}, ()))
    writer.close()
    return path


def _table(names: list[str]) -> StatsTable:
    found = table(dict.fromkeys(names, 2.0), 0)
    assert found is not None
    return found


@pytest.fixture
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_matrix, "_CELLS", CELLS)
    monkeypatch.setattr(value_matrix, "_PER_VALUE", 4)


def _panels(path: Path) -> PanelSet:
    return PanelSet(read_run(path))


def test_all_names_fit_unless_nearly_all_cells_are_empty(few_cells: None) -> None:
    assert fitting({"a": 0, "b": 1}, 500) == ("a", "b")
    assert fitting({"a": 500, "b": 1, "c": 499, "d": 0}, 500) == ("a", "b", "c", "d")
    assert fitting({"a": 3, "b": 1, "c": 500, "d": 0}, 500) == ("a", "b", "c", "d")  # 4 cells for each value
    assert fitting({"a": 3, "b": 1, "c": 200, "d": 4}, 500) == ("c", "d")
    assert fitting({}, 0) == ()


def test_a_panel_names_how_many_layers_it_leaves_out(few_cells: None, tmp_path: Path) -> None:
    panel = _panels(_written(tmp_path)).panel("gradient")
    assert panel is not None
    assert panel.values.numel() <= 4 * (MANY + STEPS)
    assert "often" in panel.names
    assert len(panel.steps) == STEPS
    assert panel.view.title.endswith(f", of the {len(panel.names)} of {MANY + 1} layers that have it most")
    assert torch.isfinite(panel.values[1:, panel.names.index("often")]).all()


def test_a_panel_below_the_bound_has_all_layers(tmp_path: Path) -> None:
    panel = _panels(_written(tmp_path)).panel("gradient")
    assert panel is not None
    assert panel.values.shape == (STEPS, MANY + 1)
    assert "most" not in panel.view.title


def test_panels_of_two_runs_are_bounded_too(few_cells: None, tmp_path: Path) -> None:
    one, other = (_panels(_written(tmp_path / str(wide), wide)) for wide in (0, 50))
    pair = RunPair(one, other).panels("gradient")
    assert pair is not None
    assert pair.difference.values.numel() <= 4 * 2 * (MANY + STEPS)
    assert (pair.difference.values[1:50, pair.difference.names.index("often")] == 0).all()


def test_a_matrix_of_tables_has_the_tensors_with_most_values(few_cells: None) -> None:
    wide, often = _table([f"w{number}" for number in range(MANY)]), _table(["often"])
    found = Matrix.of_tables([(0, wide), *((step, often) for step in range(1, STEPS))], "norm")
    assert found is not None
    assert found.values.numel() <= 4 * (MANY + STEPS)
    assert len(found.column("often")) == STEPS - 1


def test_a_summary_of_each_layer_refuses_a_nearly_empty_table(few_cells: None, tmp_path: Path) -> None:
    run = load_run(_written(tmp_path))
    with pytest.raises(ValueError, match=r"301 rows is too large for 100 steps that have 4\.0 layers on average: use --keys"):
        summarize(run._reader, "", everything=True)
    assert len(summarize(run._reader, "", everything=True, last=3).rows) > 40
    assert sum(row.parameters for row in summarize(run._reader, "").rows) == MANY + 1


def test_a_live_view_of_a_wide_last_step_leaves_out_early_steps(few_cells: None, tmp_path: Path) -> None:
    live = LiveRun(read_run(_written(tmp_path, STEPS - 1)), STEPS)
    assert live._norms.values.numel() <= 4 * (MANY + STEPS)
    assert live._norms.steps[-1] == STEPS - 1
    assert len(live.top_layers(3)) == 3
