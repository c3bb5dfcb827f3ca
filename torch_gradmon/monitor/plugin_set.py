"""The plugins of one monitor, called in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import GradmonWarning, TrainingStopped, WarningLog
from ..plugins.data_check.plugin import DataCheck
from ..plugins.live_detail import LiveDetail, PostSpikeDetail
from ..plugins.loop_audit.plugin import LoopAudit
from ..plugins.setup_check import SetupCheck
from ..step.plugin import Plugin

if TYPE_CHECKING:  # imported where an option asks for them
    from ..plugins.clipping import AdaptiveClips
    from ..plugins.flight_recorder import FlightRecorder
    from ..plugins.overhead_budget import OverheadBudget
    from ..plugins.replica_check.plugin import ReplicaCheck
    from ..plugins.spike_policy.plugin import SpikePolicy

#: Called for stopped plugins too, so that they release what they hold.
_ALWAYS = {"on_detach", "close"}
#: Called in idle steps too, of plugins that watch these.
_BOUNDARIES = ("on_sealed", "on_step_open", "on_step_closing", "on_unmonitored_step", "on_step_closed")
#: Called in idle steps whatever a plugin watches.
_IN_ALL_STEPS = ("wants", "on_forward", "on_optimizer_step", "on_optimizer_stepped", "after_attempt")
_HOOKS = [name for name in vars(Plugin) if not name.startswith("_") and callable(getattr(Plugin, name))]


class BuiltInPlugins(NamedTuple):
    """The plugins that a monitor brings, in the order in which they are called: the budget thins what the script asks for, and the others
    may ask for more; a recorder keeps a step before the detectors learn of it.
    """

    budget: OverheadBudget | None
    recorder: FlightRecorder | None
    policy: SpikePolicy | None
    detail: LiveDetail
    post_spike: PostSpikeDetail
    audit: LoopAudit
    setup: SetupCheck
    data: DataCheck | None
    replicas: ReplicaCheck | None


class PluginSet:
    """Calls the methods that plugins override, and turns the failure of one into a warning. Those of the script come after the built-in
    ones; what only one of these has to know or to answer, it is asked by itself.
    """

    def __init__(self, built_in: BuiltInPlugins, own: Sequence[Plugin], complaints: WarningLog) -> None:
        self.own, self._complaints = own, complaints
        self._stopped: list[Plugin] = []
        self.clips: AdaptiveClips | None = None
        self.use(built_in)

    def use(self, built_in: BuiltInPlugins) -> None:
        self.built_in = built_in
        self._plugins = (*(plugin for plugin in built_in if plugin is not None), *self.own)
        self._calls = {hook: self._overridden(hook) for hook in _HOOKS}
        at_boundaries = {id(plugin): plugin for hook in _BOUNDARIES for plugin, _ in self._calls[hook]}.values()
        self.watching: set[int] = set()  # ids of those that watch idle steps
        # a class with a property of its own is asked
        self._asked = [p for p in at_boundaries if type(p).watches_idle_steps is not Plugin.watches_idle_steps]
        for plugin in at_boundaries:
            if plugin not in self._asked:
                plugin.report_watching(self.watching)
        in_all_steps = {id(plugin) for hook in _IN_ALL_STEPS for plugin, _ in self._calls[hook]}
        self._requiring = [p for p in self._plugins if type(p).requires_gradients is not Plugin.requires_gradients]
        self._in_all_steps = [p for p in self._plugins if id(p) in in_all_steps or p in self._requiring]

    def needed_clips(self) -> AdaptiveClips:
        from ..plugins.clipping import AdaptiveClips

        if self.clips is None:
            self.clips = AdaptiveClips(may_skip=self.built_in.policy is not None)
        return self.clips

    def _overridden(self, hook: str) -> list[tuple[Plugin, Callable[..., Any]]]:
        return [(p, getattr(p, hook)) for p in self._plugins if getattr(type(p), hook) is not getattr(Plugin, hook)]

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self._plugins)

    def has(self, hook: str) -> bool:
        return bool(self._calls[hook])

    @property
    def watch_idle_steps(self) -> bool:
        """Whether any plugin watches idle steps at this moment. Cheaper than a call that finds none."""
        if self.watching:
            return True
        for plugin in self._asked:  # noqa: SIM110 (asked in every idle step: no generator)
            if plugin.watches_idle_steps:
                return True
        return False

    def may_miss(self, steps: int) -> int:
        """How many of the next ``steps`` steps, all idle, no plugin has to see."""
        if self._asked:  # in steps that are only counted none is asked
            return 0
        for plugin in self._in_all_steps:
            if steps > 0 and plugin not in self._stopped:
                steps = min(steps, int(self.call_one(plugin, plugin.may_miss) or 0))
        return steps

    def call(self, hook: str, *args: Any, is_idle: bool = False) -> None:
        """Call ``hook`` of each plugin that overrides it. ``is_idle``: only of those that watch idle steps. Where training must stop, or
        warnings are errors, it raises after all have been called.
        """
        raised: Exception | None = None
        for plugin, method in self._calls[hook]:
            if (is_idle and not plugin.watches_idle_steps) or (self._stopped and plugin in self._stopped and hook not in _ALWAYS):
                continue
            try:
                method(*args)
            except (TrainingStopped, GradmonWarning) as error:
                raised = raised or error
            except Exception as error:
                self._failed(plugin, hook, error)
        if raised is not None:
            raise raised

    def call_one(self, plugin: Plugin, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of ``plugin``, unless it has stopped. Returns None if it fails, and reports the failure once."""
        if self._stopped and plugin in self._stopped:
            return None
        try:
            return method(*args)
        except (TrainingStopped, GradmonWarning):
            raise
        except Exception as error:
            self._failed(plugin, method.__name__, error)
            return None

    def _failed(self, plugin: Plugin, method: str, error: Exception) -> None:
        what = "it is off" if plugin.stops_on_failure else "what it does is lost"
        if plugin.stops_on_failure:
            self._stopped.append(plugin)
        message = f"{method}() of the plugin {plugin.name!r} failed, {what}; training continues"
        self._complaints.add(f"plugin:{plugin.name}", message, error)

    def restart(self) -> None:
        self._stopped.clear()

    def wants(self, step: int, asked: bool) -> bool:
        for _, method in self._calls["wants"]:
            asked = method(step, asked)
        return asked

    def foretells(self, step: int, asked: bool, ahead: int | None) -> bool:
        """What :meth:`wants` would return for another step; see :meth:`Plugin.foretells`."""
        for plugin in self._plugins:
            if type(plugin).wants is not Plugin.wants:
                asked = plugin.foretells(step, asked, ahead)
        return asked

    @property
    def requires_gradients(self) -> bool:
        for plugin in self._requiring:  # noqa: SIM110 (asked in every idle step: no generator)
            if plugin.requires_gradients:
                return True
        return False
