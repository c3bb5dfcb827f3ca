"""Names that are scripts, in every page, in a browser: none runs, and no element comes of any."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser import available, wait_for

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)

from torch_gradmon.analysis.diff import diff_runs  # noqa: E402
from torch_gradmon.analysis.report.page import write, write_both  # noqa: E402

from .stored_runs import rewritten  # noqa: E402
from .test_security import train  # noqa: E402
from .test_server import serving  # noqa: E402

pytestmark = [pytest.mark.extra, pytest.mark.skipif(not available(), reason="there is no Chromium")]

_RUNS = "window.stranger=1"
PAYLOADS = [
    f"<script>{_RUNS}</script>", f"</script><script>{_RUNS}</script>", f"<img src=x onerror={_RUNS}>", f"<svg onload={_RUNS}>",
    f"'\"><b onmouseover={_RUNS}>b</b>", f"javascript:{_RUNS}", f"<a href='javascript:{_RUNS}'>a</a>",
    f"<iframe srcdoc='<script>parent.{_RUNS}</script>'>", f"&lt;img src=x onerror={_RUNS}&gt;", "{{ 7 * 7 }}{% raw %}",
    "%{customdata}<extra></extra>", "__proto__", "constructor", "<!--", "]]>", f"\u2028{_RUNS}//", f"`${{{_RUNS}}}`",
    f"<style>@import 'x'</style><math><mtext onclick={_RUNS}>", "<b>bold</b>", f"<details open ontoggle={_RUNS}>",
]  # fmt: skip

#: What a page has of them.
_LOOK = """
    const strange = "img[src='x'], iframe, math, [onmouseover], [onerror], [onload], [ontoggle], [onclick], a[href^='javascript']";
    return {
        ran: window.stranger, elements: document.querySelectorAll(strange).length, proto: ({}).stranger,
        bold: [...document.querySelectorAll("b")].filter((each) => each.textContent === "bold").length,
        shows: document.documentElement.textContent.includes("onerror=window.stranger=1"),
    };
"""
#: A script, and an element that runs one.
_ADD = """
    const script = document.createElement("script"), box = document.createElement("div");
    script.textContent = "window.stranger = 1";
    box.innerHTML = '<img src=y onerror="window.stranger=2">';
    document.body.append(script, box);
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("strange")
    names = [name.replace(".", ",") for name in PAYLOADS]  # a layer has no dot
    first = place / "runs" / PAYLOADS[2].replace("/", "|")
    train(first, names)
    rewritten(first, facts=_named)
    second = place / "runs" / PAYLOADS[4].replace("/", "|")
    shutil.copytree(first, second)
    write(first, place / "report.html", PAYLOADS[0], progress=False)
    write_both(first, second, diff_runs(first, second, progress=False), place / "both.html", PAYLOADS[1], progress=False)
    return place


def _named(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with a payload in each text that a reader takes as it is."""
    texts = {"model": PAYLOADS[2], "trainer": PAYLOADS[3], "torch": PAYLOADS[0]}
    return {**facts, **texts, "settings": dict.fromkeys(PAYLOADS, PAYLOADS[2])}


@pytest.fixture(scope="module")
def pages(root: Path) -> Iterator[list[str]]:
    with serving(root / "runs") as server:
        first, second = sorted(path.name for path in (root / "runs").iterdir())
        paths = ("", f"run?name={quote(first)}", f"both?first={quote(first)}&second={quote(second)}")
        here = [f"{server.address}{path}" for path in paths]
        yield [*(f"file://{root / name}" for name in ("report.html", "both.html")), *here]


def _opened(pages: list[str], driver: Any) -> Iterator[str]:
    """The address of each page, once it is drawn."""
    driver.get("about:blank")
    driver.get_log("browser")  # of pages of other tests, whose servers are gone
    for address in pages:
        driver.get(address)
        wait_for(lambda: driver.execute_script("return document.body.dataset.ready"))
        yield address


def test_no_name_runs_or_makes_an_element_in_any_page(pages: list[str], driver: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    for address in _opened(pages, driver):
        shown = driver.execute_script("return [...document.querySelectorAll('text, td, th, h1, h2, a, summary, button')]")
        for element in shown[:: max(1, len(shown) // 12)]:
            try:
                ActionChains(driver).move_to_element(element).perform()
            except Exception:  # it is out of sight, or was drawn anew
                continue
        found = driver.execute_script(_LOOK)
        assert found == {"ran": None, "elements": 0, "bold": 0, "proto": None, "shows": True}, address
        errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not errors, (address, errors)


def test_a_script_that_is_not_of_the_page_is_blocked(pages: list[str], driver: Any) -> None:
    for address in _opened(pages, driver):
        driver.execute_script(_ADD)
        driver.execute_async_script("setTimeout(arguments[0], 300)")
        assert driver.execute_script("return window.stranger") is None, address
        assert any("Content Security Policy" in entry["message"] for entry in driver.get_log("browser"))
