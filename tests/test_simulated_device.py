"""What holds on any accelerator, on one that exists in Python only: few launches, no waits, the numbers of the CPU.

Each program runs in a process of its own, because a registered device changes what torch takes for its accelerator.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from benchmarks import launches
from torch_gradmon import testing

from . import forked

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
_HAS_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
needs_devices = pytest.mark.skipif(not _HAS_DEVICES, reason="this torch has no devices in Python")


def _ran(name: str, file: str = "simulated_cases") -> Any:
    program = f"import warnings; warnings.simplefilter('ignore'); from tests import {file}; {file}.case.main()"
    done = forked.run(program, name, cwd=ROOT, timeout=600.0)
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
    @pytest.mark.parametrize(("setting", "most"), [("minimal", 20), ("standard", 30), ('standard, `on_spike="skip"`', 30)])
    def test_they_hardly_grow_with_the_number_of_parameters(self, found: Any, setting: str, most: int) -> None:
        by_size = found[setting]
        few, some, many = ({step: by_size[size][step]["launches"] for step in ("7", "10")} for size in ("4", "64", "722"))
        assert few == some
        assert few["7"] <= most
        assert few["10"] <= most + 6
        # torch's cat reads 128 tensors in one launch, and each has its padding
        assert many["7"] - few["7"] <= 722 / 20
        assert many["10"] - few["10"] <= 722 / 10

    def test_nothing_is_read_and_one_copy_is_made_behind_the_hosts_back(self, found: Any) -> None:
        for setting, by_size in found.items():
            for counts in by_size.values():
                for step in map(str, range(2, 11)):
                    expected = {"reads": 0, "copies": 2 if "skip" in setting else 1, "blocking": 0}
                    assert {name: counts[step][name] for name in expected} == expected

    def test_of_all_activations_there_is_one_for_each_module(self, found: Any) -> None:
        few, some = (found["full"][size]["7"]["launches"] for size in ("4", "64"))
        more = launches.LAYERS[1] - launches.LAYERS[0]
        # torch.cat reads 128 tensors at once, and optimizer states are four pairs for each parameter
        assert some - few == more + 6

    def test_the_documentation_has_them(self, found: Any) -> None:
        text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        rows = [
            line.strip("| ").split(" | ")
            for line in text.split("<!-- launches -->")[1].split("<!-- /launches -->")[0].splitlines()
        ]
        shown = {row[0]: row[1:4] for row in rows}
        for setting, by_size in found.items():
            counted = [{int(step): counts for step, counts in by_step.items()} for by_step in by_size.values()]
            assert shown[setting] == [launches.cell(by_step) for by_step in counted]


@needs_devices
@pytest.mark.parametrize("program", ["gpt", "gpt_lazy"])
def test_a_gpt_with_everything_on_has_the_numbers_of_the_cpu_and_trains_the_same(program: str) -> None:
    result = _ran(program)
    assert result["worst"] < 1e-6
    assert result["values"] > 1000
    assert result["same_bits"]


@needs_devices
def test_a_device_without_float64_has_the_numbers_of_the_cpu_nearly() -> None:
    result = _ran("gpt_without_float64")
    assert result["worst"] < 2e-5
    assert result["same_bits"]
    assert result["scaled"] == pytest.approx(1, abs=1e-6)


@needs_devices
@pytest.mark.parametrize("program", ["wait_for_the_copy", "wait_for_a_deferred_sink"])
def test_values_are_awaited_and_spoiled_without_the_wait(program: str) -> None:
    result = _ran(program)
    assert len(result["right"]) == 4
    assert not any(map(math.isnan, result["right"]))
    # constants of a first step are copied by waiting, which lets earlier copies arrive as well
    assert math.isnan(result["without the wait"][-1])
    assert not result.get("reads")


@needs_devices
def test_a_decision_to_skip_waits_for_its_values_and_fails_without_the_wait() -> None:
    assert _ran("wait_for_the_decision") == {"right": [50], "without the wait": []}


@needs_devices
def test_the_host_is_two_steps_ahead_unless_someone_asks_for_values() -> None:
    result = _ran("lag")
    for asynchronous in ("alone", "run_dir", "deferred sink"):
        assert result[asynchronous][1:] == [2] * 11
    for synchronous in ("sink", "skip"):
        assert result[synchronous] == [1] * 12


@needs_devices
def test_a_monitor_holds_as_much_memory_after_each_step_and_none_when_it_has_gone() -> None:
    result = _ran("lifetimes")
    assert len(set(result["watched"])) == 1
    assert result["gone"] == result["bare"]
    assert result["at the end"] == result["before"] == 0


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


@needs_devices
class TestStreams:
    def test_a_branch_on_a_stream_of_its_own_is_awaited_on_the_device(self) -> None:
        result = _ran("branches", "simulated_streams")
        assert result["equal"]
        assert "reads what stream" in result["without the wait"]

    def test_memory_of_another_stream_is_kept_until_it_was_read(self) -> None:
        result = _ran("a_step_that_is_dropped", "simulated_streams")
        assert result["right"] == ""
        assert "is released while stream 0 may still use it" in result["without the record"]

    def test_constants_are_written_and_read_on_one_stream(self) -> None:
        result = _ran("layouts", "simulated_streams")
        assert result["right"] == ""
        assert "reads what stream 0 may still write" in result["with one layout"]

    def test_a_loop_may_move_to_another_stream(self) -> None:
        assert _ran("a_loop_that_moves", "simulated_streams") == {"equal": True, "values": 8}


@needs_devices
class TestGraphs:
    @pytest.mark.parametrize("program", ["gradients_in_a_graph", "gradients_in_a_graph_with_our_clip"])
    def test_what_runs_outside_of_a_graph_is_measured(self, program: str) -> None:
        result = _ran(program, "simulated_graphs")
        assert result["same_bits"]
        assert len(result["warnings"]) == 1
        shown = result["shown"]
        assert [values["gradient/0.weight/norm"] for values in shown] == pytest.approx(result["norms"], rel=1e-6)
        assert all(values["update/0.weight/norm"] > 0 for values in shown)
        assert not any("activation/0/norm" in values for values in shown)
        assert "was not called" in result["missing"]["activation/0/norm"]
        if "our_clip" in program:
            assert [values["gradmon/grad_norm"] for values in shown] == pytest.approx(result["totals"], rel=1e-6)
        else:
            assert not any("gradmon/grad_norm" in values for values in shown)
            assert "call monitor.monitor_gradients(before_clip=True)" in result["missing"]["gradmon/grad_norm"]

    @pytest.mark.parametrize("program", ["a_whole_step_in_a_graph", "a_whole_step_in_a_graph_with_our_clip"])
    def test_of_a_whole_step_in_a_graph_nothing_is_shown_and_the_reason_is(self, program: str) -> None:
        result = _ran(program, "simulated_graphs")
        assert result["same_bits"]
        assert len(result["warnings"]) == 1
        assert not any(result["shown"])
        assert all("replays call no hooks" in why for why in result["missing"].values())
        assert result["findings"] == []

    def test_a_capture_is_left_alone_and_spoiled_where_it_is_not(self) -> None:
        result = _ran("spoiled_graphs", "simulated_graphs")
        assert result["right"] == ""
        assert "operation not permitted when stream is capturing" in result["blind"]
        assert "cannot be captured into a graph" in result["exact clip"]


@needs_devices
def test_a_scaler_that_decides_on_the_device_is_followed_without_a_wait() -> None:
    result = _ran("fused_with_a_scaler", "simulated_graphs")
    fused, plain = result["fused"], result["plain"]
    assert fused["parameters"] == result["bare"]["parameters"]
    assert not any(fused["reads"][1:])  # the first step copies constants
    assert fused["not applied"] == plain["not applied"] == [0] * 3 + [1] * 5
    assert fused["norms"] == pytest.approx(plain["norms"], rel=1e-6, nan_ok=True)


@needs_devices
def test_a_rate_and_a_loss_that_the_loop_changes_in_place_are_those_of_their_step() -> None:
    result = _ran("a_rate_on_the_device", "simulated_graphs")
    assert [rate for (rate,) in result["rates"]] == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])
    assert min(result["losses"]) > 0
    assert not any(result["reads"][1:])


@needs_devices
def test_the_first_nan_is_that_of_the_first_module_whatever_its_size() -> None:
    result = _ran("origin_of_nan")
    assert "output of 1" in result["cpu"]
    assert result["device"] == result["cpu"]


@needs_devices
def test_what_cannot_be_measured_costs_no_more_than_itself() -> None:
    result = _ran("failures")
    assert result["activations"] == [["gradient", "gradient_before_clip", "update"], "it could not be measured: OutOfMemoryError"]
    assert result["updates"] == [
        ["activation", "gradient", "gradient_before_clip"],
        "the parameters could not be copied before the step",
    ]


@needs_devices
def test_new_sizes_take_few_launches() -> None:
    assert _ran("statistics_of_many_sizes") <= 40


@needs_devices
def test_fingerprints_of_many_tensors_take_few_launches_and_no_wait() -> None:
    result = _ran("fingerprints_of_many")
    assert result["equal"]
    assert result["reads"] == 0
    # those that mix all words at once, and one for the last word of each tensor that has no whole number of them
    assert result["launches"] <= 30 + 2 * 50
