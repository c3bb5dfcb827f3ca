"""What a person does in the page of a run, or of two: each button is pressed, each thing that can be clicked leads to where it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests.browser import available, resize, wait_for
from torch_gradmon.analysis.plots import charts
from torch_gradmon.analysis.plots.charts import PanelSet
from torch_gradmon.analysis.run import read_run

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from torch_gradmon.analysis.report.page import (  # noqa: E402
    LOG_SCALE,
    write,
    write_both,
)

pytestmark = [pytest.mark.extra, pytest.mark.skipif(not available(), reason="there is no Chromium")]

STEPS, SPIKE, LAYER = 60, 45, "layers.5.weight"
WIDTHS = (1280, 420)
#: What the buttons of a chart say, in their order.
BUTTONS = ["Zoom", "Pan", "Reset axes", "Download plot as a PNG", "Download as SVG"]
CHARTS = ("heat", "norm", "depth", "update", "layers")


class Net(nn.Module):
    """Eight residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def train(path: Path, limit: float = 1.0) -> Path:
    """In one step the gradient of one layer is far too large, after which outputs are measured for some steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    is_spoiled = [False]
    model.get_parameter(LAYER).register_hook(lambda gradient: gradient * (1e4 if is_spoiled[0] else 1))  # type: ignore[no-untyped-call]
    for step in range(STEPS):
        is_spoiled[0] = step == SPIKE
        x = torch.randn(16, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    monitor.detach()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("runs")
    return train(place / "before"), train(place / "after", 0.5)


class Page:
    """A page with all of its charts drawn."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        self._size(WIDTHS[0])
        driver.get(path.as_uri())
        wait_for(lambda: self.js("return document.body.dataset.ready"))
        for chart in CHARTS:
            self.js(f"document.getElementById('{chart}').scrollIntoView()")
            wait_for(lambda chart=chart: self.all(f"#{chart} .modebar-btn"))

    def _size(self, width: int) -> None:
        resize(self.driver, width, 800)

    def resize(self, width: int) -> None:
        """Make the window as wide, and go to its top."""
        self._size(width)
        self.js("scrollTo(0, 0)")
        svg = "one.querySelector('.main-svg').clientWidth"
        fits = f"return [...document.querySelectorAll('.figure')].every((one) => {svg} === one.clientWidth)"
        wait_for(lambda: self.js(fits))

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def is_in_sight(self, selector: str) -> bool:
        top, bottom, height = self.js(
            "const { top, bottom } = document.querySelector(arguments[0]).getBoundingClientRect(); return [top, bottom, innerHeight]",
            selector,
        )
        return bool(-10 <= top < bottom <= height)

    def cell(self, step: float, row: int) -> tuple[float, float]:
        """Where in the window a cell of the map is."""
        x, y = self.js(
            "const heat = document.getElementById('heat'), { xaxis, yaxis } = heat._fullLayout;"
            "const { left, top } = heat.getBoundingClientRect();"
            "return [left + xaxis._offset + xaxis.d2p(arguments[0]), top + yaxis._offset + yaxis.d2p(arguments[1])]",
            step,
            row,
        )
        return x, y

    def click_cell(self, step: float, row: int) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        self.js("document.getElementById('s-heat').scrollIntoView()")
        x, y = self.cell(step, row)
        for aside in (9, 0):  # to it, from its neighbour: plotly looks where the pointer is as it moves
            chain = ActionChains(self.driver)
            chain.w3c_actions.pointer_action.move_to_location(round(x) + aside, round(y))
            chain.perform()
        wait_for(lambda: self.all("#heat .hoverlayer .hovertext"))
        chain = ActionChains(self.driver)
        chain.w3c_actions.pointer_action.click()
        chain.perform()

    @property
    def framed(self) -> list[tuple[str, float]]:
        """The rows whose cell has a frame, and where on the axis."""
        found = self.js(
            "const { layout } = document.getElementById('heat');"
            "return layout.shapes.map(({ y0, xanchor }) => [layout.yaxis.ticktext[y0 + 0.5], xanchor])"
        )
        return [(row.removeprefix("<b>").removesuffix("</b>"), at) for row, at in found]

    def assert_silent(self) -> None:
        assert self.driver.get_log("browser") == []
        assert self.js("return performance.getEntriesByType('resource').length") == 0


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request: pytest.FixtureRequest, runs: tuple[Path, Path], driver: Any) -> Page:
    if request.param == "one run":
        return Page(driver, write(runs[0]))
    return Page(driver, write_both(*runs, gradmon.diff_runs(*runs), runs[1] / "both.html"))


