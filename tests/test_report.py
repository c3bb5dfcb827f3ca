"""The page of a run: in a real browser, without a network, whatever the names in it are."""

from __future__ import annotations

import base64
import math
import re
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests import forked
from tests.browser import available, data_of, open_report, wait_for

pytestmark = pytest.mark.extra
for package in ("plotly", "jinja2"):
    pytest.importorskip(package)

from torch_gradmon.analysis.report.page import (  # noqa: E402
    LOG_SCALE,
    NONE,
    NONFINITE,
    ZERO,
    packed,
    write,
)

in_browser = pytest.mark.skipif(not available(), reason="there is no Chromium")
HOSTILE = "</script><img src=x onerror=alert(1)>"
BLOCKS, STEPS, SPIKE, LOUDEST = 60, 60, 45, 30


class _Named(nn.Module):
    """Layers whose names hold what HTML is made of, and more of them than are shown one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(BLOCKS))
        self.add_module(HOSTILE.replace(".", ""), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return dict(self.named_children())[HOSTILE](x)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    torch.manual_seed(0)
    model = _Named()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    factor = 1.0
    model.layers[LOUDEST].weight.register_hook(lambda gradient: gradient * factor)
    for step in range(STEPS):
        x = torch.randn(16, 3)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        factor = 1e5 if step == SPIKE else 1.0
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    monitor.detach()
    return path


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write(run)


@pytest.fixture
def window(driver: Any, page: Path) -> Any:
    open_report(driver, page)
    return driver


def _codes(text: str) -> list[int]:
    return list(array("h", base64.b64decode(text)))


def test_codes_give_values_back() -> None:
    values = torch.tensor([[1e-7, 3.5, 0.0], [math.inf, math.nan, 1e9]], dtype=torch.float64)
    codes = _codes(packed(values, True))
    assert [10 ** (code / LOG_SCALE) for code in (codes[0], codes[1], codes[5])] == pytest.approx([1e-7, 3.5, 1e9], rel=2e-3)
    assert (codes[2], codes[3], codes[4]) == (ZERO, NONFINITE, NONE)
    assert [code / 30000 for code in _codes(packed(torch.tensor([[0.25, 0.0]]), False))] == pytest.approx([0.25, 0.0])


def test_the_page_holds_the_values_of_the_run(run: Path, page: Path) -> None:
    view = data_of(page)["views"]["gradient"]
    source = gradmon.load_run(run)
    width, codes = len(view["first"]), _codes(view["sides"]["run"]["cells"])
    assert view["first"] == view["last"] == list(range(STEPS))
    for place in (0, 5, len(view["names"]) - 1):
        series = source.series(f"gradient_before_clip/{view['names'][place]}/norm")
        row = codes[place * width : (place + 1) * width]
        assert [10 ** (code / LOG_SCALE) for code in row] == pytest.approx(list(series.values()), rel=2e-3)


def test_blocks_are_offered_where_there_are_many_layers(page: Path) -> None:
    view = data_of(page)["views"]["gradient"]
    assert len(view["names"]) == 2 * BLOCKS + 4
    assert [name for name, _ in view["blocks"]][:3] == ["first", "layers.0", "layers.1"]
    assert len(_codes(view["sides"]["run"]["ofBlocks"])) == len(view["blocks"]) * len(view["first"])


def test_nothing_in_it_comes_from_elsewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", text) == [
        '<script type="application/json" id="data">',
        '<script type="text/plain" id="plotly">',
        "<script>",
    ]
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?http", text.partition("</style>")[0])
    assert "default-src 'none'" in text
    assert HOSTILE not in text


@in_browser
def test_a_reader_finds_what_is_wrong_without_scrolling_and_clicks_through(window: Any) -> None:
    top = window.execute_script(
        "const box = document.querySelector('.finding').getBoundingClientRect(); return [box.top, box.bottom, innerHeight]"
    )
    assert 0 <= top[0] < top[1] < min(top[2], 800)
    assert f"step {SPIKE}" in window.find_element("css selector", ".finding h3").text
    rows = "return document.getElementById('heat').data[0].y.length"
    assert window.execute_script(rows) == BLOCKS + 2
    window.execute_script("document.getElementById('blocks').open = true")
    window.find_element("xpath", "//div[@id='open']/button[text()='layers.7']").click()
    assert window.execute_script(rows) == BLOCKS + 3
    window.find_element("xpath", "//div[@id='open']/button[1]").click()
    assert window.execute_script(rows) == 2 * BLOCKS + 4
    for button in window.find_elements("css selector", "#views button"):
        window.execute_script("arguments[0].click()", button)
        assert button.get_attribute("aria-checked") == "true"
        assert window.execute_script("return document.getElementById('heat').data[0].z.length") > 0
    _scroll(window)
    for name in ("heat", "norm", "depth", "update", "layers"):
        assert window.execute_script(f"return document.getElementById('{name}').data.length") > 0, name
    window.execute_script("const s = document.getElementById('step'); s.value = '3'; s.dispatchEvent(new Event('input'))")
    assert window.find_element("id", "which").text == "step 3"
    search = window.find_element("id", "search")
    search.send_keys("layers.1.")
    assert window.find_element("id", "matches").text == f"2 of {2 * BLOCKS + 4}"
    window.find_element("css selector", "#table thead th:nth-child(2) button").click()
    assert window.find_element("css selector", "#table thead th:nth-child(2)").get_attribute("aria-sort") == "descending"
    window.execute_script("document.getElementById('theme').click()")
    assert window.execute_script("return document.documentElement.dataset.theme") in ("dark", "light")
    assert window.get_log("browser") == []
    assert window.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert window.execute_script("return document.querySelectorAll('img[src=x]').length") == 0


@in_browser
def test_a_finding_opens_the_block_of_its_layer(window: Any) -> None:
    link = window.find_element("css selector", ".finding h3 a")
    name = link.find_element("css selector", "code").text
    assert name == f"layers.{LOUDEST}.weight"
    rows = "return document.getElementById('heat').layout.yaxis.ticktext"
    assert name not in [row.replace("<b>", "").replace("</b>", "") for row in window.execute_script(rows)]
    link.click()
    shown = window.execute_script(rows)
    assert shown[window.execute_script("return document.getElementById('heat').layout.shapes[0].y0 + 0.5")] == f"<b>{name}</b>"
    assert len(shown) == BLOCKS + 3
    assert window.get_log("browser") == []


@in_browser
def test_the_arrow_keys_change_the_view(window: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    first = window.find_element("css selector", "#views button")
    first.send_keys(Keys.ARROW_RIGHT)
    chosen = window.find_element("css selector", "#views [aria-checked=true]")
    assert chosen.text != first.text
    assert window.switch_to.active_element == chosen


def _scroll(window: Any) -> None:
    def seen() -> bool:
        window.execute_script("window.scrollBy(0, 400)")
        return bool(window.execute_script("return innerHeight + scrollY >= document.documentElement.scrollHeight - 2"))

    wait_for(seen)
    wait_for(lambda: window.execute_script("return document.getElementById('layers').data !== undefined"))


def test_steps_in_the_table_are_whole_and_a_loss_that_is_nan_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.ModuleMonitor(model, run_dir=tmp_path, on_spike=None, preset="standard")
    monitor.attach(optimizer, start_step=1_234_500)
    for step in range(100):
        loss = model(torch.ones(1, 2)).square().mean()
        optimizer.zero_grad()
        (loss * (1e3 if step == 67 else 1)).backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach() * (math.nan if step >= 90 else 1))
    monitor.detach()
    data = data_of(write(tmp_path))
    at = data["layers"]["columns"].index("in step")
    assert [row[at] for row in data["layers"]["rows"]] == [1_234_567] * 2
    assert dict(data["facts"])["loss"].endswith(", not finite since step 1234590")
    names = [name for name, _ in data["facts"]]
    assert "" not in names
    assert len({*names}) == len(names)


# --- the command -------------------------------------------------------------------------------------------------------------------


def _gradmon(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(_MAIN, *arguments, timeout=120)


_MAIN = "import sys; from torch_gradmon.cli.main import main; sys.exit(main())"


def test_the_command_writes_the_page(run: Path, tmp_path: Path) -> None:
    done = _gradmon("report", str(run), "--output", str(tmp_path / "deep" / "x.html"), "--title", "<i>first</i>")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tmp_path / "deep" / "x.html"))
    text = (tmp_path / "deep" / "x.html").read_text(encoding="utf-8")
    assert "<title>&lt;i&gt;first&lt;/i&gt; - gradmon</title>" in text
    assert not list((tmp_path / "deep").glob("*.part"))


def test_a_directory_in_the_place_of_the_page_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    done = _gradmon("report", str(run), "--output", str(tmp_path / "page.html"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a directory; name a file in it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_bar_is_shown_to_whoever_wants_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    write(run, tmp_path / "quiet.html")
    assert capsys.readouterr().err == ""
    write(run, tmp_path / "loud.html", progress=True)
    assert "report:   0%" in capsys.readouterr().err


def test_a_run_that_is_not_there_or_empty_is_told_in_one_line(tmp_path: Path) -> None:
    done = _gradmon("report", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gradmon: error: there is no run in '.*\n", done.stderr)
    model = nn.Linear(2, 2)
    gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "empty").detach()
    done = _gradmon("report", str(tmp_path / "empty"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
