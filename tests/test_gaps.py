"""Steps in which nothing was measured are gaps: in maps and lines, of both engines, of one run and of two, however few columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from torch_gradmon import load_run
from torch_gradmon.analysis.diagnosis.series import Series
from torch_gradmon.analysis.plots import charts, elements
from torch_gradmon.analysis.plots.charts import PanelSet, RunPair
from torch_gradmon.analysis.plots.elements import LAYER_VIEWS, Heatmap, Line, LineChart, Panel, Subplot, downsampled
from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.terminal.live import Columns, LiveRun
from torch_gradmon.core.keys import Key
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs.writer import RunWriter

from .synthetic_run import table

#: Of 66 steps, those in which outputs were measured: three after each of two spikes.
STEPS, MEASURED = 66, (10, 11, 12, 40, 41, 42)
#: The edges of their cells, and what is in each column.
EDGES = (-0.5, 9.5, 10.5, 11.5, 12.5, 39.5, 40.5, 41.5, 42.5, 65.5)
PLACES = (None, 0, 1, 2, None, 3, 4, 5, None)


def written(path: Path, measured: Callable[[int], bool] = MEASURED.__contains__, steps: int = STEPS, every: int = 1) -> Path:
    """A run whose gradients and loss were recorded in each step, and outputs and a clip in some."""
    store = RunWriter(path)
    for step in range(0, steps * every, every):
        tables = {"gradient_before_clip": table({"a.weight": 1.0 + step / 10, "b.weight": 2.0}, step)}
        values = {Key("gradmon", "", "grad_norm"): 3.0, Key("", "loss", ""): 1.0}
        if measured(step):
            tables["activation"] = table({"a": 1.0 + step, "b": 2.0}, step)
            values[Key("gradmon", "", "clip_fraction")] = 0.5
            values |= {Key("gradmon", "", name): 1e-3 for name in ("update_ratio", "update_ratio_p10", "update_ratio_p90")}
        store.log(
            StepRecord(step, float(step), True, values, {name: found for name, found in tables.items() if found is not None})
        )
    store.close()
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("runs") / "run")


# --- what is a gap ---------------------------------------------------------------------------------------------------------------


ALL = tuple(range(60))
TENTHS = tuple(range(0, 60, 10))
ENDS = (-math.inf, -0.5), (59.5, math.inf)


@pytest.mark.parametrize(
    ("measured", "steps", "wanted"),
    [
        (ALL, ALL, ENDS),
        ((7, 8, 40), ALL, ((-math.inf, 6.5), (8.5, 39.5), (40.5, math.inf))),
        (TENTHS, ALL, ((-math.inf, -5.0), (55.0, math.inf))),  # each tenth, and it stands for all ten
        ((*TENTHS[:4], 33, 34, 35, *TENTHS[4:]), ALL, ((-math.inf, -5.0), (55.0, math.inf))),  # and a closer look
        ((0, 10, 20, 30, 50), (*ALL, 60, 70, 80, 90), ((-math.inf, -0.5), (0.5, 9.5))),  # not where so many are missing
        ((20, 40), ALL, ((-math.inf, 19.5), (20.5, 39.5), (40.5, math.inf))),  # a spike here and there
        (TENTHS, TENTHS, ((-math.inf, -5.0), (55.0, math.inf))),  # of a run that is monitored at each tenth step
        ((20,), TENTHS, ((-math.inf, 15.0), (25.0, math.inf))),
        (
            (0, 1, 2, 50, 51),
            (0, 1, 2, 50, 51),
            ((-math.inf, -0.5), (2.5, 49.5), (51.5, math.inf)),
        ),  # nothing was recorded between
        (
            (0, 1, 2, 3, 5, 9, 17),
            (0, 1, 2, 3, 5, 9, 17),
            ((-math.inf, -0.5), (3.5, 4.5), (5.5, 8.5), (9.5, 16.5), (17.5, math.inf)),
        ),
    ],
)
def test_a_gap_is_where_a_value_was_due_and_is_not_there(
    measured: tuple[int, ...], steps: tuple[int, ...], wanted: tuple[elements.Gap, ...]
) -> None:
    assert elements.RecordedSteps(steps).gaps(measured)[: len(wanted)] == wanted


def test_what_a_monitor_has_forgotten_is_no_gap() -> None:
    remembered = (*range(50), 60, 71, 80, 93, 100, 130, *range(150, 200))
    known = elements.RecordedSteps(remembered, is_whole=False)
    assert known.gaps(remembered) == ((-math.inf, -0.5), (199.5, math.inf))
    tenths = tuple(step for step in remembered if step % 10 == 0)
    assert known.gaps(tenths) == ((-math.inf, -5.0), (195.0, math.inf))
    assert known.gaps((93,)) == ((-math.inf, 86.5), (96.5, math.inf))
    assert len(elements.RecordedSteps(remembered).gaps(remembered)) > 2  # in a run nothing is forgotten


def drawn(random: Random) -> set[int]:
    """Some steps, in few stretches or many."""
    density = random.choice((0.02, 0.3, 0.9))
    return {step for step in range(120) if random.random() < density} | {random.randrange(120)}


@pytest.mark.parametrize("seed", range(60))
def test_gaps_hold_the_missing_steps_and_none_that_was_measured(seed: int) -> None:
    random = Random(seed)
    measured, others = sorted(drawn(random)), {step for step in range(120) if random.random() < 0.7}
    known = elements.RecordedSteps(tuple(sorted({*measured, *others})), is_whole=random.random() < 0.5)
    found = known.gaps(measured)
    assert all(low < high for low, high in found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))

    def is_inside(step: float) -> bool:
        return any(low < step < high for low, high in found)

    assert not any(map(is_inside, measured))
    missing = sorted(known._due(measured, known._cadence(measured)).difference(measured))
    assert all(map(is_inside, missing))
    behind = elements.steps_after(found, measured, 1000)
    over = [after for before, after in itertools.pairwise(measured) if any(before < step < after for step in missing)]
    assert set(over) <= set(behind) <= set(measured)
    assert known.is_whole or set(over) == set(behind)


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_have_a_gap_where_both_have_one(seed: int) -> None:
    random = Random(seed)
    some, others = (elements.RecordedSteps(tuple(range(120))).gaps(sorted(drawn(random))) for _ in range(2))
    found = elements.intersection(some, others)
    for at in (number / 2 + 0.1 for number in range(-4, 250)):
        one, other, both = (any(low < at < high for low, high in each) for each in (some, others, found))
        assert both == (one and other), at


@pytest.mark.parametrize("seed", range(20))
def test_columns_lie_side_by_side_and_a_cell_covers_no_other_step(seed: int) -> None:
    random = Random(seed)
    measured = sorted(drawn(random))
    span = measured[0] - random.randrange(9), measured[-1] + random.randrange(9)
    grid = elements.grid(measured, measured, elements.RecordedSteps(tuple(range(span[0], span[1] + 1))).gaps(measured), span)
    assert (grid.edges[0], grid.edges[-1], len(grid.edges)) == (span[0] - 0.5, span[1] + 0.5, len(grid.places) + 1)
    assert list(grid.edges) == sorted(set(grid.edges))
    cells = [(low, high) for low, high, place in zip(grid.edges, grid.edges[1:], grid.places, strict=False) if place is not None]
    assert cells == [(step - 0.5, step + 0.5) for step in measured]


def test_a_single_step_of_a_long_run_can_be_seen() -> None:
    grid = elements.grid((30_000,), (30_000,), elements.RecordedSteps(tuple(range(60_001))).gaps((30_000,)), (0, 60_000))
    assert grid.places == (None, 0, None)
    assert grid.edges[2] - grid.edges[1] == pytest.approx(200, rel=1e-3)


# --- maps ------------------------------------------------------------------------------------------------------------------------


def test_outputs_of_six_steps_are_six_columns_of_sixty_six(run: Path) -> None:
    heat = charts.heatmap(PanelSet(read_run(run)), "activation")
    assert (heat.grid.edges, heat.grid.places) == (EDGES, PLACES)
    assert charts.heatmap(PanelSet(read_run(run))).grid.places == tuple(range(STEPS))


def test_what_is_measured_at_each_tenth_step_has_no_gaps(tmp_path: Path) -> None:
    panel_set = PanelSet(read_run(written(tmp_path, lambda step: step % 10 == 0, steps=61)))
    heat = charts.heatmap(panel_set, "activation")
    assert heat.grid == elements.Grid((-0.5, 5.0, 15.0, 25.0, 35.0, 45.0, 55.0, 60.5), tuple(range(7)))


def test_a_run_that_is_monitored_at_each_tenth_step_has_no_gaps_either(tmp_path: Path) -> None:
    panel_set = PanelSet(read_run(written(tmp_path, lambda step: step in (100, 110, 400), every=10)))
    assert charts.heatmap(panel_set).grid.places == tuple(range(STEPS))
    assert charts.heatmap(panel_set, "activation").grid.places == (None, 0, 1, None, 2, None)
    assert charts.norm(panel_set).subplots[1].lines[0].after_gaps == ()


@pytest.mark.parametrize("columns", [3, 6, 7, 20])
def test_gaps_stay_where_there_are_few_columns(run: Path, columns: int) -> None:
    heat = charts.heatmap(PanelSet(read_run(run)), "activation", columns=columns)
    assert len(heat.first) <= columns
    for first, last in zip(heat.first, heat.last, strict=True):
        assert {first, last} <= set(MEASURED)
        assert last - first < 3
    assert heat.grid.places.count(None) == 3
    covered = [
        (low, high)
        for low, high, place in zip(heat.grid.edges, heat.grid.edges[1:], heat.grid.places, strict=False)
        if place is not None
    ]
    assert sum(high - low for low, high in covered) == pytest.approx(6)


def test_no_column_of_a_long_run_reaches_over_a_gap() -> None:
    steps = (*range(2000), *range(30_000, 32_000))
    panel = Panel(steps, ("a",), torch.ones(len(steps), 1, dtype=torch.float64), LAYER_VIEWS["gradient"])
    cells = downsampled(panel, 100)
    assert len(cells.first) <= 100
    assert all(last < 2000 or first >= 30_000 for first, last in zip(cells.first, cells.last, strict=True))
    grid = elements.grid(cells.first, cells.last, elements.RecordedSteps(tuple(range(40_001))).gaps(steps), (0, 40_000))
    (gap, end) = (number for number, place in enumerate(grid.places) if place is None)
    assert grid.edges[gap] == pytest.approx(1999, abs=70)
    assert grid.edges[gap + 1] == pytest.approx(30_000, abs=70)
    assert end == len(grid.places) - 1


@pytest.mark.extra
def test_both_engines_draw_nothing_in_gaps(run: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    source = load_run(run)
    (cells, *_) = source.plot(view="activation").data
    assert tuple(cells.x) == EDGES
    assert [value is None for value in cells.z[0]] == [place is None for place in PLACES]
    assert cells.text[0][1] == "a<br>step 10: 11"
    assert cells.text[0][4] == "nothing was measured here"
    mesh = source.plot(view="activation", engine="matplotlib").axes[0].collections[0]
    assert mesh.get_coordinates()[0, :, 0].tolist() == list(EDGES)
    assert mesh.get_array()[0].mask.tolist() == [place is None for place in PLACES]


@pytest.mark.extra
def test_the_report_has_the_same_columns(run: Path) -> None:
    for package in ("plotly", "jinja2"):
        pytest.importorskip(package)
    from torch_gradmon.analysis.report.page import content

    view = content(read_run(run), "run", lambda: None)["views"]["activation"]
    assert (tuple(view["edges"]), tuple(view["places"])) == (EDGES, PLACES)
    assert view["first"] == view["last"] == list(MEASURED)


def test_two_runs_over_each_other_have_a_column_where_one_of_them_was_measured(run: Path, tmp_path: Path) -> None:
    other = written(tmp_path, (12, 13, 60).__contains__)
    panels = RunPair(*(PanelSet(read_run(path), "") for path in (run, other))).panels("activation")
    assert panels is not None
    for panel in (panels.first, panels.second, panels.difference):
        assert panel.steps == (10, 11, 12, 13, 40, 41, 42, 60)
        assert panel.gaps == ((-math.inf, 9.5), (13.5, 39.5), (42.5, 59.5), (60.5, math.inf))
        assert panel.axis == (0, STEPS - 1)
    assert panels.first.values[:, 0].isnan().tolist() == [step not in MEASURED for step in panels.first.steps]
    assert panels.difference.values[:, 0].isnan().tolist() == [step != 12 for step in panels.first.steps]


# --- lines -----------------------------------------------------------------------------------------------------------------------


def test_lines_have_the_same_gaps(run: Path) -> None:
    panel_set = PanelSet(read_run(run))
    (share,) = charts.norm(panel_set).subplots[-1].lines
    assert [piece.steps for piece in share.pieces(share.series)] == [(10, 11, 12), (40, 41, 42)]
    for line in (*charts.update(panel_set).subplots[0].lines, charts.layers(panel_set, "activation", ["a"]).subplots[0].lines[0]):
        assert line.after_gaps == (40,)
    (loss,) = charts.norm(panel_set).subplots[0].lines
    assert loss.after_gaps == ()


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_few_points_keep_gaps_that_can_be_seen(seed: int) -> None:
    random = Random(seed)
    lengths, most = [random.randint(1, 400) for _ in range(random.randint(1, 6))], random.randint(8, 40)
    steps: list[int] = []
    for length in lengths:
        begin = steps[-1] + 10_000 if steps else 0
        steps += range(begin, begin + length)
    series = Series(tuple(steps), tuple(math.sin(step) for step in steps))
    line = Line.of("a", series, elements.BLUE, elements.RecordedSteps(tuple(steps)).gaps(steps), most)
    assert len(line.series) <= 2 * most + 2 + 2 * len(lengths) or len(series) <= most
    pieces = line.pieces(line.series)
    assert len(pieces) == len(lengths)
    whole = line.pieces(series)
    assert [(piece.steps[0], piece.steps[-1]) for piece in pieces] == [(piece.steps[0], piece.steps[-1]) for piece in whole]


@pytest.mark.extra
def test_both_engines_draw_no_line_over_a_gap_and_a_point_where_there_is_but_one() -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    from torch_gradmon.analysis.plots.matplotlib import figure as matplotlib_figure
    from torch_gradmon.analysis.plots.plotly import figure

    low, high = Series((1, 2, 9), (1.0, 1.0, 1.0)), Series((1, 2, 9), (3.0, 3.0, 3.0))
    line = Line("a", Series((1, 2, 9), (1.0, 2.0, 3.0)), elements.BLUE, after_gaps=(9,))
    band = Line("b", low, elements.SKY, low, high, after_gaps=(9,))
    lines = LineChart("t", (Subplot("s", (line, band), is_log=False),))
    drawn, area = figure(lines).data
    assert (list(drawn.x), list(drawn.y), drawn.mode) == ([1, 2, None, 9], [1.0, 2.0, None, 3.0], "lines+markers")
    assert list(drawn.marker.size) == [0, 0, 0, 4]
    assert (list(area.x), list(area.y)) == ([1, 2, 2, 1, None, 9, 9], [1.0, 1.0, 3.0, 3.0, None, 1.0, 3.0])
    assert area.fill == "toself"
    axes = matplotlib_figure(lines).axes[0]
    curve, point = axes.lines
    assert [None if math.isnan(y) else y for y in curve.get_ydata()] == [1.0, 2.0, None, 3.0]
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([9], [3.0])
    (filled,) = axes.collections
    assert [path.vertices[:, 0].min() for path in filled.get_paths()] == [1.0, 9.0]


# --- in a terminal ---------------------------------------------------------------------------------------------------------------


def test_a_sparkline_has_a_blank_where_nothing_was_measured(run: Path) -> None:
    live = LiveRun(read_run(run), STEPS)
    series = live.series(Key("gradmon", "", "clip_fraction"))
    columns = Columns.of(live.steps, 100)
    found = columns.largest(series.steps, series.values)
    assert [step for step, value in enumerate(found) if value is not None] == list(MEASURED)
    few = Columns.of(live.steps, 33).largest(series.steps, series.values)
    assert [place for place, value in enumerate(few) if value is not None] == [5, 6, 20, 21]


def test_a_heat_map_by_itself_ends_where_its_columns_do() -> None:
    heat = Heatmap("t", ("a",), (0, 5), (4, 9), ((1.0, 2.0),), True)
    assert heat.grid == elements.Grid((-0.5, 4.5, 9.5), (0, 1))
