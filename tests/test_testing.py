"""``torch_gradmon.testing``: what it keeps is what a run has, late values included."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.core.keys import Key
from torch_gradmon.testing import RecordingSink, collect_records

LOSS = Key("", "loss", "")


class Loop:
    """A loop that logs its loss after the optimizer's step."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.monitor = gradmon.watch(self.model, self.optimizer, on_spike=None, **options)  # type: ignore[arg-type]

    def run(self, *scales: float) -> list[float]:
        losses = []
        for scale in scales:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(torch.ones(4, 3)).square().mean() * scale
            loss.backward()
            self.optimizer.step()
            self.monitor.log_scalar("loss", loss.detach())
            losses.append(loss.item())
        return losses


def test_a_block_has_the_steps_that_end_in_it_with_their_late_values() -> None:
    loop = Loop()
    loop.run(1, 1)
    with collect_records(loop.monitor) as records:
        losses = loop.run(1, 2, 3)
    loop.run(1)
    assert [record.step for record in records] == [2, 3, 4]
    assert [record.values[LOSS] for record in records] == pytest.approx(losses)
    assert all("gradient_before_clip" in record.tables for record in records)


def test_steps_that_are_not_monitored_are_left_out_and_a_second_block_starts_empty() -> None:
    loop = Loop(every=3)
    with collect_records(loop.monitor) as records:
        loop.run(*[1] * 7)
        with collect_records(loop.monitor) as inner:
            loop.run(*[1] * 3)
    assert [record.step for record in records] == [0, 3, 6, 9]
    assert [record.step for record in inner] == [9]


def test_a_spike_that_was_logged_late_is_in_the_last_record() -> None:
    loop = Loop()
    loop.monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    loop.run(*[1.0] * 59)
    with collect_records(loop.monitor) as records:
        loop.run(1e4)
    assert "loss" in [event.signal for event in records[0].events]


def test_a_block_that_raises_leaves_nothing_behind() -> None:
    loop = Loop()
    with contextlib.suppress(KeyError), collect_records(loop.monitor) as records:
        loop.run(1)
        raise KeyError
    loop.run(1)
    assert [record.step for record in records] == [0]


def test_a_sink_keeps_rows_spikes_and_that_it_was_closed() -> None:
    loop, sink = Loop(), RecordingSink()
    loop.monitor.add_sink(sink)
    losses = loop.run(*[1.0] * 59, 1e4)
    assert sink.closed == 0
    loop.monitor.detach()
    assert sink.closed == 1
    assert sink.steps == list(range(60))
    assert [values["loss"] for _, values in sink.rows] == pytest.approx(losses)
    assert [event.step for event in sink.spikes] == [59]


def test_the_module_is_an_attribute_of_the_package() -> None:
    assert gradmon.testing.RecordingSink is RecordingSink
