"""Pages in headless Chromium, and what serves them."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import forked

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Without these Chromium tries to reach hosts of its maker.
_QUIET = ("disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")
_SETTINGS = ("headless=new", "no-sandbox", "use-angle=swiftshader", "enable-unsafe-swiftshader", "force-device-scale-factor=1")


def available() -> bool:
    """Whether there is a browser, its driver, and what speaks to it."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return False
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@contextmanager
def browser(width: int = 1500, height: int = 1240) -> Iterator[Any]:
    """A window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for setting in (*_QUIET, *_SETTINGS, f"window-size={width},{height}"):
        options.add_argument(f"--{setting}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def wait_for(found: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``found`` gives as soon as that is true."""
    end = time.monotonic() + seconds
    while not (result := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {seconds} s")
        time.sleep(0.25)
    return result


def open_report(driver: Any, page: Path, width: int = 1280, height: int = 940) -> None:
    """Load a report in a window of that size, until it is drawn."""
    resize(driver, width, height)
    driver.get_log("browser")  # of earlier pages
    driver.get(page.as_uri())
    wait_for(lambda: driver.execute_script("return document.body.dataset.ready"))


def data_of(page: Path) -> dict[str, Any]:
    """What a report is made of."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


@contextmanager
def tensorboard(directory: Path) -> Iterator[str]:
    """Serves ``directory``; the address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", str(port), "--host", "localhost"]
    served = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/data/plugin/scalars/tags", timeout=5) as answer:
                return b"gradmon" in answer.read()
        except OSError:
            return False

    try:
        wait_for(answers)
        yield address
    finally:
        served.terminate()
        served.wait(20)


def tensorboard_page(driver: Any, address: str) -> list[str]:
    """Opens the time series under ``gradmon/``; the titles of the cards, drawn."""
    from selenium.webdriver.common.by import By

    driver.get(f"{address}/?tagFilter=gradmon%2F&smoothing=0&darkMode=false#timeseries")

    def cards() -> list[Any]:
        return [card for card in driver.find_elements(By.CSS_SELECTOR, "card-view") if "Relative" in card.text]

    wait_for(cards)
    driver.find_element(By.CSS_SELECTOR, "button[aria-label='Close side pane']").click()
    wait_for(lambda: len(cards()) >= 4)
    time.sleep(3)  # the lines are drawn behind the cards
    return ["".join(card.text.splitlines()[:2]) for card in cards()]


def picture_of_tensorboard(directory: Path, target: Path) -> list[str]:
    """Runs the example in ``directory`` and writes a screenshot of its page to ``target``; the titles of the cards."""
    done = forked.run(EXAMPLES / "tensorboard_run.py", cwd=directory)
    assert done.returncode == 0, done.stderr
    with tensorboard(directory / "runs") as address, browser() as driver:
        titles = tensorboard_page(driver, address)
        driver.save_screenshot(str(target))
    return titles


def resize(driver: Any, width: int, height: int) -> None:
    """Give the page that much room; else the window's frame counts too."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def picture(driver: Any, target: Path, width: int) -> None:
    """Writes the open page to ``target`` down to the end of its map of layers, or of its first row of charts: none is cut through."""
    find = "const end = document.querySelector('#s-heat, figure'); return end.getBoundingClientRect().bottom + scrollY + 8"
    resize(driver, width, math.ceil(driver.execute_script(find)))
    time.sleep(1)  # the heat map is drawn
    driver.save_screenshot(str(target))


def picture_of_report(driver: Any, page: Path, target: Path, width: int = 1280) -> None:
    """Writes the head of a report and its map of layers to ``target``."""
    open_report(driver, page, width)
    picture(driver, target, width)


if __name__ == "__main__":
    import tempfile

    if len(sys.argv) == 3:  # a report, and where its picture goes
        with browser() as window:
            picture_of_report(window, Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as place:
            print(*picture_of_tensorboard(Path(place), Path("images/tensorboard.png")), sep="\n")
