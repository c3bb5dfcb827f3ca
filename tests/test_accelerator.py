"""What is asked of an accelerator, on builds of torch for one that is not there, and in a child of a process that has used it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core import torch_modes
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.step import buffer
from torch_gradmon.step.ranks import Ranks


class _Functions(SimpleNamespace):
    """The functions of a device that this build of torch is for."""

    asked: int = 0

    def is_current_stream_capturing(self) -> bool:
        self.asked += 1
        raise RuntimeError("driver version is insufficient")

    def is_available(self) -> bool:
        raise AssertionError("initialises the driver")

    def current_device(self) -> int:
        return 0


@pytest.fixture(params=["unused", "broken"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Functions]:
    """A CUDA build of torch on a machine without a GPU, and one whose driver fails."""
    found = _Functions(is_initialized=lambda: request.param == "broken")
    monkeypatch.setattr(torch_modes, "accelerator_kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch_modes, "functions_of", lambda device: found)
    torch_modes.forget_devices()
    yield found
    monkeypatch.undo()
    torch_modes.forget_devices()


def test_a_model_on_the_cpu_is_watched_by_a_build_for_an_accelerator(functions: _Functions) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0
    assert (functions.asked > 0) == functions.is_initialized()


def test_a_build_without_a_device_has_none_where_torch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> Any:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert torch_modes.accelerator_kind() is None
    assert torch_modes.in_use() is None


@pytest.mark.parametrize(
    ("kind", "backend", "expected"),
    [
        ("cuda", "nccl", "cuda:0"),
        ("cuda", "gloo", "cpu"),
        ("mps", "gloo", "cpu"),
        ("xpu", "xccl", "xpu:0"),
        (None, "gloo", "cpu"),
    ],
)
def test_a_process_group_takes_tensors_of_its_backends_device(
    kind: str | None, backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_modes, "accelerator_kind", lambda: None if kind is None else torch.device(kind))
    monkeypatch.setattr(torch_modes, "functions_of", lambda device: SimpleNamespace(current_device=lambda: 0))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    assert Ranks().device == torch.device(expected)


def test_memory_that_cannot_be_pinned_for_the_moment_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True])

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and not next(answers):
            raise RuntimeError("out of memory")
        return made(*args, **options)

    made = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch_modes, "_PINNED", set())
    monkeypatch.setattr(torch_modes, "_UNPINNED", set())
    found = [torch_modes._pinned(torch.ones(3), torch.device("cuda")) is not None for _ in range(3)]
    assert found == [True, False, True]


class TestNumberOfTheStream:
    """A build for CUDA knows it without an object."""

    def test_the_usual_one_is_0_and_any_other_is_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = {0: 0, 1: 94_000}
        monkeypatch.setattr(torch_modes, "_RAW_STREAM", numbers.__getitem__)
        assert [torch_modes.stream_number(torch.device("cuda", index)) for index in numbers] == [0, 94_000]

    def test_there_is_none_where_torch_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def raises(index: int) -> int:
            raise RuntimeError("no driver")

        monkeypatch.setattr(torch_modes, "_RAW_STREAM", raises)
        assert torch_modes.stream_number(torch.device("cuda", 0)) is None

    def test_other_devices_are_asked_for_the_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_modes, "_RAW_STREAM", lambda index: 1 / 0)
        monkeypatch.setattr(torch_modes, "current_stream", lambda device: SimpleNamespace(stream_id=7))
        assert torch_modes.stream_number(torch.device("xpu", 0)) == 7
        assert torch_modes.stream_number(torch.device("cuda")) == 7  # no index: the current device's


def test_a_value_on_the_stream_of_number_0_is_awaited_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[object] = []
    streams = {
        0: SimpleNamespace(name="usual", wait_stream=awaited.append),
        5: SimpleNamespace(name="side", wait_stream=awaited.append),
    }
    now = [0]
    monkeypatch.setattr(buffer, "stream_number", lambda device: now[0])
    monkeypatch.setattr(buffer, "current_stream", lambda device: streams[now[0]])
    values, device = buffer.StepBuffer(0, WarningLog()), torch.device("cuda", 0)
    values._note_stream(device)
    now[0] = 5
    values.join_streams()
    assert awaited == [streams[0]]
    values.join_streams()  # the values are where the current stream has them now
    assert awaited == [streams[0]]


def test_a_device_whose_stream_is_not_known_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    number = [0]
    monkeypatch.setattr(buffer, "stream_number", lambda device: number[0])
    monkeypatch.setattr(buffer, "current_stream", lambda device: None)
    values = buffer.StepBuffer(0, WarningLog())
    values._note_stream(torch.device("cuda", 0))
    number[0] = 5
    values.join_streams()
