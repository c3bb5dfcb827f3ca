"""The pages of the server in a browser, while a training in another process writes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import available, picture, resize, wait_for
from tests.live_training import LAYER, train

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from torch_gradmon.server.serve import Server  # noqa: E402

pytestmark = [pytest.mark.extra, pytest.mark.skipif(not available(), reason="there is no Chromium")]

ROOT = Path(__file__).parent.parent
RATES = (1e-3, 3e-3, 1e-2)
ODD = "<img src=x onerror=alert(1)>"
SIZES = ((1280, 800), (390, 844))


class Browser:
    """A window on a server."""

    def __init__(self, driver: Any, server: Server) -> None:
        self.driver, self.address = driver, server.address

    def open(self, path: str = "", width: int = 1280, height: int = 800) -> None:
        resize(self.driver, width, height)
        self.driver.get_log("browser")
        self.driver.get(self.address + path)
        wait_for(lambda: self.js("return document.body.dataset.ready"))

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        return [
            str(text) for text in self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector)
        ]

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()


@contextmanager
def serving(root: Path | str) -> Iterator[Server]:
    """A server in a thread."""
    with Server(root, port=0, token="") as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for rate in RATES:
        train(place / "sweep" / f"lr-{rate:g}", 40, lr=rate)
    train(place / ODD, 60, spike=40)
    return place


@pytest.fixture
def page(root: Path, driver: Any) -> Iterator[Browser]:
    with serving(root) as server:
        yield Browser(driver, server)
        driver.get("about:blank")


def test_links_streams_and_data_of_a_page_have_the_token(root: Path, driver: Any) -> None:
    with Server(root, port=0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        page = Browser(driver, server)
        page.open()
        wait_for(lambda: page.texts("tbody tr a"))
        page.js("document.querySelector('tbody tr a').click()")
        wait_for(lambda: page.js("return document.body.dataset.ready && location.pathname === '/run'"))
        assert server.access.token is not None
        assert page.js("return location.search").endswith(f"token={server.access.token}")
        page.js("document.querySelector('nav a').click()")
        wait_for(lambda: page.js("return location.pathname === '/' && document.body.dataset.ready"))
        wait_for(lambda: page.texts("tbody tr a"))
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        driver.get("about:blank")
        server.shutdown()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_list_of_runs(page: Browser, width: int, height: int) -> None:
    page.open("", width, height)
    assert set(page.texts("#runs tbody a[href^='run?name=']:not([href*='#'])")) == {
        ODD,
        *(f"sweep/lr-{rate:g}" for rate in RATES),
    }
    wait_for(lambda: any("spike" in text for text in page.texts("#runs .level.warning")))  # diagnosed in the background
    assert any(f"{LAYER}" in text for text in page.texts("#runs td.note a"))
    assert page.texts("#losses figcaption") == [f"lr {rate:g}" for rate in (1e-3, 2e-3, 3e-3, 1e-2)]
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    assert page.js("return document.querySelectorAll('img').length") == 0
    assert page.driver.get_log("browser") == []


def test_runs_are_searched_sorted_marked_and_compared_with_keys(page: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open()
    page.press("/")
    page.press("sweep")
    wait_for(lambda: len(page.texts("#runs tbody tr")) == len(RATES))
    assert page.texts("#count") == ["(3 of 4)"]
    page.js("[...document.querySelectorAll('#runs thead button')].find((button) => button.textContent === 'lr').click()")
    names = "return [...document.querySelectorAll('#runs tbody tr')].map((row) => row.dataset.run)"
    assert page.js(names) == [f"sweep/lr-{rate:g}" for rate in RATES]
    page.js("[...document.querySelectorAll('#runs thead button')].find((button) => button.textContent === 'lr').click()")
    assert page.js(names) == [f"sweep/lr-{rate:g}" for rate in reversed(RATES)]
    assert page.texts("th[aria-sort=descending]") == ["lr"]
    page.press(Keys.ARROW_DOWN)
    page.press(Keys.SPACE)
    page.press(Keys.ARROW_DOWN)
    page.press(Keys.SPACE)
    assert page.js("return document.querySelectorAll('#runs input:checked').length") == 2
    page.press("c")
    wait_for(lambda: "both?first=" in page.driver.current_url and page.js("return document.body.dataset.ready"))
    assert page.texts("h1") == ["sweep/lr-0.01 and sweep/lr-0.003"]


def test_list_says_info_scale_and_which_mark_is_gone(page: Browser, root: Path) -> None:
    page.open()
    wait_for(lambda: not [text for text in page.texts("#runs td.note:nth-child(8)") if not text])  # diagnosed
    cards = page.js("return [...document.querySelectorAll('#runs tbody tr')].map((row) => row.innerText)")
    assert len(cards) == 4
    assert all("loss, logarithmic" in text for text in page.texts("#losses svg text") if text.startswith("loss"))
    assert page.js("return document.querySelectorAll('#losses .axis').length") == len(page.texts("#losses figure"))
    names = page.js("return [...document.querySelectorAll('#runs tbody tr')].map((row) => row.dataset.run)")
    for place in range(3):
        page.js("document.querySelectorAll('#runs input[type=checkbox]')[arguments[0]].click()", place)
        assert page.texts("#marks") == [f"two can be marked: {names[0]} no longer is" if place == 2 else ""]
    marked = page.js("return [...document.querySelectorAll('#runs input')].filter((box) => box.checked).length")
    assert marked == 2


def test_list_shows_all_columns_on_a_small_screen(page: Browser) -> None:
    page.open("", 1024, 768)
    wait_for(lambda: not [text for text in page.texts("#runs td.note:nth-child(8)") if not text])  # diagnosed
    widths = page.js(
        "for (const row of document.querySelectorAll('#runs tbody tr')) if (!row.dataset.run.startsWith('sweep/')) row.remove();"
        "const box = document.querySelector('#runs').parentElement; return [box.scrollWidth, box.clientWidth]"
    )
    assert widths[0] <= widths[1]


def test_telephone_has_neither_keys_nor_what_a_finding_says(page: Browser) -> None:
    odd = "run?name=" + ODD.replace(" ", "%20").replace("=", "%3D")
    for path, what in (("", "Arrows move"), (odd, "the largest: step 40")):
        for width, is_shown in ((1280, True), (390, False)):
            page.open(path, width, 844)
            wait_for(lambda path=path: not path or "1 spike" in page.texts("#live")[0])
            assert (what in page.texts("body")[0]) is is_shown, (path, width)


def test_map_of_the_live_page_keeps_its_height_when_resized(page: Browser) -> None:
    page.open("run?name=sweep/lr-0.001")
    height = (
        "const heat = document.getElementById('heat'); return [heat.clientHeight, heat.querySelector('.main-svg').clientHeight]"
    )
    first = wait_for(lambda: page.js(height))
    for width in (900, 390, 1280):
        resize(page.driver, width, 800)
        wait_for(
            lambda: page.js(
                "return document.querySelector('#heat .main-svg').clientWidth === document.getElementById('heat').clientWidth"
            )
        )
        assert page.js(height) == first


def test_status_says_to_which_step_the_charts_are_drawn(page: Browser, root: Path) -> None:
    command = [sys.executable, "-m", "tests.live_training", str(root / "behind"), "200", "150", "0.02"]
    with subprocess.Popen(command, cwd=ROOT) as training:
        page.open()
        wait_for(lambda: "behind" in page.texts("#runs tbody a"))
        page.open("run?name=behind")
        page.js("window.real = window.fetch; window.fetch = () => new Promise(() => {})")  # a server that takes for ever
        told = wait_for(lambda: [text for text in page.texts("#live") if ", drawn to step " in text])
        assert page.js("return window.gradmon.drawnTo()") == int(re.findall(r"drawn to step (\d+)", told[0])[0])
        assert training.wait(60) == 0
    page.open("run?name=behind")
    wait_for(lambda: page.texts("#live .state") == ["ended"])
    assert "drawn to" not in page.texts("#live")[0]


def test_a_spike_is_on_the_page_as_soon_as_it_is_written(page: Browser, root: Path) -> None:
    command = [sys.executable, "-m", "tests.live_training", str(root / "now"), "240", "120", "0.02"]
    with subprocess.Popen(command, cwd=ROOT) as training:
        page.open()
        wait_for(lambda: "now" in page.texts("#runs tbody a"))
        page.open("run?name=now")
        assert page.texts("#live .state") in (["running"], ["unknown"])
        first = page.js("return document.getElementById('facts').innerText")
        link = wait_for(lambda: [text for text in page.texts("#live") if "spike" in text])
        assert "step 120: grad_norm" in link[0]
        assert LAYER in link[0]
        page.js("document.querySelector('#live a').click()")
        # the charts follow, up to the last step, without a reload
        wait_for(lambda: "0 to 239" in page.js("return document.getElementById('facts').innerText"))
        assert page.js("return document.getElementById('facts').innerText") != first
        assert page.js("return performance.getEntriesByType('navigation').length") == 1
        assert page.js("return document.getElementById('heat').data.at(-1).x") == [120]
        wait_for(lambda: page.texts("#live .state") == ["ended"])
        assert training.wait(60) == 0
    assert page.driver.get_log("browser") == []


def test_a_page_that_is_open_before_the_first_step_shows_it(page: Browser, root: Path) -> None:
    import torch
    from torch import nn

    import torch_gradmon as gradmon

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=root / "later")
    page.driver.get(f"{page.address}run?name=later")
    wait_for(lambda: "empty" in "".join(page.texts("#live")))
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.get_step_metrics()
    wait_for(lambda: page.js("return document.body.dataset.ready"))
    assert "0 to 2" in page.js("return document.getElementById('facts').innerText")
    monitor.detach()


def test_tabs_out_of_sight_leave_connections_to_others(page: Browser, root: Path) -> None:
    """A browser has six connections for all tabs of a server, and each page in sight listens on one."""
    first = page.driver.current_window_handle
    page.open()
    others = []
    try:
        for _ in range(7):
            page.driver.switch_to.new_window("tab")
            others.append(page.driver.current_window_handle)
            page.open()  # which is ready as soon as its stream has brought the rows
        train(root / "while-away", 5)
        page.driver.switch_to.window(first)
        wait_for(lambda: "while-away" in page.texts("#runs tbody a"))
    finally:
        for tab in others:
            page.driver.switch_to.window(tab)
            page.driver.close()
        page.driver.switch_to.window(first)


def test_a_page_outlives_its_server(root: Path, driver: Any) -> None:
    with serving(root) as server:
        page = Browser(driver, server)
        page.open()
    wait_for(lambda: page.texts("#live") == ["the server does not answer; this page shows what it had"])
    assert len(page.texts("#runs tbody tr")) >= len(RATES) + 1


if __name__ == "__main__":
    # pictures of the pages at both sizes, while a training writes: python -m tests.test_server_pages images
    import os
    import tempfile

    from tests.browser import browser

    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        runs = Path(folder) / "runs"
        for rate in (3e-4, *RATES, 1e-1):
            train(runs / "sweep" / f"lr-{rate:g}", 150, 100 if rate == RATES[-1] else None, lr=rate)
        command = [sys.executable, "-m", "tests.live_training", str(runs / "now"), "4000", "300", "0.02"]
        os.chdir(folder)  # so that no path of this machine is in the picture
        with serving("runs") as server, subprocess.Popen(command, cwd=ROOT) as training:
            page = Browser(driver, server)
            for path, name in (("", "serve"), ("run?name=now", "serve-run")):
                time.sleep(10)
                for width, height in SIZES:
                    page.open(path, width, height)
                    time.sleep(4)
                    picture(driver, target / f"{name}-{width}.png", width)
            training.terminate()
            driver.get("about:blank")
