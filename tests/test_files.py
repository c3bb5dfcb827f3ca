"""Files in directories that others can write to."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from torch_gradmon.core.files import created, replacing


def test_replacing_leaves_nothing_of_a_block_that_raises(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")

    def write() -> None:
        with replacing(tmp_path / "page") as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"page": "old"}


def test_replacing_follows_no_link_at_its_path(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("old")
    (tmp_path / "page").symlink_to(tmp_path / "private")
    with replacing(tmp_path / "page") as file:
        file.write(b"new")
    assert (tmp_path / "private").read_text() == "old"
    assert (tmp_path / "page").read_text() == "new"
    assert not (tmp_path / "page").is_symlink()


def test_created_makes_no_file_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tmp_path / "there")
    with pytest.raises(FileExistsError):
        created(tmp_path / "here")
    assert not (tmp_path / "there").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")
@pytest.mark.parametrize(
    ("directory", "mask", "expected"), [(0o700, 0, 0o600), (0o755, 0o22, 0o644), (0o777, 0o77, 0o600), (0o750, 0, 0o640)]
)
def test_created_is_no_wider_than_its_directory(directory: int, mask: int, expected: int, tmp_path: Path) -> None:
    tmp_path.chmod(directory)
    before = os.umask(mask)
    try:
        os.close(created(tmp_path / "file"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
