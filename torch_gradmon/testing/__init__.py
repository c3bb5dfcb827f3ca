"""Helpers for tests of code that uses a monitor: ``from torch_gradmon import testing``.

They need no test framework and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..core.records import SpikeEvent, StepRecord
from ..monitor.monitor import ModuleMonitor
from .simulated import SimulatedDevice, SimulatedGraph, Work, simulated_device

__all__ = ["RecordingSink", "SimulatedDevice", "SimulatedGraph", "Work", "collect_records", "simulated_device"]


class RecordingSink:
    """A sink that keeps what the monitor sends: ``monitor.add_sink(RecordingSink())``.

    Rows and spikes keep the order in which they arrive. A subclass may override :meth:`log` to raise.

    Attributes:
        rows: one ``(step, values)`` for each step, with a copy of the values by key.
        spikes: one :class:`SpikeEvent` for each spike.
        closed: how often the monitor closed the sink.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.spikes: list[SpikeEvent] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep one row."""
        self.rows.append((step, dict(values)))

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Keep one spike; ``text`` is ``str(event)``."""
        self.spikes.append(event)

    def close(self) -> None:
        """Count the call in :attr:`closed`."""
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        """The step number of each row."""
        return [step for step, _ in self.rows]


@contextmanager
def collect_records(monitor: ModuleMonitor) -> Iterator[list[StepRecord]]:
    """Collect the records of the monitored steps that end inside the ``with`` block.

    A record enters the list when its values are on the host: on the CPU when the step ends, on other devices one or two steps later.
    A value logged after ``optimizer.step()`` replaces the record in the list with one that has the value. The end of the block waits
    for the last step, evaluates the detectors of values logged late, and leaves the list complete.

    Args:
        monitor: the monitor; its sinks, getters and run directory work as usual.

    Yields:
        The list, in the order in which the steps ended.

    Example:
        >>> import torch
        >>> import torch_gradmon as gradmon
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> monitor = gradmon.watch(model, optimizer)
        >>> with gradmon.testing.collect_records(monitor) as records:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     monitor.log_scalar("loss", 2.0)
        >>> [(record.step, record.applied) for record in records]
        [(0, True)]
        >>> records[0].values["", "loss", ""]
        2.0
    """
    runtime = monitor._runtime
    runtime.settle_now()  # a step that ended before the block is not part of it
    records: list[StepRecord] = []

    def observe(record: StepRecord, is_update: bool) -> None:
        if not is_update:
            records.append(record)
        elif records and records[-1].step == record.step:
            records[-1] = record

    runtime.pipeline.observers.append(observe)
    try:
        yield records
        runtime.settle_now(judges=True)
    finally:
        runtime.pipeline.observers.remove(observe)
