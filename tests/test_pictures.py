"""What pictures show: every spike and dip stays, and what is not finite is loud."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.diagnosis.series import Series, clip_bound
from torch_gradmon.analysis.plots import charts, elements
from torch_gradmon.analysis.plots.charts import PanelSet, ValueSource, blocks, by_block
from torch_gradmon.analysis.plots.elements import (
    LAYER_VIEWS,
    Heatmap,
    Line,
    LineChart,
    Panel,
    Subplot,
    downsampled,
    merged_marks,
    points,
)
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import Key
from torch_gradmon.core.records import StepRecord

VIEW = LAYER_VIEWS["gradient"]
NAME = "2.weight"
BAD, SPIKE, STEPS = 20, 40, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[gradmon.ModuleMonitor, Path]:
    """A short training with a NaN in one gradient, and a spike in another."""
    path = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=path, on_spike=None)
    weight = model.get_parameter(NAME)
    for step in range(STEPS):
        x = torch.randn(16, 3)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        factor = {BAD: math.nan, SPIKE: 1e4}.get(step, 1.0)
        hook = weight.register_hook(lambda gradient, by=factor: gradient * by)  # type: ignore[misc]
        loss.backward()
        hook.remove()
        monitor.log_scalar("loss", loss.detach())
        if step == BAD:
            optimizer.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    monitor.detach()
    return monitor, path


def _panel_sets(trained: tuple[gradmon.ModuleMonitor, Path]) -> list[PanelSet]:
    monitor, path = trained
    return [
        PanelSet(read_run(path)),
        PanelSet(ValueSource(monitor._runtime.pipeline.history.sampled())),
    ]


def test_a_panel_has_the_numbers_of_the_run(trained: Any) -> None:
    run = gradmon.load_run(trained[1])
    for panel_set in _panel_sets(trained):
        for name, view in LAYER_VIEWS.items():
            panel = panel_set.panel(name)
            assert panel is not None, name
            for column, layer in enumerate(panel.names):
                source = next(each for each in view.sources if run._reader.table(each, panel.steps[-1]) is not None)
                expected = run.series(f"{source}/{layer}/{view.metric}")
                base = run.series(f"{view.base}/{layer}/norm") if view.base else None
                for row, step in enumerate(panel.steps):
                    value = float(panel.values[row, column])
                    if step == BAD and name == "gradient" and layer == NAME:
                        assert value == math.inf
                    elif step in expected and math.isfinite(expected[step]):
                        wanted = expected[step] if base is None else expected[step] / base[step]
                        assert value == pytest.approx(wanted, rel=1e-6), (name, layer, step)


def test_lines_are_those_of_the_run(trained: Any) -> None:
    run = gradmon.load_run(trained[1])
    for panel_set in _panel_sets(trained):
        line = panel_set.line("grad_norm")
        assert dict(zip(line.steps, line.values, strict=True)) == pytest.approx(run.series("gradmon/grad_norm"), nan_ok=True)
        assert len(panel_set.loss()) == STEPS
        assert panel_set.rates.values == (1e-2,) * STEPS
        assert panel_set.steps == list(range(STEPS))


def test_a_heat_map_is_loud_where_something_is_not_finite_and_marks_spikes(trained: Any) -> None:
    for panel_set in _panel_sets(trained):
        heat = charts.heatmap(panel_set)
        row = heat.values[heat.rows.index(NAME)]
        assert [step for step, value in zip(heat.first, row, strict=True) if math.isinf(value)] == [BAD]
        assert max(value for value in row if math.isfinite(value)) == row[SPIKE]
        assert SPIKE in heat.marks
        few = charts.heatmap(panel_set, columns=7)
        row = few.values[few.rows.index(NAME)]
        at = next(place for place, last in enumerate(few.last) if last >= SPIKE)
        assert few.first[at] <= SPIKE <= few.last[at]
        assert row[at] == heat.values[heat.rows.index(NAME)][SPIKE]
        assert sum(math.isinf(value) for value in row) == 1


def test_the_bound_of_a_clip_is_found_by_what_clipped_steps_have_in_common(trained: Any) -> None:
    norm = next(subplot for subplot in charts.norm(_panel_sets(trained)[0]).subplots if subplot.title == "gradient norm")
    assert norm.guides == {"bound 0.5": pytest.approx(0.5, rel=1e-4)}
    loose = Series((0, 1, 2), (3.0, 4.0, 5.0))
    assert clip_bound(loose, Series((0, 1, 2), (1.0, 2.0, 3.0))) is None
    assert clip_bound(loose, loose) is None


def test_a_profile_has_its_step_and_the_range_of_all(trained: Any) -> None:
    panel_set = _panel_sets(trained)[0]
    profile, panel = charts.depth(panel_set, step=SPIKE), panel_set.panel("gradient")
    assert panel is not None
    place = profile.rows.index(NAME)
    assert profile.values[place] == profile.high[place] == float(panel.values[SPIKE, place])
    column = [value for value in panel.values[:, place].tolist() if math.isfinite(value)]
    assert profile.low[place] == min(column)
    assert math.isinf(charts.depth(panel_set, step=BAD).values[place])
    with pytest.raises(ValueError, match=r"step 1000 has no .*; the nearest that has is 59"):
        charts.depth(panel_set, step=1000)


def test_the_layer_that_stands_out_most_is_among_the_few(trained: Any) -> None:
    panel = _panel_sets(trained)[0].panel("gradient")
    assert panel is not None
    assert NAME in charts.most_deviating(panel, 1)
    assert [subplot.title for subplot in charts.layers(_panel_sets(trained)[0], names=[NAME]).subplots] == [NAME]


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("heat", {}, "kind must be one of heatmap, norm, update, depth, layers, got 'heat' of type str; did you mean heatmap?"),
        ("heatmap", {"view": "grad"}, "view must be one of gradient, .*got 'grad'"),
        ("layers", {"names": ["3.weight"]}, "there is no layer '3.weight' in it; did you mean"),
        ("heatmap", {"engine": "gnuplot"}, "engine must be plotly or matplotlib, got 'gnuplot'"),
    ],
)
def test_what_cannot_be_drawn_is_told(trained: Any, kind: str, options: dict[str, Any], told: str) -> None:
    monitor, path = trained
    for source in (monitor, gradmon.load_run(path)):
        with pytest.raises(ValueError, match=told):
            source.plot(kind, **options)
    with pytest.raises(TypeError, match="colour"):
        monitor.plot("norm", colour="red")


def test_what_was_not_measured_is_told() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, preset="minimal", on_spike=None)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="output root mean square of layers was not measured; preset='full'"):
        monitor.plot(view="activation")
    with pytest.raises(ValueError, match="updates were not measured"):
        monitor.plot("update")


# --- squeezing -------------------------------------------------------------------------------------------------------------------

CELLS = st.one_of(st.floats(1e-6, 1e6), st.just(0.0), st.just(math.nan), st.just(math.inf))


@given(values=st.lists(CELLS, min_size=1, max_size=80), columns=st.integers(1, 30))
def test_squeezing_keeps_extremes_and_whatever_is_not_finite(values: list[float], columns: int) -> None:
    panel = Panel(tuple(range(len(values))), ("a",), torch.tensor(values, dtype=torch.float64).unsqueeze(1), VIEW)
    cells = downsampled(panel, columns)
    found = cells.values[:, 0].tolist()
    assert len(found) == len(cells.first) == len(cells.last) <= columns
    assert cells.first[0] == 0
    assert cells.last[-1] == len(values) - 1
    for first, last, value in zip(cells.first, cells.last, found, strict=True):
        inside = values[first : last + 1]
        assert math.isinf(value) == any(map(math.isinf, inside))
        assert math.isnan(value) == all(map(math.isnan, inside))
        finite = [other for other in inside if math.isfinite(other)]
        assert not math.isfinite(value) or value in (min(finite), max(finite))


@given(
    values=st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), max_size=200), most=st.integers(2, 40)
)
def test_a_line_of_few_points_keeps_its_ends_its_extremes_and_its_gaps(values: list[float], most: int) -> None:
    series = Series(tuple(range(0, 3 * len(values), 3)), tuple(values))
    few = points(series, most)
    assert len(few) <= 2 * most + 2 or len(series) <= most
    assert set(few.steps) <= set(series.steps)
    assert list(few.steps) == sorted(few.steps)
    known = dict(zip(series.steps, series.values, strict=True))
    assert all(known[s] == v or math.isnan(v) for s, v in zip(few.steps, few.values, strict=True))
    finite = series.finite.values
    if finite:
        assert max(finite) in few.values
        assert min(finite) in few.values
    if any(not math.isfinite(value) for value in values):
        assert any(not math.isfinite(value) for value in few.values)


def test_a_spike_of_one_step_in_ten_thousand_is_still_there() -> None:
    values = torch.rand(10_000, 3, dtype=torch.float64) + 1.0
    values[7777, 1], values[3333, 2] = 50.0, 1e-4
    panel = Panel(tuple(range(10_000)), ("a", "b", "c"), values, VIEW)
    cells = downsampled(panel, 1000)
    assert float(cells.values[777, 1]) == 50.0
    assert float(cells.values[333, 2]) == 1e-4


# --- blocks ----------------------------------------------------------------------------------------------------------------------


def test_a_thousand_layers_are_shown_by_blocks() -> None:
    names = [f"model.layers.{block}.{part}.weight" for block in range(100) for part in "abcdefghij"]
    found = blocks(["embed.weight", *names, "head.weight"])
    assert list(found)[:3] == ["embed", "model.layers.0", "model.layers.1"]
    assert list(found)[-1] == "head"
    assert [len(places) for places in found.values()] == [1, *[10] * 100, 1]
    assert sorted(place for places in found.values() for place in places) == list(range(1002))
    assert blocks(names[:48]) == {name: [place] for place, name in enumerate(names[:48])}


def test_one_block_of_all_is_told_apart_by_what_comes_next() -> None:
    names = [f"0.{block}.{part}" for block in range(30) for part in "ab"]
    assert list(blocks(names))[:2] == ["0.0", "0.1"]


def test_hundreds_of_blocks_stand_together_with_their_neighbours() -> None:
    names = [f"fc{number}.weight" for number in range(300)]
    found = blocks(names)
    assert len(found) <= 48
    assert next(iter(found.items())) == ("fc0 to fc6", [0, 1, 2, 3, 4, 5, 6])
    assert [place for places in found.values() for place in places] == list(range(300))


def test_norms_of_a_block_add_up_and_other_values_do_not() -> None:
    values = torch.tensor([[3.0, 4.0, math.nan], [math.inf, 1.0, math.nan], [math.nan, math.nan, math.nan]], dtype=torch.float64)
    panel = Panel((0, 1, 2), ("a.x", "a.y", "a.z"), values, VIEW)
    cells = downsampled(panel, 10)
    norm = by_block(panel.view, cells.values, {"a": [0, 1, 2]})[:, 0].tolist()
    assert norm[:2] == [5.0, math.inf]
    assert math.isnan(norm[2])
    other = Panel((0, 1, 2), panel.names, values, LAYER_VIEWS["update"])
    assert by_block(other.view, cells.values, {"a": [0, 1, 2]})[0, 0] == 4.0


# --- figures ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.parametrize("kind", list(charts.CHARTS))
def test_both_engines_draw_every_kind_of_a_run_and_of_a_monitor(trained: Any, kind: str, tmp_path: Path) -> None:
    monitor, path = trained
    drawn = [source.plot(kind) for source in (monitor, gradmon.load_run(path))]
    assert drawn[0].to_plotly_json()["data"][0]["type"] == drawn[1].to_plotly_json()["data"][0]["type"]
    assert drawn[0].layout.title.text == drawn[1].layout.title.text
    picture = tmp_path / "picture.png"
    monitor.plot(kind, engine="matplotlib").savefig(picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@given(st.lists(st.integers(0, 10_000), unique=True), st.integers(1, 50))
def test_marks_that_lie_close_are_one_stretch_and_none_is_lost(marks: list[int], most: int) -> None:
    marks.sort()
    found = merged_marks(marks, most)
    assert all(any(first <= step <= last for first, last in found) for step in marks)
    assert {step for stretch in found for step in stretch} <= set(marks)
    assert len(found) <= most + 1
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


def test_the_edges_of_the_band_are_those_of_all_steps() -> None:
    low, high = [1e-4] * 5000, [1e-3] * 5000
    low[1234], high[4321] = 1e-9, 50.0
    steps = tuple(range(5000))
    lower, upper = charts._band(Series(steps, tuple(low)), Series(steps, tuple(high)))
    assert (min(lower.values), max(upper.values), len(lower)) == (1e-9, 50.0, 1667)


def test_what_was_not_measured_has_no_strip_of_its_own() -> None:
    records = [StepRecord(step, 0.0, True, {Key("", "loss", ""): 1.0}) for step in range(3)]
    assert [subplot.title for subplot in charts.norm(PanelSet(ValueSource(records))).subplots] == ["loss"]


def test_gradients_that_were_seen_only_at_the_step_are_not_called_unclipped() -> None:
    model = nn.Linear(3, 1)
    monitor = gradmon.ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    for step in range(3):
        monitor.begin_step(step)
        model(torch.ones(2, 3)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        monitor.monitor_gradients()
        monitor.end_step()
    panel_set = PanelSet(ValueSource(monitor._runtime.pipeline.history.sampled()))
    assert charts.heatmap(panel_set).title == "gradient norm at the step"
    assert "clipped" not in dict(panel_set.panels())


def test_a_layer_that_was_frozen_at_first_comes_in_where_it_belongs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike=None)
    for step in range(8):
        if step == 4:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    run = gradmon.load_run(tmp_path)
    assert run.tensors("gradient") == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert charts.heatmap(PanelSet(run._reader)).rows == ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.mark.extra
def test_a_spike_stands_above_its_cell_and_outside_of_the_layers() -> None:
    pytest.importorskip("plotly")
    from torch_gradmon.analysis.plots.plotly import figure

    heat = Heatmap("norm", ("a", "b"), (0, 100, 200), (99, 199, 210), ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)), True, (150,))
    drawn = figure(heat).to_plotly_json()
    cells, marks = drawn["data"]
    assert list(cells["x"]) == [-0.5, 99.5, 199.5, 210.5]
    assert list(marks["x"]) == [150]
    assert drawn["layout"]["yaxis"]["range"] == [1.5, -0.5]
    assert drawn["layout"]["yaxis2"] == {"overlaying": "y", "range": [0, 1.0], "visible": False, "fixedrange": True}


@pytest.mark.extra
def test_hundreds_of_spikes_are_few_shapes_and_names_are_no_html() -> None:
    pytest.importorskip("plotly")
    from torch_gradmon.analysis.plots.plotly import figure

    line = Line("host <b>", Series(tuple(range(3000)), (1.0,) * 3000), elements.BLUE)
    marks = (5, 700, *range(1000, 3000))
    drawn = figure(LineChart("norms", (Subplot("one", (line,)), Subplot("two", (line,))), marks))
    shapes = drawn.layout.shapes
    assert [(shape.type, shape.x0, shape.x1, shape.yref) for shape in shapes] == [
        (kind, first, last, f"y{axis} domain")
        for axis in ("", "2")
        for kind, first, last in (("line", 5, 5), ("line", 700, 700), ("rect", 1000, 2999))
    ]
    assert {trace.name for trace in drawn.data} == {"host &lt;b&gt;"}


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("layers", {"names": "2.weight"}, "names must be a list of names"),
        ("layers", {"names": [3]}, "names must be a list of names"),
        ("heatmap", {"columns": "x"}, "columns='x' must be a positive int"),
        ("heatmap", {"rows": 0}, "rows=0 must be a positive int"),
        ("depth", {"step": "3"}, "step must be an int"),
    ],
)
def test_odd_options_are_refused(trained: Any, kind: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)):
        trained[0].plot(kind, **options)


def test_a_monitor_that_has_seen_nothing_says_so() -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no step is known yet"):
        monitor.plot()


@pytest.mark.extra
@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_matplotlib_paints_pink_what_is_not_finite_and_leaves_out_what_was_not_measured(odd: float) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb

    from torch_gradmon.analysis.plots.matplotlib import figure as matplotlib_figure

    heat = Heatmap("norm", ("a", "b"), (0, 1, 2), (0, 1, 2), ((1.0, odd, 10.0), (0.1, 1.0, 100.0)), True)
    drawn = matplotlib_figure(heat)
    values, *loud = drawn.axes[0].collections
    assert values.get_array().tolist() == [[0.0, None, 1.0], [-1.0, 0.0, 2.0]]
    assert [mesh.get_array().tolist() for mesh in loud] == ([[[None, 1.0, None], [None] * 3]] if odd == math.inf else [])
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).reshape(-1, 4)[:, :3]
    pink = torch.tensor([round(255 * part) for part in to_rgb(elements.NONFINITE)], dtype=torch.uint8)
    assert bool((pixels == pink).all(1).sum() > 1000) == (odd == math.inf)


@pytest.mark.extra
def test_matplotlib_marks_the_steps_of_a_line_that_are_not_finite() -> None:
    pytest.importorskip("matplotlib")
    from torch_gradmon.analysis.plots.matplotlib import figure as matplotlib_figure

    line = Line("norm", Series((0, 1, 2, 3), (1.0, math.nan, 4.0, math.inf)), elements.BLUE)
    drawn = matplotlib_figure(LineChart("norms", (Subplot("norm", (line,)),)))
    curve, crosses = drawn.axes[0].lines
    assert [None if math.isnan(y) else y for y in curve.get_ydata()] == [1.0, None, 4.0, None]
    assert (list(crosses.get_xdata()), list(crosses.get_ydata())) == ([1, 3], [4.0, 4.0])


@pytest.mark.extra
def test_a_figure_shows_the_values_and_takes_no_name_for_html() -> None:
    from torch_gradmon.analysis.plots.plotly import figure

    heat = Heatmap("t", ("<b>x</b>", "y"), (0, 5), (4, 5), ((1.0, math.inf), (0.0, math.nan)), True, (5,))
    drawn = figure(heat)
    assert [list(row) for row in drawn.data[0].z] == [[0.0, None], [None, None]]
    odd, zero = ([list(row) for row in trace.z] for trace in drawn.data[1:] if trace.type == "heatmap")
    assert odd == [[None, 1], [None, None]]
    assert zero == [[None, None], [1, None]]  # exactly 0 is not empty
    assert drawn.data[0].text[0][0] == "&lt;b&gt;x&lt;/b&gt;<br>steps 0 to 4: 1"
    assert drawn.data[0].text[1][1] == "y<br>step 5: not measured"
    assert drawn.data[0].text[0][1].endswith("NaN or infinite")
    (spike,) = [trace for trace in drawn.data if trace.name == "spike"]
    assert list(spike.x) == [5]
    assert list(drawn.layout.yaxis.ticktext) == ["&lt;b&gt;x&lt;/b&gt;", "y"]


@pytest.mark.extra
def test_a_guide_on_a_logarithmic_axis_has_its_words_at_its_height(trained: Any) -> None:
    drawn = trained[0].plot("update")
    (words,) = [note for note in drawn.layout.annotations if "0.001" in note.text]
    assert words.y == pytest.approx(-3)


@pytest.mark.extra
def test_the_block_of_the_documentation_runs(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "guide" / "plots.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(figure = monitor\.plot.*?)```", text, re.DOTALL)
    assert block is not None
    exec(block[1], {"monitor": trained[0]})
    assert Path("depth.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.extra
def test_a_figure_goes_to_wandb(trained: Any, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="pictures", dir=tmp_path)
    run.log({"heatmap": trained[0].plot("heatmap")})
    run.finish()
    (stored,) = tmp_path.rglob("media/plotly/heatmap_*.plotly.json")
    assert json.loads(stored.read_text(encoding="utf-8"))["data"][0]["type"] == "heatmap"
