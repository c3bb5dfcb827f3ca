"""What type checkers say of the public interface: mistakes are refused, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "typing" / "mistakes.py"
LINES = PROGRAM.read_text(encoding="utf-8").splitlines()
WRONG = {number for number, line in enumerate(LINES, 1) if line.endswith("# wrong")}


def _told(found: set[int]) -> dict[str, list[str]]:
    return {
        "missed": [LINES[number - 1] for number in sorted(WRONG - found)],
        "refused": [LINES[number - 1] for number in sorted(found - WRONG)],
    }


@pytest.mark.extra
def test_mypy_refuses_each_mistake_and_nothing_else() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--output=json", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert _told({each["line"] for each in told if each["severity"] == "error"}) == {"missed": [], "refused": []}


@pytest.mark.extra
def test_pyright_refuses_each_mistake_and_nothing_else() -> None:
    pytest.importorskip("basedpyright")
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--level",
        "error",
        "--pythonpath",
        sys.executable,
        str(PROGRAM),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    told = json.loads(done.stdout)["generalDiagnostics"]
    found = {each["range"]["start"]["line"] + 1 for each in told if each["severity"] == "error"}
    assert _told(found) == {"missed": [], "refused": []}


def test_there_are_thirty_mistakes_and_more() -> None:
    assert len(WRONG) >= 30
