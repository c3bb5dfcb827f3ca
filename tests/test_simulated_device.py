"""What holds on any accelerator, on one that exists in Python only: few launches, no waits, the numbers of the CPU.

Each program runs in a process of its own, because a registered device changes what torch takes for its accelerator.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from benchmarks import launches
from torch_gradmon import testing

ROOT = Path(__file__).parent.parent
_HAS_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
needs_devices = pytest.mark.skipif(not _HAS_DEVICES, reason="this torch has no devices in Python")


def _ran(name: str) -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulated_cases", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line[2:] for line in done.stdout.splitlines() if line.startswith("= ")))


@pytest.mark.skipif(_HAS_DEVICES, reason="this torch has devices in Python")
def test_without_devices_in_python_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="has no devices in Python"):
        testing.simulated_device()


@pytest.fixture(scope="module")
def found() -> Any:
    """Counts of launches."""
    return _ran("launches")


@needs_devices
class TestLaunches:
    @pytest.mark.parametrize(("setting", "most"), [("cheap", 20), ("standard", 30), ('standard, `on_spike="skip"`', 30)])
    def test_they_do_not_grow_with_the_number_of_parameters(self, found: Any, setting: str, most: int) -> None:
        by_size = found[setting]
        for step in ("7", "10"):
            assert len({counts[step]["launches"] for counts in by_size.values()}) == 1
        assert by_size["4"]["7"]["launches"] <= most
        # one or two more for each of two shapes
        assert by_size["4"]["10"]["launches"] <= most + 4

    def test_nothing_is_read_and_one_copy_is_made_behind_the_hosts_back(self, found: Any) -> None:
        for setting, by_size in found.items():
            for counts in by_size.values():
                for step in map(str, range(2, 11)):
                    expected = {"reads": 0, "copies": 2 if "skip" in setting else 1, "blocking": 0}
                    assert {name: counts[step][name] for name in expected} == expected

    def test_the_documentation_has_them_and_of_all_activations_they_grow_with_the_modules_alone(self, found: Any) -> None:
        text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        rows = [
            line.strip("| ").split(" | ")
            for line in text.split("<!-- launches -->")[1].split("<!-- /launches -->")[0].splitlines()
        ]
        shown = {row[0]: row[1:4] for row in rows}
        for setting, by_size in found.items():
            counted = [{int(step): counts for step, counts in by_step.items()} for by_step in by_size.values()]
            assert shown[setting][: len(counted)] == [launches.cell(by_step) for by_step in counted]
        few, some, many = (int(cell.split()[0].replace(",", "")) for cell in shown["full"])
        # modules with two parameters each
        assert (some - few) / 30 == (many - some) / 329 <= 16


@needs_devices
@pytest.mark.parametrize("program", ["gpt", "gpt_lazy"])
def test_a_gpt_with_everything_on_has_the_numbers_of_the_cpu_and_trains_the_same(program: str) -> None:
    result = _ran(program)
    assert result["worst"] < 1e-6
    assert result["values"] > 1000
    assert result["same_bits"]


@needs_devices
@pytest.mark.parametrize("program", ["wait_for_the_copy", "wait_for_a_deferred_sink"])
def test_values_are_awaited_and_spoiled_without_the_wait(program: str) -> None:
    result = _ran(program)
    assert len(result["right"]) == 4
    assert not any(map(math.isnan, result["right"]))
    assert all(map(math.isnan, result["without the wait"]))
    assert not result.get("reads")


@needs_devices
def test_a_decision_to_skip_waits_for_its_values_and_fails_without_the_wait() -> None:
    assert _ran("wait_for_the_decision") == {"right": [50], "without the wait": []}


@needs_devices
def test_the_device_shows_what_a_real_one_does_not_forgive() -> None:
    shown = _ran("the_device")
    assert all(map(math.isnan, shown["early"][:3]))
    assert shown["early"][3:] == [1.0, 1.0, 1.0]
    assert shown["reads"] == {"aten::_local_scalar_dense": 1}
    assert "reads what stream 0 may still write" in shown["without a wait"]
    assert shown["with a wait"] == ""
    assert "changed memory while it was copied" in shown["source"]
    assert "is released while stream 1 may still use it" in shown["release"]
