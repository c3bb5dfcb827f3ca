"""Optional behaviour: what a plugin may do, and at which moments of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.records import Metric, StepRecord
from .active_step import ActiveStep

# --- What a monitor offers its plugins, and what it knows of an optimizer that is about to step ---


class OptimizerContext(NamedTuple):
    """What is known of an optimizer that is about to step.

    Attributes:
        has_scaler: a GradScaler handles infinite gradients, in the optimizer's own step.
        is_overflowed: a GradScaler has skipped its step.
        stepped: a description of the optimizers that have already stepped in this step.
        ignored: names of parameters whose gradients do not count: left over from a skipped step, or of an optimizer that overflowed.
        is_stale: its own gradients are left over from a skipped step, and it would use them.
    """

    has_scaler: bool = False
    is_overflowed: bool = False
    stepped: str = ""
    ignored: frozenset[str] = frozenset()
    is_stale: bool = False


class PluginContext:
    """What a monitor offers its plugins."""

    def __init__(self, lifecycle: Any, plugin: Plugin) -> None:
        self._lifecycle, self._plugin = lifecycle, plugin  # the first is the StepLifecycle of a room above

    @property
    def module(self) -> nn.Module | None:
        """The watched model, while it lives."""
        return self._lifecycle.planner.module()  # type: ignore[no-any-return]

    @property
    def matrices(self) -> Set[str]:
        """Names of the watched parameters of two or more dimensions, as in keys."""
        inventory = self._lifecycle.planner.inventory
        return frozenset() if inventory is None else inventory.matrices.keys()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The attached optimizers, in the order in which they step; empty without :meth:`ModuleMonitor.attach`."""
        loop = self._lifecycle.loop
        return [] if loop is None else loop.ownership.alive()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler that is known by now."""
        return getattr(self._lifecycle.loop, "scaler", None)

    @property
    def ranks_synchronised(self) -> bool:
        """Whether the ranks exchange values, so that all of them must monitor the same steps."""
        return bool(self._lifecycle.exchange.takes_place)

    @property
    def last_step(self) -> int | None:
        """The last step that closed."""
        return self._lifecycle.state.ended  # type: ignore[no-any-return]

    @property
    def step(self) -> int | None:
        """The open step, or the last one."""
        return self._lifecycle.state.step  # type: ignore[no-any-return]

    @property
    def is_step_open(self) -> bool:
        """Whether a step is open."""
        return bool(self._lifecycle.state.is_open)

    @property
    def is_paused(self) -> bool:
        """Whether what happens now is no training; see :meth:`ModuleMonitor.no_monitor`."""
        return bool(self._lifecycle.state.is_paused)

    @property
    def coming_step(self) -> int:
        """The step that a call of the model at this moment belongs to; it may not be open yet."""
        step = self.step
        return 0 if step is None else step if self.is_step_open else step + 1

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the plugin within the monitor's fence, as hooks of its own on the model must. None where it fails."""
        return self._lifecycle.fence.run(self._lifecycle.plugins.call_one, self._plugin, method, *args)

    def warn(self, key: str, message: str, error: Exception | None = None) -> None:
        """Warn once for each ``key``, and count the rest."""
        self._lifecycle.fence.complaints.add(key, message, error)

    def annotate_run(self, **facts: Any) -> None:
        """Add facts to the run directory."""
        self._lifecycle.pipeline.directory.annotate(**facts)

    def make_metric(self, source: str, name: str, every: int = 1) -> Metric:
        """A built-in metric for :meth:`set_overlay`, such as ``("activation", "std")``.

        Raises:
            ValueError: there is no such metric.
        """
        return self._lifecycle.planner.registry.make(source, name, every=every, shown=False)  # type: ignore[no-any-return]

    def set_overlay(self, name: str, metrics: Sequence[Metric] | None, replaces_hidden: bool = False) -> None:
        """Measure ``metrics`` in addition to those of the script, under this plugin's ``name``; None removes them.

        With ``replaces_hidden`` they replace those of the script that are not shown.
        """
        self._lifecycle.planner.registry.set_overlay(name, metrics, replaces_hidden)
        self._lifecycle.planner.changed()

    def set_quiet(self, is_quiet: bool) -> None:
        """Set :attr:`Plugin.is_quiet` of a built-in plugin."""
        self._lifecycle.plugins.set_quiet(self._plugin, is_quiet)

    def request_replan(self, drop_hooks: bool = False) -> None:
        """What is measured has changed: register the hooks for it, and with ``drop_hooks`` take those away that are not needed now."""
        self._lifecycle.replan(drop_hooks)

    def ask_cadence_again(self, script_too: bool = False) -> None:
        """Call :meth:`Plugin.wants` again for the next step, and with ``script_too`` the script's function too."""
        self._lifecycle.wake()
        self._lifecycle.cadence.ask_again(script_too)

    def flush_pending(self) -> None:
        """Complete the record of the last step. Waits for the device."""
        self._lifecycle.flush_pending()


