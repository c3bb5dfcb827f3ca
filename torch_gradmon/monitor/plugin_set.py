"""The plugins of one monitor, called in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import GradmonWarning, TrainingStopped, WarningLog
from ..plugins.data_check import DataCheck
from ..plugins.live_detail import LiveDetail, PostSpikeDetail
from ..plugins.loop_audit import LoopAudit
from ..plugins.setup_check import SetupCheck
from ..step.plugin import Plugin

if TYPE_CHECKING:  # imported where an option asks for them
    from ..plugins.clipping import AdaptiveClips
    from ..plugins.flight_recorder import FlightRecorder
    from ..plugins.overhead_budget import OverheadBudget
    from ..plugins.replica_check import ReplicaCheck
    from ..plugins.spike_policy import SpikePolicy

#: Called in idle steps too, of plugins that watch these.
_BOUNDARIES = ("on_step_open", "on_step_closing", "on_step_closed")
#: Of quiet plugins neither called nor asked.
_OF_STEPS = frozenset({*_BOUNDARIES, "annotate", "on_record", "wants"})
#: Called in idle steps, or asked, whatever a plugin watches.
_IN_ALL_STEPS = ("wants", "on_optimizer_step", "after_attempt", "requires_gradients")
WATCHES, _REQUIRES = attrgetter("watches_idle_steps"), attrgetter("requires_gradients")
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
        self._calls = {
            hook: [(p, getattr(p, hook)) for p in self._plugins if getattr(type(p), hook) is not getattr(Plugin, hook)]
            for hook in _HOOKS
        }
        # the run ends, though its loop may go on, as behind ``wandb.finish()``: built-in plugins keep their hooks, and what they know
        ending = [(plugin, getattr(plugin, "end_run", None)) for plugin in self._plugins if plugin not in self.own]
        self._calls["end_run"] = [(plugin, method) for plugin, method in ending if method is not None]
        self._calls["end_run"] += [call for call in self._calls["on_detach"] if call[0] in self.own]
        #: the ids of the plugins that override a hook, without the built-in ones that are quiet; asked before a call in each step
        self.listening = {hook: {id(plugin) for plugin, _ in calls} for hook, calls in self._calls.items()}
        self.listening["on_optimizer_step"].discard(id(built_in.audit))  # whose ``left`` is asked
        self._at_boundaries = self._with(_BOUNDARIES)
        self._in_all_steps = self._with(_IN_ALL_STEPS)
        # those that may begin to watch while steps are only counted, beside the built-in one that other processes ask
        self.watchers = [plugin for plugin in self._at_boundaries if plugin in self.own]
        # a property may say something else in each step
        self._may_rest = all(isinstance(type(plugin).watches_idle_steps, bool) for plugin in self._at_boundaries)

    def _with(self, names: Sequence[str]) -> list[Plugin]:
        """Those that override any of these."""
        return [p for p in self._plugins if any(getattr(type(p), name) is not getattr(Plugin, name) for name in names)]

    def needed_clips(self) -> AdaptiveClips:
        from ..plugins.clipping import AdaptiveClips

        if self.clips is None:
            self.clips = AdaptiveClips(may_skip=self.built_in.policy is not None)
        return self.clips

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self._plugins)

    def set_quiet(self, plugin: Plugin, is_quiet: bool) -> None:
        """A built-in plugin begins or ends to be quiet. Also called in other threads and in signal handlers."""
        plugin.is_quiet = is_quiet
        for hook in _OF_STEPS:
            if any(known is plugin for known, _ in self._calls[hook]):
                (self.listening[hook].discard if is_quiet else self.listening[hook].add)(id(plugin))

    @property
    def watch_idle_steps(self) -> bool:
        """Whether any plugin watches idle steps at this moment. Cheaper than a call that finds none."""
        return any(map(WATCHES, self._at_boundaries))

    def may_miss(self, steps: int) -> int:
        """How many of the next ``steps`` steps, all idle, no plugin has to see. In these none is asked for anything."""
        if not self._may_rest or self.requires_gradients:
            return 0
        for plugin in self._in_all_steps:
            if steps > 0 and plugin not in self._stopped:
                try:
                    steps = min(steps, int(plugin.may_miss))
                except Exception as error:
                    self._failed(plugin, "may_miss", error)
                    return 0
        return steps

    def call(self, hook: str, *args: Any, is_idle: bool = False) -> None:
        """Call ``hook`` of each plugin that overrides it. ``is_idle``: only of those that watch idle steps. Where training must stop, or
        warnings are errors, it raises after all have been called.
        """
        raised: Exception | None = None
        for plugin, method in self._calls[hook]:
            if (plugin.is_quiet and hook in _OF_STEPS) or (is_idle and not plugin.watches_idle_steps):
                continue
            if plugin in self._stopped and hook != "on_detach":  # it still lets go of what it holds
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
        if plugin in self._stopped:
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

    def tell(self, which: str, event: str, *args: object) -> None:
        """Tell a built-in plugin, if it is there, what no other one has to know."""
        if (plugin := getattr(self.built_in, which)) is not None:
            self.call_one(plugin, getattr(plugin, event), *args)

    def alert(self, step: int) -> None:
        """A spike of ``step``, or a series of overflowed steps that ends with it, is worth a look at more."""
        for which in ("post_spike", "replicas"):
            self.tell(which, "on_alert", step)

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        self.built_in.detail.look()
        for plugin, method in self._calls["wants"]:
            if not plugin.is_quiet:
                asked = method(step, asked, ahead)
        return asked

    @property
    def requires_gradients(self) -> bool:
        return any(map(_REQUIRES, self._plugins))
