"""The documentation as a site, from the disk, in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from . import browser

ROOT = Path(__file__).parent.parent
PHONE = 390

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(find_spec("sphinx") is None, reason="sphinx is not installed"),
    pytest.mark.skipif(not browser.available(), reason="there is no Chromium with its driver and selenium"),
]


@pytest.fixture(scope="module")
def site() -> Path:
    built = ROOT / "docs" / "_build" / "html"  # as `make docs` builds it, so that only what has changed since is built again
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", str(built)]
    subprocess.run(command, cwd=ROOT, check=True)
    return built


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.browser(1280, 900) as found:
        yield found


def _open(driver: Any, page: Path, width: int = 1280, query: str = "") -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get_log("browser")
    driver.get(page.as_uri() + query)
    browser.wait_for(lambda: driver.execute_script("return document.readyState") == "complete")


def _pages(site: Path) -> list[Path]:
    return [page for page in site.rglob("*.html") if "_" not in page.relative_to(site).parts[0]]


def test_the_search_works_from_a_file(site: Path, driver: Any) -> None:
    _open(driver, site / "search.html", query="?q=overhead_budget")

    def found() -> bool:
        links = driver.find_elements("css selector", "#search-results li a")
        return "What it costs" in [link.text for link in links]

    browser.wait_for(found, 20)


def test_no_page_fetches_anything_or_has_an_error(site: Path, driver: Any) -> None:
    for page in _pages(site):
        _open(driver, page)
        names = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert [name for name in names if not name.startswith(("file:", "data:"))] == [], page
        assert driver.get_log("browser") == [], page


def test_no_page_is_wider_than_a_phone(site: Path, driver: Any) -> None:
    wide = {}
    for page in _pages(site):
        _open(driver, page, width=PHONE)
        width = driver.execute_script("return document.documentElement.scrollWidth")
        if width > PHONE:
            wide[page.name] = width
    assert wide == {}


def test_every_link_within_the_site_leads_somewhere(site: Path, driver: Any) -> None:
    missing = set()
    for page in _pages(site):
        _open(driver, page)
        for link in driver.execute_script("return [...document.querySelectorAll('a[href]')].map(a => a.href)"):
            path, _, anchor = link.partition("#")
            if not path.startswith("file:"):
                continue
            target = Path(path.removeprefix("file://").partition("?")[0])
            text = target.read_text(encoding="utf-8", errors="replace") if target.is_file() else None
            if text is None or (anchor and f'id="{anchor}"' not in text and target.suffix == ".html"):
                missing.add(f"{page.name}: {link}")
    assert missing == set()
