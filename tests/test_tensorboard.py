"""The TensorBoard sink with the real package; event files are read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.sinks import TensorBoardSink

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.extra

#: Kept here, since a monitor keeps no model alive.
MODEL = nn.Linear(1, 1)


def _read(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def _scalars(directory: Path) -> dict[str, dict[int, float]]:
    found = _read(directory)
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _writer(directory: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory))


def _log(monitor: ModuleMonitor, steps: int) -> None:
    for step in range(steps):
        monitor.begin_step(step)
        monitor.log_scalars({"loss": 1.0 + step % 3 / 10 if step != 50 else 100.0, "third": step / 3})
        monitor.end_step()


@pytest.mark.parametrize("given", ["directory", "writer", "the writer itself"])
def test_a_watched_run_reads_back_with_its_values(given: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, layers="all")
    writer = None if given == "directory" else _writer(tmp_path / "tb")
    monitor.add_sink(writer if given == "the writer itself" else TensorBoardSink(writer or tmp_path / "tb"))
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    wanted: dict[str, dict[int, float]] = {}
    for step, values in monitor.get_all_metrics().items():
        for key, value in values.items():
            wanted.setdefault(key, {})[step] = _float32(value)
    assert _scalars(tmp_path / "tb") == wanted
    if writer is not None:
        writer.close()


def test_a_step_is_one_summary_in_one_directory(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    sink = TensorBoardSink(tmp_path / "tb")
    for step in range(3):
        sink.log({f"gradient/layer.{i}/norm": float(i) for i in range(100)}, step)
    sink.close()
    assert [path for path in (tmp_path / "tb").rglob("*") if path.is_dir()] == []
    (file,) = (tmp_path / "tb").iterdir()
    sizes = [(event.step, len(event.summary.value)) for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert sizes == [(0, 100), (1, 100), (2, 100)]


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 7)
    sink.close()
    found = _scalars(tmp_path)
    assert math.isnan(found["a"][7])
    assert (found["b"], found["c"]) == ({7: math.inf}, {7: -math.inf})


def test_a_spike_is_a_text(tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.add_sink(TensorBoardSink(tmp_path))
    _log(monitor, 60)
    monitor.detach()
    (event,) = _read(tmp_path).Tensors("gradmon/spikes/text_summary")
    assert event.step == 50
    assert event.tensor_proto.string_val[0].decode().startswith("    step 50: loss = 100 is 90.9 times the usual 1.1")


def test_a_writer_of_the_script_stays_open_and_may_be_closed_by_it(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(writer)
    _log(monitor, 3)
    writer.close()
    _log(monitor, 0)
    monitor.begin_step(3)
    monitor.log_scalars({"loss": 9.0})
    monitor.end_step()
    monitor.detach()
    writer.add_scalar("own", 1.0, 0)
    writer.close()
    found = _scalars(tmp_path)
    assert found["loss"] == pytest.approx({0: 1.0, 1: 1.1, 2: 1.2, 3: 9.0})
    assert found["own"] == {0: 1.0}


def test_a_directory_goes_on_after_detach(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log({"x": 1.0}, 0)
    sink.close()
    sink.log({"x": 2.0}, 1)
    sink.close()
    assert {step: value for directory in [tmp_path] for step, value in _scalars(directory)["x"].items()} == {0: 1.0, 1: 2.0}


def test_other_writers_get_scalars(tmp_path: Path) -> None:
    class SummaryWriter:  # as tensorboardX has it
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.rows.append((tag, value, step))

        def flush(self) -> None:
            pass

    writer = SummaryWriter()
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(writer)
    _log(monitor, 2)
    monitor.detach()
    assert writer.rows == [("loss", 1.0, 0), ("third", 0.0, 0), ("loss", 1.1, 1), ("third", 1 / 3, 1)]


def test_a_full_disk_does_not_stop_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(TensorBoardSink(tmp_path / "file" / "tb"))
    with pytest.warns(GradmonWarning, match="the sink TensorBoardSink failed 3 times in a row, first with step 0"):
        _log(monitor, 5)
    monitor.detach()


def test_it_needs_a_writer_or_a_directory() -> None:
    with pytest.raises(TypeError, match="writer_or_dir must be a SummaryWriter or a directory, got 3 of type int"):
        TensorBoardSink(3)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file' is a file; give the directory for event files"):
        TensorBoardSink(tmp_path / "file")


def _steps_shown(directory: Path, tag: str = "x") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _read(directory).Scalars(tag)]


def test_a_step_is_shown_once_after_a_resume_or_rollback(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in range(8):
        first.log({"x": float(step)}, step)
    first.close()
    resumed = TensorBoardSink(tmp_path)
    for step in (5, 6, 7, 8, 6, 7):  # from a checkpoint, and then rolled back
        resumed.log({"x": 10.0 + step}, step)
    resumed.close()
    assert _steps_shown(tmp_path) == [*((step, float(step)) for step in range(5)), (5, 15.0), (6, 16.0), (7, 17.0)]


def test_a_directory_where_others_write_loses_none_of_theirs(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    for step in range(8):
        writer.add_scalar("theirs", float(step), step)
    writer.close()
    for _ in range(2):
        sink = TensorBoardSink(tmp_path)
        sink.log({"x": 1.0}, 5)
        sink.close()
    assert [step for step, _ in _steps_shown(tmp_path, "theirs")] == list(range(8))
