"""Whole training loops under ``watch`` on a GPU; ``make test-gpu`` runs them with all tests marked ``gpu``.

Where there is no GPU, the same programs run on the simulated device (:class:`TestOnTheSimulatedDevice`): nothing is run on a GPU then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

import torch_gradmon as gradmon

from . import cuda_programs, forked
from .device_loop import STEPS
from .device_programs import PROGRAMS, run
from .places import Place

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
_HAS_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
needs_devices = pytest.mark.skipif(not _HAS_DEVICES, reason="this torch has no devices in Python")
PRESETS = ("minimal", "standard", "full")
#: What the sanitizer prints of a race.
RACE = "possible data race"


def in_process(kind: str, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Programs in a process of their own: the simulated device needs one, a capture that fails may leave a GPU unusable, and the stream
    sanitizer begins with the import of torch.
    """
    if kind == "simulated":
        program = "import sys; from tests import device_programs; device_programs.main(*sys.argv[1:])"
        return forked.run(program, kind, *names, cwd=ROOT)
    command = [sys.executable, "-W", "ignore", "-m", "tests.device_programs", kind, *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=False)


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the programs returned."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(next(line[2:] for line in done.stdout.splitlines() if line.startswith("= ")))
    return found


# --- what holds on any device --------------------------------------------------------------------------------------------------


def check_hot_path(result: dict[str, Any], *, copies: int, most_waits: int) -> None:
    """No operation waited, or the program had failed; waits for events, and copies to the host, are as few as promised."""
    assert len(result["counts"]) == STEPS
    for step in result["counts"]:
        assert step["waits"] <= most_waits
        assert (step["copies"], step["unpinned"]) == (copies, 0)
    assert result["worst"] < 1e-6


def check_scaler(result: dict[str, Any]) -> None:
    """Gradients are reported unscaled; the refused step is counted."""
    assert result["worst"] < 1e-6
    assert result["spoiled"]
    assert result["not_applied"] == [0.0] * 5 + [1.0] * 3
    assert not any(result["waits"])


def check_capturable(result: dict[str, Any]) -> None:
    """Each record has the learning rate of its step, which was on the device and has changed since."""
    assert result["worst"] < 1e-6
    assert result["rates"] == [[pytest.approx(1e-2 * 0.5**step)] for step in range(8)]
    assert not any(result["waits"])


def check_numbers(result: dict[str, Any], least: int) -> None:
    """The numbers are those of the CPU."""
    assert result["worst"] < 1e-6
    assert result["values"] >= least


def check_captured_step(result: dict[str, Any]) -> None:
    """The capture trains as it does without the monitor, and nothing is reported of replays, which no hook has seen."""
    assert result["same_bits"]
    assert result["worst"] < 1e-6
    assert result["of_replays"] == []


def check_captured_backward(result: dict[str, Any]) -> None:
    """What the optimizer used in each step is reported, though no hook has seen the backward pass."""
    assert result["values"] == 30
    assert result["worst"] < 1e-6
    assert result["worst_of_whole"] < 1e-6


CAPTURED = pytest.mark.parametrize(
    ("name", "check"), [("captured_step", check_captured_step), ("captured_backward", check_captured_backward)]
)
#: The words in which CUDA refuses to wait within a capture, and so does the simulated device.
REFUSAL = "operation not permitted when stream is capturing"


# --- on a GPU --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> Place:
    return Place("cuda")


