"""The page of two runs over each other: its numbers, and in a real browser."""

from __future__ import annotations

import base64
import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests.browser import available, data_of, open_report, wait_for
from torch_gradmon.analysis.plots import charts
from torch_gradmon.analysis.plots.charts import PanelSet, RunPair, relative
from torch_gradmon.analysis.plots.elements import downsampled
from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.main import main

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from torch_gradmon.analysis.report.page import LOG_SCALE  # noqa: E402

pytestmark = pytest.mark.extra

HOSTILE = "</script><img src=x onerror=alert(1)>"
STEPS, SLIP = 40, 25


class _Net(nn.Module):
    def __init__(self, last: str = HOSTILE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.add_module(last, nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        head: torch.Tensor = list(self.children())[-1](x)
        return head


def _train(path: Path, limit: float, last: str = HOSTILE) -> Path:
    torch.manual_seed(0)
    model = _Net(last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=path, on_spike=None)
    for step in range(STEPS):
        x = torch.randn(16, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit if step >= SLIP else 1.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    monitor.detach()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("runs")
    return _train(place / "before", 1.0), _train(place / "after", 0.25)


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path]) -> Path:
    target = runs[1] / "both.html"
    assert main(["diff", *map(str, runs), "--output", str(target)]) == 1
    return target


def _rows(view: dict[str, Any], side: str) -> list[list[int]]:
    codes, width = array("h", base64.b64decode(view["sides"][side]["cells"])), len(view["first"])
    return [list(codes[place * width : (place + 1) * width]) for place in range(len(view["names"]))]


def test_each_side_holds_the_values_of_its_run_and_the_difference_that_of_both(runs: tuple[Path, Path], page: Path) -> None:
    data = data_of(page)
    view = data["views"]["clipped"]
    both = [gradmon.load_run(path).series(f"gradient/{view['names'][3]}/norm") for path in runs]
    for side, series in zip(("first", "second"), both, strict=True):
        assert [10 ** (code / LOG_SCALE) for code in _rows(view, side)[3]] == pytest.approx(list(series.values()), rel=2e-3)
    apart = _rows(view, "apart")[3]
    for step, (a, b) in enumerate(zip(*(series.values() for series in both), strict=True)):
        if step < SLIP:
            assert apart[step] == data["codes"]["zero"], step
        else:
            assert 10 ** (apart[step] / LOG_SCALE) == pytest.approx(abs(a - b) / max(a, b), rel=2e-3), step
    assert data["marks"] == [SLIP]
    assert data["sides"] == {"apart": "difference", "first": "before", "second": "after"}


def test_relative_differences() -> None:
    a = torch.tensor([1.0, 2.0, 0.0, 0.0, math.inf, math.inf, math.nan, 5.0], dtype=torch.float64)
    b = torch.tensor([1.0, 1.5, 0.0, 3.0, math.inf, 1.00, 1.000000, math.nan], dtype=torch.float64)
    wanted = [0.0, 0.25, 0.0, 1.0, 0.0, math.inf, math.nan, math.nan]
    assert relative(a, b).tolist() == pytest.approx(wanted, nan_ok=True)
    assert torch.equal(relative(a, b).nan_to_num(nan=-1), relative(b, a).nan_to_num(nan=-1))


def test_layers_and_steps_of_either_run_stand_and_renamed_ones_together(tmp_path: Path) -> None:
    first, second = _train(tmp_path / "a", 1.0, "head"), _train(tmp_path / "b", 1.0, "last")
    panel_sets = [PanelSet(read_run(path), path.name) for path in (first, second)]
    panels = RunPair(panel_sets[0], panel_sets[1]).panels("gradient")
    assert panels is not None
    assert panels.difference.names[-4:] == ("head.weight", "head.bias", "last.weight", "last.bias")
    assert panels.difference.values[:, -4:].isnan().all()
    assert (panels.difference.values[:, :-4] == 0).all()
    renamed = RunPair(panel_sets[0], panel_sets[1], lambda name: name.replace("head", "last")).panels("gradient")
    assert renamed is not None
    assert len(renamed.difference.names) == 10
    assert (renamed.difference.values == 0).all()


def test_squeezed_columns_hold_the_largest_difference(runs: tuple[Path, Path]) -> None:
    panel_sets = [PanelSet(read_run(path), path.name) for path in runs]
    panels = RunPair(panel_sets[0], panel_sets[1]).panels("clipped")
    assert panels is not None
    few = downsampled(panels.difference, 4)
    wanted = panels.difference.values.reshape(4, STEPS // 4, -1).amax(1)
    assert torch.equal(few.values, wanted)


def test_lines_of_both_runs_share_a_strip(runs: tuple[Path, Path]) -> None:
    panel_sets = [PanelSet(read_run(path), path.name) for path in runs]
    pair = RunPair(panel_sets[0], panel_sets[1])
    for subplot in (
        *charts.pair_norm(pair).subplots,
        *charts.pair_update(pair).subplots,
        *charts.pair_layers(pair, ["layers.0.bias"]).subplots,
    ):
        assert [line.name for line in subplot.lines] == ["before", "after"]
        assert [line.is_dashed for line in subplot.lines] == [False, True]
    (loss, *_) = charts.pair_norm(pair).subplots
    for line, path in zip(loss.lines, runs, strict=True):
        assert dict(zip(line.series.steps, line.series.values, strict=True)) == gradmon.load_run(path).series("loss")


def test_the_layer_that_lost_its_gradient_is_named(tmp_path: Path) -> None:
    def train(path: Path, slips: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
        for step in range(12):
            x = torch.randn(8, 3)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if slips and step >= 7:
                model[0].bias.grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
        monitor.detach()
        return path

    found = gradmon.diff_runs(train(tmp_path / "a", False), train(tmp_path / "b", True))
    assert found.onset is not None
    assert found.onset.step == 7
    assert found.interpretation.startswith("In step 7 the second run lacks gradient/0.bias")


def test_two_runs_that_are_the_same_make_a_page_too(runs: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "same.html"
    assert main(["report", str(runs[0]), str(runs[0]), "--output", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert "They do not diverge" in text
    assert data_of(target)["marks"] == []
    assert len(set(data_of(target)["sides"].values())) == 3


def test_the_second_run_has_the_page_where_no_place_is_named(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, runs)]) == 0
    assert str(runs[1] / "against-before.html") in capsys.readouterr().out
    assert (runs[1] / "against-before.html").stat().st_size > 1e6
    assert main(["report", str(runs[0]), str(runs[0].parent / "nowhere")]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_no_difference(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["diff", str(runs[0]), str(runs[0]), "--output", str(tmp_path)]) == 2
    assert main(["diff", str(runs[0]), str(runs[0]), "--output", "/proc/no/page.html"]) == 2


def test_json_stays_json_beside_a_page(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, runs), "--json", "--output", str(tmp_path / "x.html")]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["first"]["step"] == SLIP
    assert "x.html" in found.err


# --- in a browser ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def window(driver: Any, page: Path) -> Any:
    open_report(driver, page)
    return driver


@pytest.mark.skipif(not available(), reason="there is no Chromium")
def test_a_reader_sees_where_they_part_and_looks_at_each_side(window: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    verdict = window.find_element("css selector", "#against .verdict")
    assert f"diverge in step {SLIP}" in verdict.text
    assert verdict.location["y"] < 200
    shown = "const [first] = document.getElementById('heat').data; return JSON.stringify(first.z)"
    seen = {}
    for side in window.find_elements("css selector", "#sides button"):
        side.click()
        assert side.get_attribute("aria-checked") == "true"
        seen[side.text] = window.execute_script(shown)
    assert list(seen) == ["difference", "before", "after"]
    assert len(set(seen.values())) == 3
    window.find_element("css selector", "#sides button:last-child").send_keys(Keys.ARROW_RIGHT)
    assert window.find_element("css selector", "#sides [aria-checked=true]").text == "difference"
    assert window.execute_script(shown) == seen["difference"]
    for view in window.find_elements("css selector", "#views button"):
        view.click()
        assert window.execute_script("return document.getElementById('heat').data[0].z.length") > 0

    def at_the_end() -> bool:
        window.execute_script("window.scrollBy(0, 400)")
        return bool(window.execute_script("return innerHeight + scrollY >= document.documentElement.scrollHeight - 2"))

    wait_for(at_the_end)
    wait_for(lambda: window.execute_script("return document.getElementById('layers').data !== undefined"))
    names = "return document.getElementById(arguments[0]).data.map((trace) => trace.name)"
    for figure in ("norm", "depth", "update", "layers"):
        assert {"before", "after"} <= set(window.execute_script(names, figure)), figure
    assert window.execute_script("return document.getElementById('which').textContent") == f"step {SLIP}"
    assert window.get_log("browser") == []
    assert window.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert window.execute_script("return document.querySelectorAll('img[src=x]').length") == 0


@pytest.mark.skipif(not available(), reason="there is no Chromium")
def test_map_of_differences_is_blank_where_runs_agree(window: Any) -> None:
    painted = (
        "const heat = document.getElementById('heat'), before = arguments[0];"
        "const rows = heat.data.flatMap((map) => map.z ?? []);"
        "return rows.flatMap((row) => row.slice(0, before)).filter((cell) => cell !== null).length"
    )
    assert window.find_element("css selector", "#sides [aria-checked=true]").text == "difference"
    assert window.execute_script(painted, SLIP) == 0
    assert "exactly 0" not in window.find_element("id", "legend").text
