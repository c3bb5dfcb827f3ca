"""A forked program is as one in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from . import forked

pytestmark = pytest.mark.thorough

PROGRAM = """
import atexit, os, sys, threading, time, warnings

atexit.register(print, "at exit")
warnings.warn("a warning")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
print(__name__, sys.argv, os.getcwd(), os.environ["OWN"], "pytest" in sys.modules, sys.stdin.read() == "")
sys.exit(int(sys.argv[1]))
"""


def test_a_program_has_its_own_arguments_streams_and_end(tmp_path: Path) -> None:
    done = forked.run(PROGRAM, 7, cwd=tmp_path, environment={**os.environ, "OWN": "yes"})
    assert done.returncode == 7
    assert done.stdout.splitlines() == [f"__main__ ['-c', '7'] {tmp_path} yes False True", "a thread", "at exit"]
    assert done.stderr.splitlines() == ["<string>:5: UserWarning: a warning"]


def test_an_error_is_told_and_a_file_knows_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print(__file__)\nimport beside\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("1 / 0\n", encoding="utf-8")
    done = forked.run(tmp_path / "program.py")
    assert (done.returncode, done.stdout) == (1, f"{tmp_path / 'program.py'}\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_one_that_does_not_end_is_ended() -> None:
    endless = "import time\nprint('begun', flush=True)\ntime.sleep(1000)"
    with forked.start(endless) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "begun\n"
        assert started.poll() is None
    assert started.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(endless, timeout=0.1)