@pytest.mark.gpu
class TestOnAGpu:
    def test_the_checks_catch_what_waits(self, gpu: Place) -> None:
        assert run(gpu, "control") == {"read": True, "copy": True, "nothing": False}

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_watched_loop_waits_for_nothing(self, gpu: Place, preset: str) -> None:
        check_hot_path(run(gpu, preset), copies=1, most_waits=0)

    def test_a_decision_to_skip_waits_once(self, gpu: Place) -> None:
        check_hot_path(run(gpu, "skip"), copies=2, most_waits=1)

    def test_numbers_are_those_of_the_cpu(self, gpu: Place) -> None:
        check_numbers(run(gpu, "numbers_of_training"), least=500)
        check_numbers(run(gpu, "numbers_in_float32"), least=48)

    def test_fused_adamw_under_a_scaler(self, gpu: Place) -> None:
        check_scaler(run(gpu, "fused_with_scaler"))

    def test_capturable_adamw_with_its_rate_on_the_device(self, gpu: Place) -> None:
        check_capturable(run(gpu, "capturable"))

    @CAPTURED
    def test_a_step_is_captured_whole_or_in_part(self, name: str, check: Callable[[dict[str, Any]], None]) -> None:
        check(results(in_process("cuda", name))[name])

    def test_a_question_about_an_event_ends_a_capture(self) -> None:
        assert REFUSAL in in_process("cuda", "captured_query").stderr

    def test_the_stream_sanitizer_catches_a_race(self) -> None:
        done = in_process("cuda", "side_stream_race", TORCH_CUDA_SANITIZER="1")
        assert done.returncode != 0
        assert RACE in done.stderr

    @pytest.mark.parametrize("name", ["side_backward", "side_update"])
    def test_the_stream_sanitizer_finds_nothing_in_a_watched_loop(self, name: str) -> None:
        done = in_process("cuda", name, TORCH_CUDA_SANITIZER="1")
        assert RACE not in done.stderr
        assert results(done)[name]["worst"] < 1e-6

    @pytest.mark.parametrize("name", cuda_programs.PROGRAMS)
    def test_a_compiled_or_a_wrapped_model_trains_as_without_a_monitor(self, name: str) -> None:
        found = results(in_process("cuda", name, CUBLAS_WORKSPACE_CONFIG=":4096:8"))[name]
        assert found["repeats"] == []  # without a monitor: else nothing could be said of one
        assert found["changed"] == []
        assert found["steps"] == cuda_programs.STEPS
        assert found["worst"] < 1e-5
        assert {"gradient", "parameter", "update", "activation"} <= set(found["kinds"])

    # torch's own, of gradients that its graphs bring on their stream
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
    def test_graphed_callables_train_and_report_as_a_plain_module(self) -> None:
        found = {}
        for is_graphed in (False, True):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().cuda()
            batches = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
            if is_graphed:  # before watch(), since torch refuses a module with hooks
                model = torch.cuda.make_graphed_callables(model, (batches[0].clone(),))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            monitor = gradmon.watch(model, optimizer)
            for batch in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            monitor.detach()
            found[is_graphed] = list(monitor.get_all_metrics().values())
        assert len(found[True]) == 6
        for graphed, plain in zip(found[True], found[False], strict=True):
            assert graphed.keys() == plain.keys()
            for key in plain.keys() - {"gradmon/overhead_fraction"}:
                assert graphed[key] == pytest.approx(plain[key], rel=1e-6, abs=1e-12)


# --- without one -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results(in_process("simulated"))


@needs_devices
class TestOnTheSimulatedDevice:
    def test_it_runs_every_program(self, found: dict[str, Any]) -> None:
        assert found.keys() == PROGRAMS.keys()
        assert found["control"] == {"read": True, "copy": True, "nothing": False}

    def test_no_step_waits_but_for_a_decision(self, found: dict[str, Any]) -> None:
        for preset in PRESETS:
            check_hot_path(found[preset], copies=1, most_waits=0)
        check_hot_path(found["skip"], copies=2, most_waits=1)
        assert all(step["waits"] == 1 for step in found["skip"]["counts"])

    def test_numbers_are_those_of_the_cpu(self, found: dict[str, Any]) -> None:
        check_numbers(found["numbers_of_training"], least=500)
        check_numbers(found["numbers_in_float32"], least=48)

    def test_optimizers_that_work_on_the_device_alone(self, found: dict[str, Any]) -> None:
        check_scaler(found["fused_with_scaler"])
        check_capturable(found["capturable"])

    def test_streams_are_waited_for(self, found: dict[str, Any]) -> None:
        assert found["side_update"]["worst"] < 1e-6
        assert "may still write" in in_process("simulated", "side_stream_race").stderr

    @CAPTURED
    def test_a_step_is_captured_whole_or_in_part(self, name: str, check: Callable[[dict[str, Any]], None]) -> None:
        check(results(in_process("simulated", name))[name])

    def test_a_question_about_an_event_ends_a_capture(self) -> None:
        assert REFUSAL in in_process("simulated", "captured_query").stderr
