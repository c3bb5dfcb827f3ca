"""List the zoo, or run trainings without and with a monitor, and print seconds and losses."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import torch_gradmon as gradmon

from . import FAULTS, HEALTHY, Training, Watch


class Nobody:
    """Replaces a monitor and only keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def __call__(self, model: Any, *optimizers: Any, scaler: Any = None) -> Nobody:
        """As ``watch``."""
        return self

    def log_scalar(self, name: str, value: Tensor) -> None:
        """Keep the loss."""
        if name == "loss":
            self.losses.append(value)

    @contextlib.contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Do nothing, because nothing is monitored."""
        yield


def watched(model: Any, *optimizers: Any, scaler: Any = None) -> Any:
    """A monitor with all built-in metrics, without warnings about spikes."""
    return gradmon.watch(model, *optimizers, scaler=scaler, preset="full", on_spike=None)


def timed(training: Training, watch: Watch, healed: bool, seed: int = 0) -> tuple[float, float]:
    """Seconds and the mean of the last losses."""
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        end = training.run(watch, seed, healed)
    return time.process_time() - begin, end


def check(trainings: list[Training]) -> None:
    """Print a line for each; ``bits`` states whether the last loss is the same with the monitor."""
    print(f"{'training':45} {'':6} {'s':>6} {'s seen':>6} {'first':>10} {'last':>10}  bits")
    for training in trainings:
        for healed in (False, True) if training.rule else (False,):
            nobody = Nobody()
            seconds, end = timed(training, nobody, healed)
            seen, same = timed(training, watched, healed)
            bits = "same" if end == same or (math.isnan(end) and math.isnan(same)) else f"OTHER {same:.4g}"
            kind = "" if not training.rule else "healed" if healed else "faulty"
            first = float(nobody.losses[0])
            print(f"{training.name:45} {kind:6} {seconds:6.2f} {seen:6.2f} {first:10.4g} {end:10.4g}  {bits}", flush=True)


def table(trainings: list[Training]) -> None:
    """Print name, rule, whether it is held back, and the advice."""
    for training in trainings:
        held = "held back" if training.held_back else ""
        print(f"{training.name:45} {training.rule or 'healthy':28} {held:10} {training.advice}")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--list", action="store_true", help="print a table of all trainings")
    choice.add_argument(
        "--check", nargs="*", metavar="NAME", help="run those whose name, rule or family contains one of these; all without"
    )
    arguments = parser.parse_args()
    trainings = [*FAULTS, *HEALTHY]
    if arguments.list:
        return table(trainings)
    torch.set_num_threads(1)
    names = arguments.check or [""]
    return check([t for t in trainings if any(name in f"{t.name} {t.rule}" for name in names)])


if __name__ == "__main__":
    main()
