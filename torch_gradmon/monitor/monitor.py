"""ModuleMonitor: the public face of a session. It checks arguments and wires parts together; it does no arithmetic."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.coordinate_check.terms import RCC_BUILT_INS
from ..capture.measurer import Measurer
from ..capture.modules.compiled import unwrapped
from ..capture.modules.unit_metrics import ACTIVATION_BUILT_INS
from ..capture.parameters import OPTIMIZER_BUILT_INS
from ..capture.reference.source import frozen_copy
from ..core import keys as n
from ..core import validation as check
from ..core.errors import Complaints, display
from ..core.fence import Guard, is_disabled
from ..core.keys import KEY_STYLES, Key, compile_pattern, format_key
from ..core.records import Event
from ..core.torch_modes import unseen
from ..plugins.flight_recorder import Recorder
from ..plugins.overhead_budget import Budget
from ..plugins.post_spike_detail import CloserLook
from ..plugins.spike_policy.plugin import Actor
from ..plugins.spike_policy.policy import Policy, Rollback, Skip, policy_of
from ..runs.detail_request import in_words
from ..sinks.adapters import adapted, logged_anyhow
from ..sinks.filtered_sink import Outlet
from ..sinks.wandb import WandbSink
from ..spikes.detector import SpikeDetector
from ..statistics.dispatch import Statistics
from ..statistics.eager import DEFAULT_EPS
from ..step.exchange import Exchange
from ..step.layer_values import Layers
from ..step.planner import Planner
from ..step.ranks import Ranks
from ..step.registry import VIEW_BUILT_INS, Registry
from .loop_methods import LoopMethods
from .metric_methods import MetricMethods
from .mixin import MonitorMixin, link, unlink
from .pipeline.ledger import Ledger, Options
from .publisher import Outbox
from .session import Session, at_exit
from .tune_methods import TuneMethods
from .value_methods import ValueMethods

#: Parts of a state that one of a monitor that did not act on spikes, or of an earlier version, has not.
_NEWER = {"attempted", "acting", "clipping"}


class ModuleMonitor(MetricMethods, LoopMethods, ValueMethods, TuneMethods):
    """Watches a module while it trains.

    Args:
        module: the model; or call :meth:`set_module` later. It is never kept alive and never changed.
        every: a step is monitored when its number is divisible by it; by default every step.
        monitor_step_fn: instead of ``every``, a function of the step's number.
        scaler: the GradScaler, where steps are taken by hand; :meth:`attach` takes one too.
        excluded_modules_regex: no metric applies to modules and parameters in whose name it is found; whole-model values take
            all parameters all the same.
        format_module_name_fn: a last say over each canonical name.
        on_metric_error: ``"warn"`` warns once and goes on; ``"raise"`` raises, for tests.
        key_style: ``"seed"`` gives ``source/name/metric``, ``"metric_first"`` gives ``source_metric/name``.
        prefix: put before every key.
        eps: an element counts as near zero when ``|x| <= eps``.
        update_sample: bounds what update metrics copy: an int for at most so many rows of each parameter (slices of the first
            dimension, evenly spread; of one that is spread over ranks, of each rank's part), or a pattern for the names of the
            parameters to take. Update values are then those of the sample. By default one copy of all parameters with an update
            metric is held during the optimizer's step.
        layers: per-layer values to show besides those asked for: ``"blocks"``, ``"top"``, ``"all"`` or a pattern.
        on_spike: what a spike does: ``"warn"``, ``"raise"`` (:class:`SpikeError` when the step ends), a function of the
            :class:`Event`, or None. ``"skip"``, :class:`Skip` and :class:`Rollback` decide before the optimizer steps, in every
            step whatever the cadence, from gradients and from what was logged by then; this waits for the device.
        history: how many steps :meth:`get_all_metrics` remembers.
        run_dir: the run directory that takes every step; None for none.
        compile_statistics: compile a kernel for the statistics of tensors on the CPU, here and now: it takes g++ or clang++ and
            about a second, once in a process, and then a third of the time or less. Without a compiler it warns and goes on.
        overhead_budget: share of the training's time that the monitor's own time on the host may take, such as 0.01; while it
            takes more, fewer of the steps that the cadence asks for are monitored (every 2nd, 4th, ...), which is said.
        post_spike_steps: so many steps after a spike are monitored whatever the cadence, and, unless anything is compiled, the outputs
            of all modules and the gradients of these are measured too, for the run directory and to find where NaN or Inf begin;
            0 for none.
        flight_recorder: for a cadence that leaves out steps. Of so many of those before a spike, and as many after it, the
            statistics of the gradients go to the run directory and into the story of the spike, with what was logged in them.
            For that they are measured in every step, which costs two passes over the gradients, and kept on the device (26 kB a
            step for 200 parameters); nothing is copied to the host until there is a spike. 0 for none.
        process_group: the ranks that train this model together; by default all. Every one of them needs a monitor with the same
            metrics, unless all that is measured is replicated, as gradients are under DDP.
        rank_distinct_regex: plain parameters in whose name it is found are other ones on each rank, such as the experts of expert
            parallelism; the elements of all ranks are taken together. DTensors need no such word.
        log_on_all_ranks: sinks and run directory are those of the first rank; with this each rank has its own, the run directories
            under ``rank0``, ``rank1`` and so on.

    With ``GRADMON_DISABLE=1`` in the environment everything is inert.

    Raises:
        TypeError, ValueError: an argument is not what it should be; the message says what and what to do.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        every: int | None = None,
        monitor_step_fn: Callable[[int], bool] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        excluded_modules_regex: str | re.Pattern[str] | None = None,
        format_module_name_fn: Callable[[str], str] | None = None,
        on_metric_error: str = "warn",
        key_style: str = "seed",
        prefix: str = "",
        eps: float = DEFAULT_EPS,
        update_sample: int | str | re.Pattern[str] | None = None,
        layers: str | re.Pattern[str] | None = None,
        on_spike: str | Policy | Callable[[Event], Any] | None = None,
        history: int = 1000,
        run_dir: str | os.PathLike[str] | None = None,
        compile_statistics: bool = False,
        overhead_budget: float | None = None,
        post_spike_steps: int = 3,
        flight_recorder: int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
        rank_distinct_regex: str | re.Pattern[str] | None = None,
        log_on_all_ranks: bool = False,
    ) -> None:
        is_monitored = check.cadence(every, monitor_step_fn)
        if overhead_budget is not None:
            check.share("overhead_budget", overhead_budget)
        check.one_of("on_metric_error", on_metric_error, ("warn", "raise"))
        check.one_of("key_style", key_style, KEY_STYLES)
        check.reaction(on_spike, (Skip, Rollback))
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {display(prefix)}")
        if format_module_name_fn is not None and not callable(format_module_name_fn):
            raise TypeError(f"format_module_name_fn must be a function of a name, got {display(format_module_name_fn)}")
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < float("inf"):
            raise ValueError(f"eps={eps!r} must be a number of at least 0, such as 1e-8")
        check.positive_int("history", history)
        if post_spike_steps != 0 or isinstance(post_spike_steps, bool):
            check.positive_int("post_spike_steps", post_spike_steps, "or 0 for none")
        if flight_recorder != 0 or isinstance(flight_recorder, bool):
            check.positive_int("flight_recorder", flight_recorder, "or 0 for none")
            if overhead_budget is not None:
                raise ValueError(
                    f"flight_recorder={flight_recorder} measures every step, so overhead_budget={overhead_budget!r} could save nothing "
                    "by leaving out steps; give one of the two"
                )
        if isinstance(update_sample, int):
            check.positive_int("update_sample", update_sample)
        elif update_sample is not None:
            update_sample = compile_pattern(update_sample, "update_sample")
        excluded = None if excluded_modules_regex is None else compile_pattern(excluded_modules_regex, "excluded_modules_regex")
        check.grad_scaler(scaler)
        check.process_group(process_group)
        distinct = None if rank_distinct_regex is None else compile_pattern(rank_distinct_regex, "rank_distinct_regex")
        ranks = Ranks(process_group)
        chosen_layers = Layers(layers)
        if module is not None:
            check.module(module)
        inert = is_disabled()
        complaints = Complaints(raising=on_metric_error == "raise")
        outputs = {**VIEW_BUILT_INS[n.ACTIVATION], **ACTIVATION_BUILT_INS}
        registry = Registry({**VIEW_BUILT_INS, **RCC_BUILT_INS, n.ACTIVATION: outputs, n.OPTIMIZER: OPTIMIZER_BUILT_INS})
        planner = Planner(registry, excluded, format_module_name_fn, distinct)
        if module is not None:
            planner.watch(module)  # raises what there is to raise before a run directory is made
        if run_dir is not None and log_on_all_ranks and ranks.count > 1:
            run_dir = os.path.join(run_dir, f"rank{ranks.rank}")
        meta = {"torch": torch.__version__, "eps": eps, "every": None if monitor_step_fn is not None else every or 1}
        outbox = Outbox(complaints, None if inert else run_dir, meta, lambda: not (log_on_all_ranks or ranks.is_first))
        guard = Guard(complaints, inert)
        budget = None if overhead_budget is None else Budget(overhead_budget, is_monitored, complaints)
        policy = policy_of(on_spike)
        kept = policy.without_others() if isinstance(policy, Rollback) else on_spike
        options = Options(self._shower(key_style, prefix), history, kept)
        measurer = Measurer(Statistics(complaints, float(eps), compile_statistics and not inert), complaints, ranks)
        ledger = Ledger(options, guard, outbox, chosen_layers)
        closer = CloserLook(planner, post_spike_steps)
        recorder = Recorder(flight_recorder, registry, ledger.summary)
        actor = None if policy is None or inert else Actor(policy, ledger.judges, Exchange(ranks, complaints), complaints)
        if actor is not None:  # whatever is shown and whoever judges: these decide
            ledger.summary.signals |= {"grad_norm", "grad_nonfinite"}
        self._session = Session(
            budget or is_monitored, guard, planner, measurer, ledger, update_sample, budget, closer, recorder, actor
        )
        self._session.scaler = scaler
        self._registry, self._planner = registry, planner
        self._mark: object = None  # on the model, by which watch() finds what it watched it with before
        # an attached session outlives a monitor that nobody kept, and modules with the mixin ask for the monitor
        self._session.face = self
        # at the interpreter's end what waits still goes out, and when all is collected, for which what it takes has to be there
        weakref.finalize(self._session, at_exit, weakref.ref(self._session), outbox.lasting)
        if module is not None:
            self._begin_watching(module)

    @staticmethod
    def _shower(style: str, prefix: str) -> Callable[[Mapping[Key, float]], dict[str, float]]:
        known: dict[Key, str] = {}

        def show(values: Mapping[Key, float]) -> dict[str, float]:
            try:
                return {known[key]: value for key, value in values.items()}
            except KeyError:  # in the first steps only
                known.update((key, format_key(key, style, prefix)) for key in values.keys() - known.keys())
                return {known[key]: value for key, value in values.items()}

        return show

    # --- modules -------------------------------------------------------------------------------------------------------------

    def set_module(self, module: nn.Module) -> None:
        """Watch ``module``. Warns about metrics whose pattern matches nothing in it.

        Raises:
            TypeError: it is no ``nn.Module``.
            ValueError: there is a module already, or metrics of one name overlap on this one.
        """
        check.module(module)
        watched = self._planner.module
        if watched is not None:
            raise ValueError(
                f"this monitor is one of a {type(watched).__name__} already; make another ModuleMonitor for another model"
            )
        self._planner.watch(module)
        self._begin_watching(module)

    def _begin_watching(self, module: nn.Module) -> None:
        self._warn_of_idle(self._registry.metrics)
        self._session.ledger.layers.warn_of_idle(self._planner.inventory.names if self._planner.inventory else ())
        if not self._session.guard.inert:
            self._link_modules(module)
            assert self._planner.inventory is not None
            self._session.ledger.outbox.note(model=type(module).__name__)
            self._session.ledger.knows(self._planner.inventory.facts)

    @property
    def module(self) -> nn.Module | None:
        """The watched model, while it lives; None before there is one."""
        return self._planner.module

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """The names of the watched modules, as they stand in keys; empty before there are any."""
        inventory = self._planner.inventory
        known = {} if inventory is None else inventory.modules
        return {module: name for name, reference in known.items() if (module := reference()) is not None}

    @property
    def reference_module(self) -> nn.Module | None:
        """What :meth:`set_reference_module` has set, without the wrappers of DDP and torch.compile around it."""
        return self._session.activations.reference.module

    def _link_modules(self, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, MonitorMixin):
                link(child, self)

    def set_reference_module(self, module: nn.Module | str) -> None:
        """Compare parameters and outputs with those of ``module``, by name, for the difference metrics. It is read live.

        Where a metric of :meth:`add_activation_difference_metric` is due, it runs before each training forward of the watched
        model: without gradients, on the same inputs and with the same random numbers, in the mode in which it is. It is left as
        it was, buffers too. It may be on another device; the outputs to compare are kept there until they are compared.

        In a step that :meth:`begin_step` began, the loop may run the reference itself, before the model and on inputs of its choice:
        then that run is compared with, and none of ours takes place. Runs behind the model's first one in the step are not.

        Args:
            module: the reference, or ``"init"`` for a frozen copy of the watched model as it is now, which is then always in
                the mode of the watched model.

        Raises:
            TypeError: neither a module nor ``"init"``.
            ValueError: the watched model itself, no model to copy, or one that cannot be copied.
        """
        watched = self._planner.module
        if isinstance(module, str):
            check.one_of("module", module, ("init",))
            if watched is None:
                raise ValueError("there is no module to copy; pass it to ModuleMonitor(model) or call set_module(model) first")
            with unseen():
                self._session.set_reference(frozen_copy(watched), follows=True)
            return
        check.module(module)
        if watched is not None and unwrapped(module) is unwrapped(watched):
            raise ValueError("the reference is the watched model itself; pass a copy, or 'init' for one as it is now")
        self._session.set_reference(module, follows=False)

    def remove_reference_module(self) -> None:
        """Forget the reference module."""
        self._session.set_reference(None, follows=False)

    def has_reference_module(self) -> bool:
        """Whether a reference module is set."""
        return bool(self._session.activations.reference)

    # --- the loop, by itself -------------------------------------------------------------------------------------------------

    def attach(
        self, *optimizers: Any, scaler: torch.amp.GradScaler | None = None, start_step: int | None = None
    ) -> ModuleMonitor:
        """Follow the training loop by hooks: nothing in the loop has to change.

        Steps are counted by attempts. A step ends when the last of ``optimizers`` steps, with a scaler in ``scaler.update()``;
        so name them in the order in which they step.

        Several monitors may be attached to one model: each measures, and costs, by itself, and needs a run directory of its own. Only
        :func:`torch_gradmon.watch` and the adapters for trainers take the place of an earlier monitor, which one of them has made.

        Args:
            optimizers: that step the watched model; a trainer's wrapper around one is understood.
            scaler: the GradScaler that drives them; by default the one in such a wrapper, as Accelerate's.
            start_step: number of the first step; by default 0, or where a loaded state goes on.

        Raises:
            ValueError: no module, no optimizer, already attached, or no optimizer holds a parameter of the model.
            TypeError: not an optimizer, or not a scaler.
        """
        return self._attach(optimizers, scaler, start_step)

    def _attach(
        self,
        optimizers: Sequence[Any],
        scaler: torch.amp.GradScaler | None,
        start_step: int | None,
        before: Callable[[nn.Module], object] = lambda module: None,
    ) -> ModuleMonitor:
        """:meth:`attach`; ``before`` is called when all is checked and nothing is hung yet."""
        module = self._planner.module
        if module is None:
            raise ValueError("there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first")
        if self._session.follower is not None:
            raise ValueError("already attached; name all optimizers in one attach() call, or call detach() first")
        check.grad_scaler(scaler)
        if start_step is not None:
            check.step_number("start_step", start_step)
        bare = check.optimizers(module, optimizers)
        # asked before anything is hung, for the function is the user's
        self._session.cadence.asked(self._session.next_step if start_step is None else start_step)
        if not self._session.guard.inert:
            before(module)
            if start_step is not None:
                self._session.next_step = start_step
            self._link_modules(module)
            known = (scaler, self._session.scaler, check.scaler_around(optimizers))
            chosen = next((each for each in known if each is not None), None)
            self._session.follow(module, bare, chosen, check.wrappers(optimizers))
        return self

    def detach(self) -> None:
        """End the step in flight, send what waits, close the sinks, and leave the model as it was found. May be called twice.

        The metrics stay; :meth:`attach` may follow.
        """
        self._mark = None
        self._session.detach()
        module = self._planner.module
        if module is not None:
            for child in module.modules():
                unlink(child)

    def __enter__(self) -> ModuleMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # --- outlets -------------------------------------------------------------------------------------------------------------

    def add_sink(
        self,
        sink: Any,
        keys: str | re.Pattern[str] | None = None,
        every: int = 1,
        *,
        deferred: bool = False,
        thread: bool = False,
        on_all_ranks: bool = False,
    ) -> None:
        """Send every step's values to ``sink``; see :class:`torch_gradmon.sinks.Outlet`. A sink never stops the training.

        A W&B or Trackio run, a ``SummaryWriter``, a Comet experiment, the modules ``wandb``, ``trackio`` and ``mlflow``, which
        stand for the active run, and the trackers of an ``Accelerator`` get the sink that is made for them; with a ``GradMonTracker``
        among these, keys that ``accelerator.log`` gives them anyhow are left out.

        A step's values go out when the next step begins, which waits for the end of the step on the GPU. With ``deferred=True``
        they may come one step later, and nothing waits; on the CPU it makes no difference. What a sink fails to take is tried
        again with the next row; after three failures in a row, or three rows that took longer than training itself, it is
        dropped with a warning. With ``thread=True`` a slow one is called in a thread of its own, and training does not wait.
        With ``on_all_ranks=True`` every rank's sink gets the values of its rank; otherwise only that of the first rank.

        Raises:
            TypeError: it has no ``log(dict, step=)`` or ``log_metrics(dict, step=)`` and is not callable.
            ValueError: ``keys`` is no valid pattern, ``every`` no positive int, or ``thread`` asked for a W&B run.
        """
        outbox, complaints = self._session.ledger.outbox, self._session.guard.complaints
        for each in adapted(sink):
            if thread and isinstance(each, WandbSink):
                raise ValueError(
                    "W&B takes rows without delay, and those of another thread would come between; leave thread=True out"
                )
            outlet = Outlet(each, keys, every, complaints, deferred, thread, outbox.place, logged_anyhow(sink))
            outlet.given, outlet.is_on_all_ranks = sink, on_all_ranks
            if callable(before_finish := getattr(each, "before_finish", None)):
                before_finish(partial(at_exit, weakref.ref(self._session)))
            outbox.add(outlet)

    def remove_sink(self, sink: Any) -> None:
        """Send ``sink`` what waits, close it and forget it.

        Raises:
            ValueError: :meth:`add_sink` was not called with it.
        """
        self._session.settle_now()
        outbox = self._session.ledger.outbox
        own = [outlet for outlet in outbox.outlets if outlet.given == sink]
        if not own:
            raise ValueError(f"this sink was not added, got {display(sink)}")
        outbox.publish()
        for outlet in own:
            outbox.remove(outlet)

    def add_detector(self, detector: SpikeDetector) -> None:
        """Feed ``detector`` with the whole-model value, or the scalar logged by hand, that its ``signal`` names.

        Raises:
            TypeError: it is no :class:`SpikeDetector`.
            ValueError: there is a detector for its signal, other than a preset's, whose place it takes.
        """
        if not isinstance(detector, SpikeDetector):
            raise TypeError(f"expected a SpikeDetector, got {display(detector)}; a rule goes into one: SpikeDetector(rule)")
        self._session.ledger.add_detector(detector)
        self._planner.changed()

    # --- resume --------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Step number, counters and what the detectors and the adaptive clips by name learned, as plain numbers and lists."""
        self._session.settle_now()
        actor = self._session.actor
        acting = {} if actor is None else {"acting": actor.state_dict()}
        steps = {"next_step": self._session.next_attempt, "attempted": self._session.attempted}
        return {**steps, **self._session.ledger.state_dict(), **acting, "clipping": self._session.clips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken: the next step has the number after the last one.

        Raises:
            TypeError, ValueError: not such a state.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of ModuleMonitor.state_dict(), got {display(state)}")
        absent = {"next_step", "summary", "detectors"} - state.keys()
        if absent:
            raise ValueError(f"this is no state of a ModuleMonitor: it lacks {', '.join(sorted(absent))}; it has {sorted(state)}")
        mine = self._session.ledger.judges.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )
        before = self.state_dict()
        part = ""
        try:
            for part in before:
                if part in state or part not in _NEWER:
                    self._load_part(part, state[part])
        except (KeyError, TypeError, ValueError) as error:
            for each, value in before.items():
                self._load_part(each, value)
            raise ValueError(
                f"state[{part!r}] is not what ModuleMonitor.state_dict() gives, got {display(state[part])}; nothing was loaded"
            ) from error

    def _load_part(self, part: str, value: Any) -> None:
        if part == "next_step":
            self._session.next_step = int(value)
        elif part == "attempted":
            self._session.attempted = int(value)
        elif part == "clipping":
            self._session.clips.load_state_dict(value)
        elif part == "acting":
            assert self._session.actor is not None
            self._session.actor.load_state_dict(value)
        else:
            self._session.ledger.load_part(part, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy watches nothing, and loads as such: so what keeps its monitor, be it the model itself, can be copied and saved."""
        return ModuleMonitor, ()

    def __repr__(self) -> str:
        module = self._planner.module
        watched = "nothing" if module is None else type(module).__name__
        count = len(self._registry.metrics)
        words = [watched, "1 metric" if count == 1 else f"{count} metrics"]
        words.append("no step yet" if self.step is None else f"step {self.step}")
        if spikes := len({event.step for event in self._session.ledger.recent().events}):
            words.append(f"{spikes} of the last steps with spikes")
        if self.detail is not None:
            words.append(f"for now {in_words(self.detail.facts())}")
        if self._session.guard.inert:
            words.append("disabled by GRADMON_DISABLE")
        elif self._session.follower is None and not self._session.by_hand:
            words.append("not attached to an optimizer")
        if place := self._session.ledger.outbox.place:
            words.append(place)
        return f"ModuleMonitor({', '.join(words)})"
