"""The Triton kernels compile for GPUs that are not there, by whatever release of Triton torch brings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent


def test_all_kernels_compile_and_read_16_bytes_at_once(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_ahead"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert min(int(size) for _, _, size, _ in lines) > 1000
    kernels = ["rows_of_chunks", "rows_of_chunks", "merged_rows", "products_of_chunks", "merged_sums"]
    backends = {backend for backend, *_ in lines}
    assert "cuda" in backends
    for backend in backends:
        assert [name for of, name, *_ in lines if of == backend] == kernels
    # for each dtype four loads of the tensor, and of what is subtracted; float64 has pairs
    whole, difference, *_ = (int(wide) for backend, _, _, wide in lines if backend == "cuda")
    assert whole >= 4 * 4
    assert difference >= 4 * 4 * 2
