"""The benchmark for GPUs: its arithmetic, its text, and a run of the whole program on the simulated device, which measures nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from benchmarks import gpu, gpu_statistics
from benchmarks.contenders import Contender
from benchmarks.rivals import LeftOut
from benchmarks.timing import Floor

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
CPU = torch.device("cpu")
(TINY,) = (which for name, which in gpu_statistics.TINY_SETS.items() if name == "tiny")
_HAS_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def test_the_large_set_has_the_size_that_it_is_named_for() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in gpu_statistics.SETS["gpt2_1b5_fp32"].build().parameters()) == 1_557_611_200
    assert gpu_statistics.needed_bytes(gpu_statistics.SETS["gpt2_1b5_fp32"]) < 40e9


def test_a_copy_has_the_bytes_of_the_gradients() -> None:
    tensors = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16)]
    floor = gpu_statistics.copy_of(tensors)
    copied = floor.run()
    assert isinstance(copied, torch.Tensor)
    assert (copied.nbytes, floor.scale) == (3 * 4 + 5 * 2, 0.5)


class FakeTime:
    """Each contender, and the copy, takes the seconds that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copy: float, **seconds: float) -> None:
        self.now = 0.0
        contenders = {name: Contender(name, partial(self._make, taken)) for name, taken in seconds.items()}
        monkeypatch.setattr(gpu_statistics, "ALL", contenders)
        monkeypatch.setattr(gpu_statistics, "copy_of", lambda tensors: Floor(self._make(copy), 0.5))
        monkeypatch.setattr(gpu_statistics, "clock_for", lambda device: self._clock)

    def _make(self, seconds: float, *_: Any) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds

        return run

    def _clock(self, run: Callable[[], object]) -> float:
        before = self.now
        run()
        return self.now - before


def test_a_single_read_at_the_rate_of_the_copy_is_a_hundred_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch, copy=0.01, triton=0.005, stock=0.05, monitor=0.02)
    found = gpu_statistics.measure(TINY, CPU, seconds=0.0, least=3)
    shares = {name: each["share_pct"]["median"] for name, each in found["contenders"].items()}
    assert shares == {"triton": pytest.approx(100), "stock": pytest.approx(10), "monitor": pytest.approx(25)}
    assert found["contenders"]["monitor"]["ms"]["median"] == pytest.approx(20)
    # a copy reads and writes
    assert found["copy_gb_per_s"]["median"] == pytest.approx(2 * found["bytes"] / 0.01 / 1e9)


def test_rounds_are_as_many_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # a round: the contender five times, between two floors of five copies
    FakeTime(monkeypatch, copy=0.1, triton=0.1)
    assert gpu_statistics.measure(TINY, CPU, seconds=15.1, least=1)["rounds"] == 10
    assert gpu_statistics.measure(TINY, CPU, seconds=0.0, least=2)["rounds"] == 2
    assert gpu_statistics.measure(TINY, CPU, seconds=1e9, least=1)["rounds"] == gpu_statistics.MOST


def test_what_takes_too_long_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch, copy=0.1, triton=0.1, wandb_watch=6.0)
    found = gpu_statistics.measure(TINY, CPU, seconds=0.0, least=1)
    assert found["contenders"].keys() == {"triton"}
    assert found["left_out"] == {"wandb_watch": "takes 6 seconds"}


def test_no_set_begins_when_the_time_is_over() -> None:
    found = gpu_statistics.measure_all({"tiny": TINY}, CPU, until=0.0)
    assert found["tiny"]["left_out"] == {"all": "no time is left"}
    assert "| – |" in gpu.markdown({**_result(), "statistics": found})  # noqa: RUF001 (a dash in a table)


def test_triton_is_left_out_where_there_is_no_gpu() -> None:
    model = TINY.build()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(LeftOut, match="needs a GPU"):
        gpu_statistics.ON_DEVICE["triton"].make(model, None)  # type: ignore[arg-type]


def _around(value: float) -> dict[str, float]:
    return {"median": value, "quartile_1": 0.5 * value, "quartile_3": 2 * value, "count": 3}


def _result() -> dict[str, Any]:
    waits = {"without": (1.0, 0.0), "standard": (1.0, 0.0), "full": (3.0, 1.0)}
    return {
        "machine": {"gpu": "Abacus 9000", "driver": "1.2.3", "torch": "2.13.0", "python": "3.11"},
        "versions": {"torch_gradmon": "0.1.0", "wandb": None},
        "date": "2026-01-02",
        "training": {
            "title": "Some model",
            "parameters": 1000,
            "tokens": 4096,
            "step_ms": {"without": _around(50.0)},
            "added_pct": {"standard": _around(1.5), "full": _around(4.0)},
            "waits": {name: dict(zip(("operations", "events"), counts, strict=True)) for name, counts in waits.items()},
        },
        "statistics": {
            "some": {
                "title": "Some set",
                "copy_gb_per_s": _around(2000.0),
                "contenders": {"triton": {"label": "ours", "share_pct": _around(80.0)}},
                "left_out": {"theirs": "not installed"},
            }
        },
    }


def test_the_text_has_what_was_measured() -> None:
    given = _result()
    kept = copy.deepcopy(given)
    text = gpu.markdown(given)
    assert text.startswith("Abacus 9000, driver 1.2.3, torch 2.13.0")
    assert "| ours | 80.0 (40.0 to 160) |" in text
    assert "reads and writes together | 2000 (1000 to 4000) |" in text
    assert "`standard`: 1.50 (0.75 to 3.00) % longer. In a step the host waits for 0.00 more operations" in text
    assert "for 2.00 more operations and for 1.00 more events" in text
    assert "Left out: theirs (Some set): not installed." in text
    assert given == kept


def test_the_documentation_has_the_stored_result_or_that_there_is_none() -> None:
    section = PAGE.read_text(encoding="utf-8").split("<!-- gpu -->")[1].split("<!-- /gpu -->")[0].strip()
    assert section == gpu.markdown(gpu.load())
    assert gpu.OUT.exists() or section == gpu.NOT_RUN


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="nothing is measured"):
        gpu.main([])


@pytest.mark.skipif(not _HAS_DEVICES, reason="this torch has no devices in Python")
def test_a_dry_run_is_the_whole_program_and_writes_nothing() -> None:
    def files() -> dict[str, str]:
        return {str(path): path.read_text(encoding="utf-8") for path in (PAGE, *sorted(gpu.RESULTS.iterdir()))}

    before = files()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert files() == before
    assert done.stdout.count(gpu.DRY_RUN) == 2
    rows = [line for line in done.stdout.splitlines() if line.startswith("| torch")]
    for name in ("stock", "total_norm", "monitor"):
        (row,) = (row for row in rows if row.startswith(f"| {gpu_statistics.ALL[name].label} |"))
        assert all(float(cell.split()[0]) > 0 for cell in row.strip("| ").split(" | ")[1:])
    waits = [line for line in done.stdout.splitlines() if "the host waits for" in line]
    assert [line.split("`")[1] for line in waits] == ["standard", "full"]
    assert all("for 0.00 more operations and for 0.00 more events" in line for line in waits)
