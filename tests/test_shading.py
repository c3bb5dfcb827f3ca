"""Layers relative to their own medians: one spike flattens nothing else, and what has no median is not made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, load_run
from torch_gradmon.analysis.plots import charts, elements
from torch_gradmon.analysis.plots.charts import PanelSet
from torch_gradmon.analysis.plots.elements import (
    LAYER_VIEWS,
    Heatmap,
    Panel,
    cell_text,
    deviations,
    medians,
    recent_ratios,
    scale_labels,
    scale_limit,
)
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs.writer import RunWriter

from .synthetic_run import Row, table

STEPS, SPIKE = 200, 30
nan, inf = math.nan, math.inf


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def rows(step: int) -> dict[str, Row]:
    """One layer is a thousand times as large as another one, which has the spike; others have next to no values."""
    return {
        "large.weight": 1e3 * (1 + 0.1 * math.sin(step)),
        "small.weight": 84.0 if step == SPIKE else 1.0 + 0.1 * math.cos(step),
        "dead.weight": 0.5 if step == 3 else 0.0,
        "spoiled.weight": {"rms": 1.0, "nonfinite_count": 1},
        "seldom.weight": 2.0 if step == 7 else None,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    store = RunWriter(path, {"parameters": dict.fromkeys(rows(0))})
    for step in range(STEPS):
        found = table(rows(step), step)
        assert found is not None
        store.log(StepRecord(step, float(step), True, {}, {"gradient": found}))
    store.close()
    return path


def test_a_departure_is_a_logarithm_of_the_ratio_or_a_difference() -> None:
    values, usual = column(1.0, 10.0, 100.0, nan, inf), torch.tensor([10.0])
    assert deviations(values, usual, True)[:, 0].tolist() == pytest.approx([-1.0, 0.0, 1.0, nan, nan], nan_ok=True)
    assert deviations(values, usual, False)[:, 0].tolist() == pytest.approx([-9.0, 0.0, 90.0, nan, nan], nan_ok=True)


@pytest.mark.parametrize(
    ("values", "median", "wanted"),
    [
        ((0.0, 0.0, 0.5), 0.0, (nan, nan, 30.0)),  # zero has a colour of its own
        ((0.0, 2.0, 2.0), 2.0, (nan, 0.0, 0.0)),
        ((inf, inf, inf), nan, (nan, nan, nan)),  # never finite
        ((nan, nan, nan), nan, (nan, nan, nan)),  # never measured
        ((nan, 4.0, nan), 4.0, (nan, 0.0, nan)),  # once
        ((inf, 4.0, 8.0), 4.0, (nan, 0.0, math.log10(2))),  # what is not finite is no part of the median
    ],
)
def test_medians_that_are_zero_or_missing(values: tuple[float, ...], median: float, wanted: tuple[float, ...]) -> None:
    usual = medians(column(*values))
    assert usual.tolist() == pytest.approx([median], nan_ok=True)
    assert deviations(column(*values), usual, True)[:, 0].tolist() == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("is_log", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [5e-324, 1.0, 1e300],
        [0.0, 1e-300, nan],
        [1e-320, 1e-320, 1e308],
        [0.0],
        [nan],
        [inf, nan, 0.0, 3.0],
        [1e-6, 0.0, 0.0, inf],
    ],
)
def test_a_departure_is_a_number_where_the_scale_has_a_place(values: list[float], is_log: bool) -> None:
    found = deviations(column(*values), medians(column(*values)), is_log)[:, 0].tolist()
    assert [math.isfinite(far) for far in found] == [math.isfinite(value) and not (is_log and value == 0) for value in values]
    assert 0 < scale_limit(torch.tensor(found), is_log) < inf


def test_one_spike_does_not_widen_the_scale() -> None:
    calm = torch.zeros(1000, dtype=torch.float64)
    calm[::2] = math.log10(1.5)
    assert scale_limit(calm, True) == math.log10(2)
    calm[5] = 3.0
    assert scale_limit(calm, True) == math.log10(2)
    assert scale_limit(calm * 3, True) == math.log10(5)
    assert scale_limit(calm * 100, True) == 1.0
    assert scale_limit(torch.tensor([nan]), True) == math.log10(2)
    assert list(scale_labels(1.0, True).values()) == ["≤ 1/10", "median", "≥ 10x"]
    assert list(scale_labels(0.25, False).values()) == ["≤ -0.25", "median", "≥ +0.25"]


def test_the_map_is_relative_where_that_makes_sense(run: Path) -> None:
    panel_set = PanelSet(read_run(run))
    heat, plain = charts.heatmap(panel_set), charts.heatmap(panel_set, relative=False)
    assert heat.rows == ("large.weight", "small.weight", "dead.weight", "spoiled.weight", "seldom.weight")
    assert str(heat.values) == str(plain.values)  # what is told of a cell is its value, either way
    assert (heat.title, plain.title) == ("gradient norm at the step, relative to the row's median", "gradient norm at the step")
    assert plain.medians is None
    assert charts.heatmap(panel_set, "sparsity").medians is None  # a share
    assert charts.heatmap(panel_set, "sparsity", relative=True).medians == pytest.approx((0.0, 0.0, 0.0, nan, 0.0), nan_ok=True)
    assert heat.medians is not None
    assert heat.medians[0] == pytest.approx(1e4, rel=0.05)
    assert heat.medians[2:] == pytest.approx((0.0, nan, 20.0), nan_ok=True)
    spike = heat.shades[1, SPIKE]
    assert float(spike) == pytest.approx(math.log10(84), abs=0.05)
    calm = heat.shades[:2].flatten().abs().sort().values[:-1]
    assert 0 < float(calm.max()) < scale_limit(heat.shades, True) == math.log10(2)


def test_a_view_of_few_steps_shows_values(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(9):
        found = table({"a.weight": 1.0}, step)
        assert found is not None
        store.log(StepRecord(step, 0.0, True, {}, {"gradient": found}))
    store.close()
    assert charts.heatmap(PanelSet(read_run(tmp_path))).medians is None


def test_blocks_have_medians_of_their_own(run: Path) -> None:
    heat = charts.heatmap(PanelSet(read_run(run)), rows=4, columns=7)
    assert len(heat.rows) == 5
    assert len(heat.first) == 7
    whole = charts.heatmap(PanelSet(read_run(run)))
    assert heat.medians == pytest.approx(whole.medians, nan_ok=True)  # of all steps, however few columns there are


def test_words_of_a_cell() -> None:
    assert cell_text(84.0, 0.5) == "84, 168 times its median of 0.5"
    assert cell_text(0.25, 0.5) == "0.25, 0.5 times its median of 0.5"
    assert cell_text(0.25, 0.0) == "0.25, with a median of 0"
    assert cell_text(0.25) == "0.25"
    assert (cell_text(nan, 1.0), cell_text(inf, 1.0)) == ("not measured", "NaN or infinite")


@pytest.mark.extra
def test_both_engines_have_the_colours(run: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    source = load_run(run)
    cells, loud, zero = (trace for trace in source.plot().data if trace.type == "heatmap")
    assert (cells.zmin, cells.zmax) == (-math.log10(2), math.log10(2))
    assert list(cells.colorbar.ticktext) == ["≤ 1/2", "median", "≥ 2x"]
    assert [stop[1] for stop in cells.colorscale] == [colour for _, colour in elements.DIVERGING]
    assert cells.z[2][0] is None
    assert zero.z[2][0] == 1
    assert list(cells.z[3]) == [None] * STEPS
    assert list(loud.z[3]) == [1] * STEPS
    assert list(cells.z[4]) == [0 if step == 7 else None for step in range(STEPS)]
    assert cells.text[1][SPIKE].startswith("small.weight<br>step 30: 840, ")
    assert source.plot(relative=False).data[0].zmax is None
    axes: Any = source.plot(engine="matplotlib").axes
    mesh = axes[0].collections[0]
    assert mesh.get_clim() == (-math.log10(2), math.log10(2))
    assert [label.get_text() for label in axes[1].get_yticklabels()] == ["≤ 1/2", "median", "≥ 2x"]
    assert source.plot(engine="matplotlib", relative=False).axes[0].collections[0].get_clim()[1] > 3


def test_an_option_that_is_no_truth_value_is_refused(run: Path) -> None:
    for odd in ("yes", 1):
        with pytest.raises(TypeError, match=r"relative must be True, False, or None"):
            load_run(run).plot(relative=odd)


def test_a_heat_map_without_medians_has_values() -> None:
    heat = Heatmap("t", ("a", "b"), (0, 1), (0, 1), ((1.0, 0.0), (100.0, inf)), True)
    assert heat.shades.tolist() == [[0.0, pytest.approx(nan, nan_ok=True)], [2.0, pytest.approx(nan, nan_ok=True)]]


def test_special_cells_name_zero_and_missing_gradients_apart() -> None:
    values = ((1.0, 2.0, 0.0), (nan, nan, nan), (nan, inf, 3.0))
    heat = Heatmap("", ("a", "b", "c"), (0, 1, 2), (0, 1, 2), values, True, medians=(1.0, nan, 3.0), due=(True, True, False))
    odd, bare = heat.special_cells(None)
    assert odd == ("NaN or infinite", elements.NONFINITE, [[None] * 3, [None] * 3, [None, 1.0, None]])
    assert bare == ("no gradient or exactly 0", elements.ZERO, [[None, None, 1.0], [1.0, 1.0, 1.0], [None] * 3])
    assert heat.texts(heat.medians)[1] == ["no gradient"] * 3
    assert heat.texts(heat.medians)[2][0] == "not measured"
    shown = heat.shades.isfinite().tolist()
    assert shown == [[True, True, False], [False] * 3, [False, False, True]]


@pytest.mark.parametrize("engine", ["plotly", "matplotlib"])
def test_figure_of_a_map_has_a_legend_of_its_special_colours(engine: str, run: Path) -> None:
    pytest.importorskip(engine)
    drawn = load_run(run).plot(engine=engine)
    names = (
        [trace.name for trace in drawn.data if trace.showlegend]
        if engine == "plotly"
        else [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]
    )
    assert names == ["NaN or infinite", "exactly 0"]


def test_rows_without_any_gradient_are_in_the_map(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike=None)
    for _ in range(3):
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.get_step_metrics()
    heat = charts.heatmap(PanelSet(read_run(tmp_path)))
    assert heat.rows == ("used.weight", "used.bias", "unused.weight", "unused.bias")
    assert heat.texts(heat.medians)[2] == ["no gradient"] * 3
    pytest.importorskip("plotly")
    assert "no gradient" in [trace.name for trace in monitor.plot().data]
    monitor.detach()


def test_layers_without_a_measurement_are_not_said_to_lack_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    monitor = ModuleMonitor(model, run_dir=tmp_path)
    monitor.add_parameter_metric("norm")
    monitor.add_gradient_metric("norm", metric_regex="0.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    monitor.detach()
    assert charts.heatmap(PanelSet(read_run(tmp_path))).rows == ("0.weight",)


def test_recent_ratios_follow_a_trend_and_keep_a_spike() -> None:
    steps = 1000
    trend = torch.logspace(4, -4, steps, dtype=torch.float64).unsqueeze(1).repeat(1, 2)
    trend[700, 0] *= 20
    alone = list(range(steps))
    ratios = recent_ratios(trend, alone, alone)
    assert float(ratios[:, 1].log10().abs().max()) < math.log10(3)  # while the medians of rows are off by 10,000
    assert float(ratios[700, 0]) == pytest.approx(20 * float(ratios[700, 1]))
    naive = trend[650, 1] / trend[550:650, 1].median()
    assert float(ratios[650, 1]) == pytest.approx(float(naive))
    begins, ends = list(range(0, steps, 50)), list(range(49, steps, 50))
    binned = recent_ratios(trend, begins, ends)
    assert binned.shape == (20, 2)
    assert float(binned[14, 0]) > 5 > float(binned.log10().abs()[:, 1].max())


@pytest.mark.parametrize(("value", "wanted"), [(0.0, 0.0), (inf, inf), (nan, nan), (3.0, 3.0)])
def test_recent_ratios_keep_what_no_scale_has(value: float, wanted: float) -> None:
    values = column(*[1.0] * 20, value)
    assert float(recent_ratios(values, [20], [20])) == pytest.approx(wanted, nan_ok=True)


def test_layers_that_stand_out_are_not_those_of_the_first_step() -> None:
    values = torch.ones(100, 3, dtype=torch.float64)
    values[0, :2] = 50.0
    values[60, 2] = 5.0
    panel = Panel(tuple(range(100)), ("a", "b", "c"), values, LAYER_VIEWS["gradient"])
    assert charts.most_deviating(panel, 1) == ["c"]
