"""Pictures and list of the gallery."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from benchmarks.gallery.pictures import drawn
from torch_gradmon.analysis.plots import elements

pytestmark = pytest.mark.extra

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"


class _Run:
    """A run of which only the loss is known."""

    def __init__(self, *loss: float) -> None:
        self._loss = dict(enumerate(loss))

    def keys(self) -> list[str]:
        return ["loss"]

    def series(self, key: str) -> dict[int, float]:
        assert key == "loss"
        return self._loss


def _drawn(**runs: _Run) -> Any:
    figure: Any = drawn(runs)  # type: ignore[arg-type]
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize(
    ("low", "high"),
    [(2.2, 2.3), (2.3, 4.7), (0.6, 2.9), (1.1, 9.9), (0.3, 3.3), (0.011, 0.97), (1e-4, 3.0), (1e-7, 1e3), (0.0, 2.0)],
)
def test_an_axis_has_two_labels_at_least_in_its_range(low: float, high: float) -> None:
    axis = _drawn(healthy=_Run(high, low)).axes[0]
    bottom, top = axis.get_ylim()
    labels = zip(axis.yaxis.get_majorticklocs(), axis.yaxis.get_majorticklabels(), strict=True)
    shown = [label.get_text() for place, label in labels if bottom <= place <= top and label.get_text()]
    assert 2 <= len(shown) <= 12
    assert len(set(shown)) == len(shown)


def test_lines_have_the_colours_of_the_report_and_both_are_seen() -> None:
    faulty, cured = _drawn(faulty=_Run(2, 1), cured=_Run(2, 1)).axes[0].lines
    assert (faulty.get_color(), cured.get_color()) == (elements.VERMILION, elements.BLUE)
    assert faulty.get_linestyle() != cured.get_linestyle()


def test_a_panel_without_values_says_so() -> None:
    loss, norm, _ = _drawn(healthy=_Run(2, 1)).axes
    assert [text.get_text() for text in norm.texts] == ["no value"]
    assert not loss.texts


def test_the_list_shows_each_page_with_its_picture_and_a_sentence() -> None:
    pages = {page.stem for page in GALLERY.glob("*.md")} - {"index"}
    rows = re.findall(
        r'^\| <img src="pictures/(\S+)\.png" alt="" width="\d+"> \| \[[^]]+\]\((\S+)\.md\): .+\. \|$',
        (GALLERY / "index.md").read_text(encoding="utf-8"),
        re.M,
    )
    assert {picture for picture, _ in rows} == {page for _, page in rows} == pages


def test_findings_fit_into_the_column_of_a_page() -> None:
    boxes = [line for page in GALLERY.glob("*.md") for line in _box(page.read_text(encoding="utf-8")).splitlines()]
    assert len(boxes) > 150
    assert max(map(len, boxes)) <= 80


def _box(text: str) -> str:
    return text.partition("```text\n")[2].partition("```")[0]
