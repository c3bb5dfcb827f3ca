"""What ``make`` installs for whom, and that it says so before it does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh one, as far as make looks at it."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def _plan(checkout: Path, target: str) -> list[str]:
    """The commands of a target, in order."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH"))}
    words = ["make", "--dry-run", "--no-print-directory", target]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", "").splitlines()


def test_the_demo_has_an_environment_of_its_own_with_what_it_needs_and_no_more(checkout: Path) -> None:
    first, *others, last = _plan(checkout, "demo")
    assert first.startswith("echo ")
    for package in ("rich", "tqdm", "plotly", "jinja2", "numpy"):
        assert package in first
    assert re.search(r"0\.\d GB.*torch==", first)
    assert [line for line in others if "pip install" in line] == [
        '.venv-demo/bin/python -c "import torch" 2>/dev/null || .venv-demo/bin/pip install --quiet torch==2.13.0',
        '.venv-demo/bin/pip install --quiet --editable ".[cli,report]"',
    ]
    assert last == ".venv-demo/bin/gradmon demo"
    extras = dict(re.findall(r"^(\w+) = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r'"([\w-]+)', extras["cli"] + extras["report"])) == {"rich", "tqdm", "plotly", "jinja2"}


def test_what_is_there_is_not_installed_again(checkout: Path) -> None:
    (checkout / ".venv-demo").mkdir()
    (checkout / ".venv-demo" / ".ready").touch()
    assert _plan(checkout, "demo") == [".venv-demo/bin/gradmon demo"]


def test_the_tests_say_first_what_they_install_and_how_long_they_take(checkout: Path) -> None:
    said = _plan(checkout, "test")[0]
    assert said.startswith('echo "make test: installs .venv .venv-bare .venv-lightning ')
    assert re.search(r"\d+\.\d GB.*about \d+ minutes", said)
    for name in (".venv", ".venv-bare"):
        (checkout / name).mkdir()
        (checkout / name / ".ready").touch()
    assert "installs .venv-lightning " in _plan(checkout, "test")[0]


@pytest.mark.parametrize("target", ["test", "bench", "demo"])
def test_each_environment_is_told_of_before_it_is_made(checkout: Path, target: str) -> None:
    lines = _plan(checkout, target)
    made = [number for number, line in enumerate(lines) if "-m venv" in line]
    assert made
    for number in made:
        place = lines[number].split()[-1]
        assert lines[number - 1].startswith(f'echo "{place}: installs ')


def test_all_environments_are_cleaned_away(checkout: Path) -> None:
    (removed,) = _plan(checkout, "clean")
    places = {line.split()[-1] for target in ("demo", "test", "bench") for line in _plan(checkout, target) if "-m venv" in line}
    assert places <= set(removed.split())
