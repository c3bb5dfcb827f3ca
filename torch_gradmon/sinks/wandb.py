"""Weights & Biases: rows that fit between those of the script."""

from __future__ import annotations

import atexit
import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..core.errors import display, warn_user
from ..core.keys import ATTENTION_SOURCES, NAME_SOURCES, SUMMARY, TENSOR_SOURCES
from ..core.records import SpikeEvent
from ..core.torch_modes import HomeProcess
from .delivery import require
from .tensorboard import with_histograms_of

# --- Where a row fits into a W&B run that the script logs to as well ---

#: The axis of everything that is logged here: the monitor's step.
AXIS = f"{SUMMARY}/step"
_ATTRIBUTE = "_gradmon_rows"


@dataclass
class Clock:
    """The steps of one monitor compared with those that the script names."""

    at: int | None = None  # the monitor's step; None before the first
    gap: int = 1  # the largest difference between two of them
    ahead: int | None = None  # by how many steps the script was ahead when it last named one; None before that
    slow: bool = False  # the script has fallen back, so its steps are not the monitor's

    def reach(self, step: int) -> None:
        """Set the monitor's step."""
        if self.at is not None:
            self.gap = max(self.gap, step - self.at)
        self.at = step

    def observe(self, named: int) -> None:
        """Take a step that the script has named."""
        ahead = named - (-1 if self.at is None else self.at)
        self.slow |= self.ahead is not None and ahead + self.gap - 1 < self.ahead
        self.ahead = ahead

    @property
    def next_named(self) -> int:
        """The first step that the script may still name, if it continues as before."""
        if self.slow or self.at is None or self.ahead is None:
            return 0
        return self.at + self.ahead - self.gap + 2


class Rows:
    """What the script has logged to ``run``, and whether there is room for another row. All sinks of a run share one."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.clocks: list[Clock] = []
        self.is_named, self.moves = False, 0  # the script has given step=; rows that it has closed without, since our first
        self.moved = False  # it has logged since our last row
        self.shift = 0  # what is added to the steps that it names, because our rows came first
        self._is_silent = True  # the script has not logged since our first row
        self._led = 0  # by how much the counter advanced meanwhile, for our rows
        self.overtaken: tuple[int, int] | None = (
            None  # a step that it named behind the counter, and the counter, until a sink warns
        )
        self._ours: float | None = None  # step of our row in the open row
        self._half = False  # whether the script has left its row open
        self._named: int | None = None  # its last step
        self._stride: int | None = None  # the smallest difference between two of them
        self._logs_ours = False
        self._observe_script()

    @classmethod
    def of(cls, run: Any) -> Rows | None:
        """The rows of this run; None if it stores nothing, as a disabled run."""
        if not callable(getattr(run, "_log", None)) or not isinstance(getattr(run, "_local_step", None), int):
            return None
        # a run accepts no foreign attributes, so the object is stored on the wrapper of one of its methods
        found: Rows | None = getattr(run._log, _ATTRIBUTE, None)
        return cls(run) if found is None else found

    def _observe_script(self) -> None:
        """Wrap ``run._log``, through which ``run.log`` and ``wandb.log`` both go."""
        original: Callable[..., Any] = self.run._log

        def noted(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
            with self.lock:
                counter = counter_of(self.run)
                if self._logs_ours:
                    return original(data, step, commit)
                if isinstance(step, int):
                    if self._is_silent and step < counter:
                        self.shift = min(counter - step, self._led)
                    step += self.shift
                result = original(data, step, commit)
                self._update(step, commit, counter)
                return result

        setattr(noted, _ATTRIBUTE, self)
        self.run._log = noted

    def _update(self, step: int | None, commit: bool | None, counter: int) -> None:
        """Take a call of the script, made when the run was at ``counter``."""
        closes = bool(commit) or (step is None and commit is None)
        self.moved = True
        has_begun = any(clock.at is not None for clock in self.clocks)
        self._is_silent &= not has_begun
        self._half = not closes
        if closes or (step is not None and step > counter):
            self._ours = None
        if step is None:
            self.moves += closes and has_begun
            return
        if step < counter and (self._named is None or step > self._named):
            self.overtaken = step, counter
        if self._named is not None and step > self._named:
            self._stride = min(self._stride or step - self._named, step - self._named)
        self._named = step if self._named is None else max(step, self._named)
        for clock in self.clocks:
            clock.observe(self._named)
        self.is_named = True

    def may_join(self, axis: float) -> bool:
        """Whether our row for the step ``axis`` may join the open row. It must not overwrite our row of another step."""
        return self._ours is None or self._ours == axis

    def may_advance(self, alone: bool) -> bool:
        """Whether the counter may advance by one."""
        if not self.is_named:
            return alone or self._is_silent or self.moves > 0
        if self._stride is None or self._named is None:
            return False
        # the new row must lie before the next step that the script can name, by its stride and by its clock
        next_named = min(self._named + self._stride, *(clock.next_named for clock in self.clocks))
        return counter_of(self.run) + 1 < next_named

    def put(self, row: Mapping[str, Any], alone: bool) -> None:
        """Log ``row``, into the open row if it may join, else into a new one."""
        self._logs_ours = True
        try:
            if not self.may_join(row[AXIS]):
                self.run.log({AXIS: self._ours}, commit=True)
                self._ours = None
                self._led += self._is_silent and not alone
            # a row that the script has begun is the script's to close; its next row keeps its number if ours joins it
            closes = not self.is_named and not self._half and not self.moved and (alone or self.moves > 0)
            self.run.log(row, commit=closes)
        finally:
            self._logs_ours = False
        self._ours = None if closes else row[AXIS]
        self.moved = False


def counter_of(run: Any) -> int:
    """The run's counter. Its public property takes half a millisecond."""
    count: int = run._local_step
    return count