# --- Optional behaviour: what a plugin may do, and at which moments of a step ---


class Plugin:
    """Optional behaviour of a monitor. Every method does nothing by default, and only those that a plugin overrides are called.

    Pass instances to ``ModuleMonitor(plugins=[...])`` or ``watch(plugins=[...])``, each to one monitor. A method that raises costs a
    warning, once, and training continues; :class:`torch_gradmon.plugins.TrainingStopped` leaves through ``optimizer.step()``.
    """

    #: The name under which warnings and the state dict know the plugin.
    name = "plugin"
    #: Whether the plugin is called no more after it failed, until the next :meth:`ModuleMonitor.attach`.
    stops_on_failure = False
    #: What the monitor offers, from the moment that it takes the plugin.
    context: PluginContext
    #: Whether the methods of a step are called also in idle steps, in which nothing is measured. Most steps of most trainings are idle, so
    #: this costs the most; a plugin may change it at any time.
    watches_idle_steps = False
    #: Set while it has nothing to do at the boundaries and with the records of monitored steps, nor with which steps are monitored: what
    #: it overrides for that is not called then.
    is_quiet = False
    #: Whether gradients are measured for this plugin also in steps that are not monitored: its :meth:`before_optimizer_step` and
    #: :meth:`on_step_closing` get them in ``step.buffer``. Asked in every such step.
    requires_gradients = False
    #: How many of the next steps, if they are idle, this plugin need not see at all: none of its methods is called in them. Asked after
    #: idle steps, of plugins that override :meth:`wants`, :meth:`on_optimizer_step` or :meth:`after_attempt`; others are not called in idle
    #: steps anyhow.
    may_miss = 0

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        """Whether ``step`` is monitored; ``asked`` is the answer of the cadence and the plugins before this one. ``ahead``: how many steps
        lie between it and the next one, 0 for the next one itself; None for a step that has ended.
        """
        return asked

    # --- the loop, in every step whether it is monitored or not --------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Hooks on these optimizers drive the steps from now on."""

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """The optimizer is about to step, or to call its closure; its gradients are as the loop left them."""

    def after_attempt(self, step: ActiveStep, applied: bool) -> None:
        """All optimizers have been called; ``applied``: they changed the model."""

    def on_detach(self) -> None:
        """The monitor leaves the run, or the run ends: hold nothing of the model any more. May be called several times."""

    # --- the step ------------------------------------------------------------------------------------------------------------

    def on_step_open(self, step: ActiveStep) -> None:
        """A step has begun. One in which no optimizer steps may be forgotten; then the next one has its number."""

    def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
        """An optimizer is about to step. Sets ``step.is_skipped`` where the step must change nothing. Called on all ranks or none.

        Raises:
            TrainingStopped: training must stop.
        """

    def on_step_closing(self, step: ActiveStep) -> None:
        """The step is about to close; its values are not exchanged between ranks yet."""

    def annotate(self, step: ActiveStep) -> None:
        """Add facts to ``step.annotations`` and whole-model values to ``step.values``, for the record of a monitored step."""

    def on_step_closed(self, step: ActiveStep) -> None:
        """The step has closed. On a CPU its record is complete by now, elsewhere when a later step opens."""

    # --- records and the run -------------------------------------------------------------------------------------------------

    def on_record(self, record: StepRecord) -> None:
        """The record of a monitored step is complete except for late values; ``record.events`` has its spikes."""

    def on_rewind(self, step: int) -> None:
        """The run goes back to ``step``: later ones are of another branch."""

    def state_dict(self) -> Any:
        """What a resumed run needs, as plain numbers and lists; None for nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """The inverse of :meth:`state_dict`."""
