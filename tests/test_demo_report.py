"""What somebody sees who has never heard of this project: the demo, and without scrolling the page that it ends with."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.browser import available, open_report, picture_of_report

pytestmark = pytest.mark.extra
for package in ("plotly", "jinja2", "rich", "tqdm"):
    pytest.importorskip(package)

STEPS, SPOILED, LAYER = 61, 40, "blocks.2.up.weight"
_MAIN = "import sys; from torch_gradmon.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints."""
    directory = tmp_path_factory.mktemp("demo")
    done = forked.run(_MAIN, "demo", "--steps", STEPS, "--run-dir", directory / "run", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def page(told: str) -> Path:
    found = re.search(r"open in a browser: (.*report\.html)\s*\Z", told)
    assert found is not None, told[-500:]
    return Path(found[1])


def test_the_demo_says_what_it_spoils_and_ends_with_the_path_of_its_report(told: str, page: Path) -> None:
    assert f"fault  on purpose: in step {SPOILED} one layer's gradient is 1,000 times too large" in told
    assert page.is_file()
    first = re.search(r"^(?:ERROR|WARNING|INFO) .*$", told[told.index("\nDiagnosis") :], re.M)
    assert first is not None
    assert LAYER in first[0]
    assert f"step {SPOILED}" in first[0]


@pytest.fixture
def window(driver: Any, page: Path) -> Any:
    open_report(driver, page, 1280, 800)
    return driver


@pytest.mark.skipif(not available(), reason="there is no Chromium")
def test_the_layer_and_the_step_are_in_sight_without_scrolling(window: Any, page: Path, tmp_path: Path) -> None:
    head = window.find_element("css selector", ".finding h3")
    assert LAYER in head.text
    assert f"step {SPOILED}" in head.text
    assert head.rect["y"] + head.rect["height"] < 300
    # the cell of that layer and step is the brightest of the map, and in sight too
    row, column, bottom = window.execute_script(
        """
        const heat = document.getElementById("heat"), [first] = heat.data;
        let best = [-Infinity, 0, 0];
        first.z.forEach((cells, row) => cells.forEach((cell, at) => { if (cell !== null && cell > best[0]) best = [cell, row, at]; }));
        const axis = heat._fullLayout.yaxis;
        const middle = (first.x[best[2]] + first.x[best[2] + 1]) / 2, name = heat.layout.yaxis.ticktext[best[1]].replace(/<[^>]*>/g, "");
        return [name, middle, heat.getBoundingClientRect().top + axis._offset + axis.d2p(best[1])];
        """
    )
    assert (row, column) == (LAYER, SPOILED)
    assert bottom < 800
    assert window.get_log("browser") == []
    assert window.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.skipif(not available(), reason="there is no Chromium")
def test_the_picture_of_a_report_has_the_whole_map(window: Any, page: Path, tmp_path: Path) -> None:
    picture_of_report(window, page, tmp_path / "report.png")
    image = (tmp_path / "report.png").read_bytes()
    width, height = struct.unpack(">II", image[16:24])
    heat = window.execute_script(
        "const { top, bottom } = document.getElementById('heat').getBoundingClientRect(); return [top, bottom]"
    )
    assert width == 1280
    assert 0 < heat[0] < heat[1] <= height < heat[1] + 200
    assert len(image) > 20_000
