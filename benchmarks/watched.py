"""Steps of a watched model, and the seconds that watching adds to them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count, pairwise

from torch import Tensor, nn

from .timing import Run
from .watchers import Monitor

Batch = tuple[Tensor, Tensor]
_WARM_UP = 2


class Stopwatch:
    """Adds up the seconds between its two hooks before each module and its two after it: the time of the hooks between.

    Its own hooks are the first and the last only if all others are installed already.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = self._since = 0.0
        self._modules = list(model.modules())
        for module in self._modules:
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                register(self._start, prepend=True)
                register(self._stop)

    def check(self) -> None:
        """See whether its hooks are still the first and the last everywhere.

        Raises:
            RuntimeError: they are not, so that its seconds are not those of all hooks.
        """
        for module in self._modules:
            for hooks in (list(module._forward_pre_hooks.values()), list(module._forward_hooks.values())):
                if (hooks[0], hooks[-1]) != (self._start, self._stop):
                    raise RuntimeError(f"a hook of {type(module).__name__} was installed outside of the stopwatch's")

    def _start(self, *_: object) -> None:
        self._since = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


@dataclass(frozen=True)
class Cost:
    """Seconds of one step.

    Attributes:
        added: in the monitor's hooks and the calls around the step.
        forward: of the forward and those calls; the backward pass is not affected, and would only add noise.
        whole: the same with the backward pass.
    """

    added: float
    forward: float
    whole: float


class Side:
    """A copy of the model and its watcher. Takes steps and keeps their cost."""

    def __init__(self, model: nn.Module, monitor: Monitor | None, batch: Batch) -> None:
        self.model, self.monitor, self._batch = model, monitor, batch
        self.costs: list[Cost] = []
        self.values: dict[str, float] = {}
        self._numbers = count()
        self._stopwatch: Stopwatch | None = None
        for _ in range(_WARM_UP):  # the first step installs hooks, and compiles
            self._step()
        self._stopwatch = Stopwatch(model)

    def step(self) -> Cost:
        """A measured step.

        Raises:
            RuntimeError: the monitor has installed new hooks outside of the stopwatch.
        """
        assert self._stopwatch is not None
        self._stopwatch.seconds = 0.0
        calls, forward, backward = self._step()
        self._stopwatch.check()
        self.costs.append(Cost(calls + self._stopwatch.seconds, calls + forward, calls + forward + backward))
        return self.costs[-1]

    def _step(self) -> tuple[float, float, float]:
        """Forward, backward and the step's values, by hand: seconds of the monitor's calls, of the forward, of the backward pass."""
        marks = [time.perf_counter()]
        if self.monitor is not None:
            self.monitor.begin_step(next(self._numbers))
        marks.append(time.perf_counter())
        loss = self.model(*self._batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        if self.monitor is not None:
            self.monitor.end_step()
            self.values = self.monitor.get_step_metrics()
        marks.append(time.perf_counter())
        self.model.zero_grad()
        begin, forward, backward, end = (after - before for before, after in pairwise(marks))
        return begin + end, forward, backward


def clock(run: Run) -> float:
    """Seconds of a call; a step has its own count of added seconds."""
    start = time.perf_counter()
    found = run()
    return found.added if isinstance(found, Cost) else time.perf_counter() - start


def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The outputs of the modules of ``model`` in a forward with gradients."""
    found: list[Tensor] = []
    handles = [m.register_forward_hook(lambda *args: found.append(args[2].detach())) for m in model.modules()]
    model(*batch)
    for handle in handles:
        handle.remove()
    return found
