"""The documentation as a site, from the disk, in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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


def _open(driver: Any, page: Path, query: str = "") -> None:
    browser.resize(driver, 1280, 844)
    driver.get_log("browser")
    driver.get(page.as_uri() + query)
    browser.wait_for(lambda: driver.execute_script("return document.readyState") == "complete")


@dataclass
class Visit:
    """What the browser has of a page that it has opened once."""

    fetched: list[str]
    log: list[Any]
    links: list[str]
    phone_width: int


@pytest.fixture(scope="module")
def visits(site: Path, driver: Any) -> dict[str, Visit]:
    """Each page, by its path in the site."""
    found = {}
    for page in site.rglob("*.html"):
        name = page.relative_to(site)
        if "_" not in name.parts[0]:
            _open(driver, page)
            fetched = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
            links = driver.execute_script("return [...document.querySelectorAll('a[href]')].map(a => a.href)")
            log = driver.get_log("browser")
            browser.resize(driver, PHONE, 844)
            found[str(name)] = Visit(fetched, log, links, driver.execute_script("return document.documentElement.scrollWidth"))
    assert len(found) > 20
    return found


def test_the_search_works_from_a_file(site: Path, driver: Any) -> None:
    _open(driver, site / "search.html", query="?q=max_overhead")

    def found() -> bool:
        links = driver.find_elements("css selector", "#search-results li a")
        return "What it costs" in [link.text for link in links]

    browser.wait_for(found, 20)


def test_no_page_fetches_anything_or_has_an_error(visits: dict[str, Visit]) -> None:
    fetched = {
        page: [name for name in visit.fetched if not name.startswith(("file:", "data:"))] for page, visit in visits.items()
    }
    assert {page: names for page, names in fetched.items() if names} == {}
    assert {page: visit.log for page, visit in visits.items() if visit.log} == {}


def test_no_page_is_wider_than_a_phone(visits: dict[str, Visit]) -> None:
    assert {page: visit.phone_width for page, visit in visits.items() if visit.phone_width > PHONE} == {}


def test_every_link_within_the_site_leads_somewhere(visits: dict[str, Visit]) -> None:
    missing = set()
    for page, visit in visits.items():
        for link in visit.links:
            path, _, anchor = link.partition("#")
            if path.startswith("file:"):
                target = Path(path.removeprefix("file://").partition("?")[0])
                anchors = _anchors(target)
                if anchors is None or (anchor and anchor not in anchors and target.suffix == ".html"):
                    missing.add(f"{page}: {link}")
    assert missing == set()


@cache
def _anchors(target: Path) -> set[str] | None:
    """Those in a file; None if there is no such file."""
    return set(re.findall('id="([^"]*)"', target.read_text(encoding="utf-8", errors="replace"))) if target.is_file() else None