def test_every_button_of_every_chart_is_ours_and_stays_in_the_page(page: Page, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    address = page.driver.current_url
    for chart in CHARTS:
        buttons = page.all(f"#{chart} .modebar-btn")
        assert [button.get_attribute("data-title") for button in buttons] == BUTTONS, chart
        for button in buttons:
            page.js("arguments[0].scrollIntoView({ block: 'center' })", button)
            button.click()
    assert page.all(".modebar-btn--logo, [class*=cloud], [class*=dialog]") == []
    assert page.js("return [...document.links].every((link) => link.protocol === 'file:')")
    assert page.all("form, iframe, script[src], link[rel=stylesheet]") == []
    for ending in ("png", "svg"):
        wait_for(lambda ending=ending: len(list(tmp_path.glob(f"*.{ending}"))) == len(CHARTS))
    assert all(ElementTree.parse(drawing).getroot().tag.endswith("}svg") for drawing in tmp_path.glob("*.svg"))
    assert {path.stem.rpartition("-")[2] for path in tmp_path.glob("*.png")} == set(CHARTS)
    assert (page.driver.current_url, len(page.driver.window_handles)) == (address, 1)
    page.assert_silent()


_OVERLAPS = """
const overlaps = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const shown = (rect) => rect.width > 0 && rect.height > 0;
const boxes = [];
const blocks = "h2, p, .figure svg text";  // of which the words are looked at: a block is as wide as the page
for (const element of document.querySelectorAll(blocks)) {
  const words = document.createRange();
  words.selectNodeContents(element);
  boxes.push([element, words]);
}
const others = "label, output, summary, input, button:not(.modebar-btn), a:not(.modebar-btn)";
for (const element of document.querySelectorAll(others)) boxes.push([element, element]);
const bars = [...document.querySelectorAll(".modebar-btn")].map((button) => button.getBoundingClientRect()).filter(shown);
const covered = boxes.filter(([, box]) => [...box.getClientRects()].some((rect) => shown(rect) && bars.some((bar) => overlaps(bar, rect))));
return [bars.length, boxes.length, covered.map(([element]) => element.textContent || element.id)];
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tool_bars_cover_no_words(page: Page, width: int) -> None:
    page.resize(width)
    for view in page.all("#views button"):
        page.js("arguments[0].click()", view)
        bars, words, covered = page.js(_OVERLAPS)
        assert bars == len(BUTTONS) * len(CHARTS)
        assert words > 100
        assert covered == [], view.text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_a_cell_brings_the_chart_of_its_step_into_sight(page: Page, width: int) -> None:
    page.resize(width)
    assert not page.is_in_sight("#h-depth")
    page.js("document.querySelector('#views button').click()")
    page.click_cell(20, 7)
    wait_for(lambda: page.is_in_sight("#h-depth"))
    assert page.is_in_sight("#step")
    assert page.one("#which").text == "step 20"
    assert page.framed == [("layers.3.bias", 20)]
    sizes = page.js("return document.getElementById('depth').data.find((trace) => trace.marker?.size?.length).marker.size")
    assert [place for place, size in enumerate(sizes) if size > 6] == [7]
    page.one("#s-depth a[href='#s-heat']").click()
    wait_for(lambda: page.is_in_sight("#h-heat"))
    page.assert_silent()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_finding_leads_to_its_cell(page: Page, width: int) -> None:
    from selenium.webdriver.common.keys import Keys

    page.resize(width)
    link = [link for link in page.all(".finding h3 a") if LAYER in link.text][-1]
    page.js("document.querySelector('#views button:last-child').click()")
    page.click_cell(20, 7)
    page.js("arguments[0].focus()", link)
    link.send_keys(Keys.ENTER)
    assert page.framed == [(LAYER, SPIKE)]
    bold = f"<b>{LAYER}</b>"
    _, y = page.cell(SPIKE, page.js("return document.getElementById('heat').layout.yaxis.ticktext.indexOf(arguments[0])", bold))
    assert 0 < y < 800
    assert page.js("return document.activeElement.id") == "h-heat"
    runs = [run.text for run in page.all(".finding .run")]
    assert [side.text for side in page.all("#sides [aria-checked=true]")] == runs[-1:]
    page.assert_silent()


def test_the_address_names_the_place_that_is_looked_at_and_leads_there_again(page: Page) -> None:
    page.resize(WIDTHS[0])
    page.js("document.querySelector('#views button').click()")
    page.click_cell(20, 7)
    address = page.js("return location.hash")
    assert sorted(address.removeprefix("#").split("&"))[0] == "layer=layers.3.bias"
    page.click_cell(30, 2)
    assert page.framed != [("layers.3.bias", 20)]
    page.js("location.hash = arguments[0]", address)
    wait_for(lambda: page.framed == [("layers.3.bias", 20)])
    page.js("location.hash = 'layer=layers.5&step=nonsense&view=none'")  # what is not there is not looked for
    wait_for(lambda: [name for name, _ in page.framed] == ["layers.5.weight", "layers.5.bias"])
    page.assert_silent()


def test_a_click_where_nothing_was_measured_goes_nowhere(page: Page) -> None:
    page.resize(WIDTHS[0])
    for side in page.all("#sides button:last-child"):
        side.click()
    next(button for button in page.all("#views button") if "output" in button.text).click()
    assert page.one("#sparse").text.startswith(f"Measured in steps {SPIKE + 1} to {SPIKE + 3} only")
    before = page.one("#which").text
    page.click_cell(20, 7)
    assert page.is_in_sight("#h-heat")
    assert page.one("#which").text == before
    page.click_cell(SPIKE + 2, 7)
    wait_for(lambda: page.is_in_sight("#h-depth"))
    assert page.one("#which").text == f"step {SPIKE + 2}"


def test_columns_say_how_they_are_sorted_and_keys_sort_them(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    arrows = (
        "return [...document.querySelectorAll('#table th button')].map((button) => getComputedStyle(button, '::after').content)"
    )
    states = "return [...document.querySelectorAll('#table th')].map((cell) => cell.ariaSort)"
    column = "return [...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[1].textContent)"
    none, falls, rises = '" \u2195"', '" \u25bc"', '" \u25b2"'
    count = len(page.all("#table th"))
    assert page.js(arrows) == [none] * count
    assert set(page.js(states)) == {"none"}
    page.js("arguments[0].focus()", page.all("#table th button")[1])
    for key, arrow, state in ((Keys.ENTER, falls, "descending"), (Keys.SPACE, rises, "ascending")):
        page.driver.switch_to.active_element.send_keys(key)
        assert page.js(arrows) == [none, arrow, *[none] * (count - 2)]
        assert page.js(states) == ["none", state, *["none"] * (count - 2)]
        values = [float(value) for value in page.js(column)]
        assert values == sorted(values, reverse=state == "descending")
        assert len(set(values)) > 1


@pytest.mark.parametrize("start", [(1280, 800), (390, 844)])
def test_heat_map_keeps_its_height_through_resizes(start: tuple[int, int], driver: Any, runs: tuple[Path, Path]) -> None:
    report = write(runs[0], runs[0] / "resized.html")
    resize(driver, *start)
    driver.get(report.as_uri())
    wait_for(lambda: driver.execute_script("return document.body.dataset.ready"))
    sizes = (
        "const heat = document.getElementById('heat'), svg = heat.querySelector('.main-svg');"
        "return [heat.clientHeight, svg.clientHeight, svg.clientWidth === heat.clientWidth,"
        " document.getElementById('legend').getBoundingClientRect().top >= heat.getBoundingClientRect().bottom]"
    )
    first = wait_for(lambda: (found := driver.execute_script(sizes))[2] and found)
    assert first[0] == first[1] >= 300
    for size in ((1200, 800), (700, 500), (390, 844), (844, 390), (1280, 800)):
        resize(driver, *size)
        wait_for(lambda size=size: driver.execute_script("return innerWidth") == size[0] and driver.execute_script(sizes)[2])
        assert driver.execute_script(sizes) == first, size


def test_facts_are_folded_on_a_telephone_alone(driver: Any, runs: tuple[Path, Path]) -> None:
    report = write(runs[0], runs[0] / "folded.html")
    for width, is_open in ((390, False), (1280, True)):
        resize(driver, width, 844)
        driver.get(report.as_uri())
        wait_for(lambda: driver.execute_script("return document.body.dataset.ready"))
        assert driver.execute_script("return document.getElementById('about').open") is is_open
        assert driver.find_element("css selector", "#about summary").is_displayed() is not is_open
        assert driver.execute_script("return document.getElementById('findings').getBoundingClientRect().top") < 200


def test_long_run_can_be_seen_relative_to_its_last_steps(driver: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "long", on_spike=None)
    for step in range(300):
        optimizer.zero_grad()
        loss = model[1](model[0](torch.randn(16, 2)) * (0 if step == 250 else 1)).square().mean()
        (loss * 10 ** (-step / 150) * (200 if step == 200 else 1)).backward()
        optimizer.step()
    monitor.detach()
    page = write(tmp_path / "long", progress=False)
    driver.get(page.as_uri())
    wait_for(lambda: driver.execute_script("return document.body.dataset.ready"))
    driver.find_element("css selector", "#scales [data-key=recent]").click()
    z, text = driver.execute_script("const { z, text } = document.getElementById('heat').data[0]; return [z, text]")
    calm = [abs(value) for step, value in enumerate(z[0]) if value is not None and step not in (0, 200)]
    assert sorted(calm)[len(calm) // 2] < 0.5  # a fall by two orders of magnitude is no departure
    assert z[0][200] > 1
    assert "times its median of the 100 measured steps before" in text[0][200]
    assert text[0][250].endswith("exactly 0")
    assert driver.find_element("id", "legend").text == "exactly 0"
    assert driver.get_log("browser") == []


def test_the_map_is_relative_as_the_pictures_are_or_shows_values(page: Page, runs: tuple[Path, Path]) -> None:
    page.resize(WIDTHS[0])
    page.all("#views button")[0].click()
    scales, sides = page.one("#scales"), page.all("#sides button")
    if sides:  # how far two runs are apart is relative to nothing
        sides[0].click()
        assert not scales.is_displayed()
        sides[1].click()
    assert scales.is_displayed()
    assert page.one("#scales [aria-checked=true]").text == "relative to the row's median"
    shown = "return document.getElementById('heat').data[0]"
    relative: list[list[float | None]] = page.js(f"{shown}.z")
    heat = charts.heatmap(PanelSet(read_run(runs[0])))
    for found, row in zip(relative, heat.shades.tolist(), strict=True):
        assert [math.nan if value is None else value for value in found] == pytest.approx(row, abs=2 / LOG_SCALE, nan_ok=True)
    text = page.js(f"{shown}.text[arguments[0]][arguments[1]]", heat.rows.index(LAYER), SPIKE)
    assert text.startswith(f"{LAYER}<br>step {SPIKE}: ")
    assert " times its median of " in text
    assert [button.text for button in page.all("#scales button") if button.is_displayed()] == [
        "relative to the row's median",
        "values",
    ]
    page.one("#scales [data-key=values]").click()
    assert page.js(f"{shown}.z[0]") == pytest.approx([math.log10(value) for value in heat.values[0]], abs=1 / LOG_SCALE)
    assert page.js(f"{shown}.zmax") is None
    for view in page.all("#views button"):  # what was chosen stays
        view.click()
        assert page.one("#scales [aria-checked=true]").text == "values"
    page.assert_silent()
