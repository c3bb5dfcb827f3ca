"""What a person sees in a real browser."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import browser

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(not browser.available(), reason="there is no Chromium with its driver and selenium"),
]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboards_page_shows_the_tags_under_gradmon(tmp_path: Path) -> None:
    titles = browser.picture_of_tensorboard(tmp_path, tmp_path / "page.png")
    assert {"gradmon/grad_norm", "gradmon/clip_fraction", "gradmon/grad_max"} <= set(titles)
    assert all(title.startswith("gradmon/") for title in titles)
    width, height = struct.unpack(">II", (tmp_path / "page.png").read_bytes()[16:24])
    assert width > 1000
    assert height > 800
