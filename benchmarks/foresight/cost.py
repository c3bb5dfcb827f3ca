"""What the early signals cost on a CPU: ``python -m benchmarks.foresight.cost``.

Each set of signals watches its own copy of a GPT and is measured in every second step. Its cost is the time of such a step beyond the step
before it, over that step, as a share of all steps at the interval at which it is to be used.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gradmon as gradmon
from examples.plugins.foresight import Foresight
from examples.plugins.headroom import Headroom
from torch_gradmon.step.plugin import Plugin

from ..faults.judging import describe
from ..machine import machine
from ..models import GPT, GPT_10M
from ..report import RESULTS, write_section
from ..timing import spread

ROUNDS, _WARM_UP = 15, 2
_SEQUENCES, _LENGTH = 4, 256
Batch = tuple[Tensor, Tensor]
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Signals:
    """Signals that are measured together.

    Attributes:
        name: in the table.
        add: to a monitor.
        plugins: that are given to it, from the loss of the batch.
        every: the interval that the share is of.
    """

    name: str
    add: Callable[[gradmon.ModuleMonitor], None] = lambda monitor: None
    plugins: Callable[[Loss], list[Plugin]] = lambda loss: []
    every: int = 50


def _out_of_step(monitor: gradmon.ModuleMonitor) -> None:
    monitor.add_optimizer_metric("second_moment_ratio")


def _matrices(monitor: gradmon.ModuleMonitor) -> None:
    for metric in ("spectral_norm", "stable_rank"):
        monitor.add_parameter_metric(metric, metric_regex="weight")


def _turns(monitor: gradmon.ModuleMonitor) -> None:
    for metric in ("angle", "growth"):
        monitor.add_update_metric(metric)


def _sides(monitor: gradmon.ModuleMonitor) -> None:
    monitor.add_activation_metric("spectral_alignment", metric_regex="(qkv|out|up|down)$")


def _plasticity(monitor: gradmon.ModuleMonitor) -> None:
    for metric in ("dormant", "participation_ratio"):
        monitor.add_activation_metric(metric, metric_regex="(up|down)$")


def _attention(monitor: gradmon.ModuleMonitor) -> None:
    monitor.add_attention_metric("max_logit")


SETS = (
    Signals("preset `minimal` alone, which the others contain"),
    Signals("`second_moment_ratio` of all parameters", _out_of_step),
    Signals("`Headroom`, at most eight forwards", plugins=lambda loss: [Headroom(loss, every=2)]),
    Signals("`spectral_norm` and `stable_rank` of all weights", _matrices),
    Signals("`angle` and `growth` of all updates", _turns),
    Signals("`spectral_alignment` of all linear layers", _sides),
    Signals("`dormant` and `participation_ratio` of the feed-forward layers", _plasticity),
    Signals("`max_logit` of attention", _attention),
    Signals("`Foresight`", plugins=lambda loss: [Foresight(every=2)], every=5),
)


class _Side:
    """A copy of the model with its signals."""

    def __init__(self, model: GPT, signals: Signals, batch: Batch) -> None:
        self._model, self._batch = model, batch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        plugins = signals.plugins(lambda: model(*batch))
        self._monitor = gradmon.watch(
            model, self._optimizer, preset="minimal", every=2, checks=gradmon.Checks(data=False), plugins=plugins
        )
        signals.add(self._monitor)

    def step(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        loss = self._model(*self._batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - begin

    def share(self) -> float:
        """The time of a measured step beyond the idle one after it, over that one."""
        measured, idle = self.step(), self.step()
        return (measured - idle) / idle

    def check(self) -> int:
        """The number of values of one more measured step."""
        self.step()
        return len(self._monitor.get_step_metrics())


def measure(rounds: int, threads: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(GPT_10M)
    text = torch.randint(GPT_10M.vocabulary, (_SEQUENCES, _LENGTH + 1))
    sides = {signals: _Side(copy.deepcopy(model), signals, (text[:, :-1], text[:, 1:])) for signals in SETS}
    shares: dict[Signals, list[float]] = {signals: [] for signals in SETS}
    order = random.Random(0)
    for number in range(-_WARM_UP, rounds):
        for signals in order.sample(SETS, len(SETS)):
            share = sides[signals].share()
            if number >= 0:
                shares[signals].append(share)
    return [
        {
            "name": signals.name,
            "every": signals.every,
            "values": sides[signals].check(),
            "steps": spread(of),
            "pct": spread([100 * share / signals.every for share in of]),
        }
        for signals, of in shares.items()
    ]


def table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """Rows of Markdown."""
    yield "| signals | one measurement, in steps | every | share of the time |"
    yield "| --- | ---: | ---: | ---: |"
    for row in rows:
        steps, share = (
            f"{row[key]['median']:.2f} [{row[key]['quartile_1']:.2f}, {row[key]['quartile_3']:.2f}]" for key in ("steps", "pct")
        )
        yield f"| {row['name']} | {steps} | {row['every']} | {share} % |"


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    tokens = _SEQUENCES * _LENGTH
    return "\n".join(
        [
            *table(result["rows"]),
            "",
            f"Median [quartiles] of {result['rounds']} rounds; a GPT of 10 million parameters, {tokens} tokens a step, AdamW, "
            f"{result['threads']} thread{'s' * (result['threads'] > 1)}; {describe(result['machine'])}; {result['date']}.",
        ]
    )


def main() -> None:
    """Measure, print, and keep the result of a whole run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    result = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "rows": measure(arguments.rounds, arguments.threads),
    }
    print(markdown(result))
    if arguments.rounds >= ROUNDS:
        (RESULTS / "foresight_cost.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("foresight-cost", markdown(result))


if __name__ == "__main__":
    main()