# --- Weights & Biases: rows that fit between those of the script ---

#: Values held back at most; beyond that the oldest rows are lost.
MOST = 1_000_000
#: Rows held back before a warning.
PATIENCE = 100
#: A per-layer value, in both styles of keys, with any prefix.
_TENSORS = "|".join(map(re.escape, (*TENSOR_SOURCES, *ATTENTION_SOURCES.values())))
_LAYER = re.compile(rf"(?:^|.*\W|.*_)(?:(?:{_TENSORS})(?:/.+/[^/]+|_[^/]+/.+)|(?:{'|'.join(NAME_SOURCES)})/.+)$")
_OWN = re.compile(rf"(?:^|.*\W|.*_){SUMMARY}/[^/]+$")


class WandbSink:
    """Logs to a W&B run, next to what the script logs to it.

    Rows have an axis of their own, ``gradmon/step``. They join the row that the script has open, and open new ones only where W&B cannot
    drop rows of the script for it, as it does with a ``step=`` behind its counter:

    * while the script logs without ``step=``: at once;
    * with ``step=`` in every step: at once, in the row of that step; in every tenth: in the steps between;
    * if the script has not logged yet: at once; if it then names a step that they have passed, its steps are counted from there;
    * if there is no place, because ``step=`` counts epochs: rows are held back until there is one or the run finishes, up to a million
      values, with a warning.

    A script that logs without ``step=`` first and with it later may lose rows to W&B, with a warning. A key that the script logs as well
    is one metric for W&B. ``log2_histogram`` becomes a W&B histogram. Per-layer values stay out of the run's summary. A spike is sent as
    an alert, of which W&B lets one a minute through for each signal.

    Args:
        run: the result of ``wandb.init()``; by default the active run.
        alone: the script never gives ``step=`` to this run, so no row has to be held back.

    Attributes:
        lost: rows that were held back and then dropped.

    Raises:
        ImportError: wandb is not installed.
        TypeError: ``run`` is not a run.
        ValueError: there is no active run.
    """

    def __init__(self, run: Any = None, *, alone: bool = False) -> None:
        require("wandb", self)
        if run is None:
            run = import_module("wandb").run
            if run is None:
                raise ValueError("no W&B run is active: call wandb.init() before WandbSink(), or give it a run")
        if not all(callable(getattr(run, method, None)) for method in ("log", "define_metric", "alert")):
            raise TypeError(f"run must be what wandb.init() gives, got {display(run)}")
        self.run = run
        self.alone = alone
        self.lost = 0
        self._rows = Rows.of(run)
        self._clock = Clock()
        if self._rows is not None:
            self._rows.clocks.append(self._clock)
        self._held: deque[dict[str, Any]] = deque()
        self._values = 0  # in the rows that are held
        self._known: set[str] = set()
        self._warned = self._warned_overtaken = self._ending = False
        self._process = HomeProcess()

    def __repr__(self) -> str:
        return f"WandbSink({display(getattr(self.run, 'id', ''))})"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values`` now, or when there is room.

        Raises:
            RuntimeError: the run is finished.
        """
        if getattr(self.run, "_is_finished", False):
            raise RuntimeError("the run is finished; wandb.init() begins another, which needs a sink of its own")
        if not values or self._rows is None or self._process.is_forked:
            return  # nothing to log, a disabled run, or a forked worker
        row = {AXIS: step, **with_histograms_of("wandb", values)}
        if not self._held or self._held[-1] != row:  # else this is a retry
            self._define(row)
            self._held.append(row)
            self._values += len(row)
        with self._rows.lock:
            self._clock.reach(step)
            while self._held and (self._rows.may_join(self._held[0][AXIS]) or self._rows.may_advance(self.alone)):
                self._put(self._rows, self.alone)
        while self._values > MOST:
            self._values -= len(self._held.popleft())
            self.lost += 1
        self._warn(self._rows)

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Send an alert."""
        self.run.alert(title=f"spike in {event.signal}"[:63], text=text, level="WARN")

    def before_finish(self, call: Callable[[], object]) -> None:
        """Call ``call`` when the run finishes, by the script or at the interpreter's exit, while the run still takes rows."""

        def quietly() -> None:
            atexit.unregister(quietly)
            self._ending = True
            for each in (call, self.close):
                # nothing of ours may prevent a run from finishing, not even a spike that raises
                with contextlib.suppress(Exception):
                    each()

        # at interpreter exit wandb closes the run without calling hooks; atexit calls the last registered function first
        atexit.register(quietly)
        hooks = getattr(self.run, "_teardown_hooks", None)
        if isinstance(hooks, list):
            stages = import_module("wandb.sdk.wandb_run")
            hooks.append(stages.TeardownHook(quietly, stages.TeardownStage.EARLY))

    def close(self) -> None:
        """Log held rows if the run is finishing. Before that the script may still name any step."""
        if self._rows is None or self._process.is_forked:
            return
        with self._rows.lock:
            while self._held and self._ending:
                self._put(self._rows, alone=True)

    def _put(self, rows: Rows, alone: bool) -> None:
        rows.put(self._held[0], alone)
        self._values -= len(self._held.popleft())

    def _define(self, row: Mapping[str, Any]) -> None:
        for key in row.keys() - self._known:
            self._known.add(key)
            # in define_metric a dot separates levels and a star is a pattern; escaped names match no pattern
            name = key.replace(".", r"\.")
            if key == AXIS:
                self.run.define_metric(key, hidden=True)
            elif "*" in key:
                continue
            elif _LAYER.match(key):  # a value for each layer would rewrite the summary with every row
                self.run.define_metric(name, step_metric=AXIS, summary="none")
            elif _OWN.match(key):
                self.run.define_metric(name, step_metric=AXIS)

    def _warn(self, rows: Rows) -> None:
        """Warn once if the script loses rows, and once if ours are held back."""
        if rows.overtaken is not None:
            (step, counter), rows.overtaken = rows.overtaken, None
            if not self._warned_overtaken:
                self._warned_overtaken = True
                warn_user(
                    f"this script logged to W&B with step={step}, where its run stood at {counter} already; W&B drops "
                    "such rows. Name all steps or none, or let WandbSink log to a run of its own"
                )
        if len(self._held) > PATIENCE and not self._warned:
            self._warned = True
            why = (
                "its run.log(step=...) counts more slowly than training steps"
                if rows.is_named
                else "it has not closed a row of its own, and W&B would drop a later run.log(step=...) behind the counter"
            )
            warn_user(
                f"rows of the monitor are kept back from this script's W&B run until it finishes, because {why}. Log "
                "without step=, or use WandbSink(run, alone=True) if nothing else names steps, to log them at once"
            )
