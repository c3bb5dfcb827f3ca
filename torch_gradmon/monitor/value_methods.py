"""Values in and out: what a step brought, what is logged by hand, and why something is missing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..analysis.diagnosis import Diagnosis
from ..analysis.diagnosis.diagnose import diagnose_history
from ..analysis.diagnosis.history import History
from ..analysis.spike_report.text import explain
from ..core import keys as n
from ..core import validation as check
from ..core.errors import display
from ..core.keys import Key
from ..core.model_order import ModelOrder
from ..core.records import Event
from ..core.torch_modes import unseen
from ..step.layer_values import top_shares
from ..step.registry import checked_aggregation
from .session import Session


class ValueMethods:
    """Getters, which never communicate and synchronise at most once a step, and values that are logged by hand."""

    _session: Session

    def get_step_metrics(self) -> dict[str, float]:
        """Values of the step that ended last, plain floats by key; empty when it was not monitored. Synchronises once."""
        record = self._session.settle_now()
        return {} if record is None else self._session.ledger.shown(record)

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """The same for the last ``history`` monitored steps, by step."""
        self._session.settle_now()
        return self._session.ledger.history()

    @property
    def last_events(self) -> tuple[Event, ...]:
        """Spikes in the step that ended last, in the signals that there are values for by now; none where it was not monitored.

        Synchronises once. A signal that is logged after this was asked is judged when the next step begins.
        """
        self._session.judge_now()
        record = self._session.settle_now()
        return () if record is None else record.events

    def log_scalar(
        self, key: str, value: Any, aggregation_fn: str | Callable[..., Any] | None = None, *, reduce: str | None = None
    ) -> None:
        """Log one number under ``key``, merged over micro-batches by ``aggregation_fn`` (by default the mean).

        It belongs to the step in flight or, between its end and the next forward, to the step that just ended. Where no hook sees
        the forward (a model that is called by its parts), a key that came before the first backward pass belongs to the next step.
        A tensor stays on its device until the step ends.

        ``reduce``, ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, merges it over the ranks that log it; it travels with what
        they tell each other at the end of the step, so it has to be logged before the optimizer steps. Without it a value is
        this rank's own, but for one that a detector watches, which is merged as the mean.

        Raises:
            TypeError: ``key`` is no str, or the value no number.
            ValueError: a tensor of several elements; :meth:`log_tensor` takes those. Or an unknown ``reduce``.
        """
        check.log_key(key)
        if reduce is not None:
            check.one_of("reduce", reduce, ("mean", "sum", "min", "max"))
        with unseen():
            if isinstance(value, Tensor) and value.numel() != 1:
                shape = tuple(value.shape)
                raise ValueError(f"log_scalar({key!r}) takes one number, got a tensor of shape {shape}; use log_tensor")
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError(f"log_scalar({key!r}) takes a real number, got a complex one, {display(value)}; log its abs()")
        if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
            raise TypeError(f"log_scalar({key!r}) takes a number, got {display(value)}")
        self.log_key(Key("", key, ""), value, aggregation_fn, reduce or "")

    def log_scalars(self, values: Mapping[str, Any]) -> None:
        """Log several numbers, see :meth:`log_scalar`."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log_scalars takes a dict of numbers by key, got {display(values)}")
        for key, value in values.items():
            self.log_scalar(key, value)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: str | Callable[..., Any] | None = None) -> None:
        """Log a tensor as one number: its values of all calls in the step, merged by ``aggregation_fn`` (by default the mean
        over elements). Outside of a monitored step it does nothing.

        Raises:
            TypeError: ``key`` is no str, or ``tensor`` no tensor.
        """
        check.log_key(key)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"log_tensor({key!r}) takes a tensor, got {display(tensor)}; use log_scalar")
        with unseen():
            if tensor.is_complex():
                raise TypeError(f"log_tensor({key!r}) takes real numbers, got dtype {tensor.dtype}; log its abs()")
        if self._session.listens:
            aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
            self._session.log(Key("", key, ""), tensor, aggregation, is_measured=True)

    def log_key(self, key: Key, value: Any, aggregation_fn: str | Callable[..., Any] | None = None, reducer: str = "") -> None:
        """Log a value under a key in parts; see :meth:`log_scalar` and :meth:`log_tensor`."""
        aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
        self._session.log(key, value, aggregation, reducer)

    def tag(self, **facts: Any) -> None:
        """Facts about the step in flight, such as ``batch_ids=[...]``, for the run directory and the story of a spike.

        Between two steps it means the step that just ended; but a name that was first given before any forward, as where a loop
        tags each batch as it comes, means the step to come.
        """
        self._session.tag(facts)

    def diagnose(self) -> Diagnosis:
        """What is wrong with the training so far, where, and what to do: print it, or ask for ``findings`` and ``exit_code``.

        It looks at some hundred of the steps that were monitored: both ends, those with spikes, and an even choice between.
        Log the loss with ``log_scalar("loss", loss)`` before the optimizer steps: most rules have to know whether it falls.
        ``preset="full"`` measures what rules about activations, saturation and attention need; ``unseen`` says which lacked something.
        Takes about a second for a thousand parameters. Synchronises once.
        """
        self._session.settle_now()
        if self._session.guard.inert:
            return Diagnosis((), None, {"everything": "GRADMON_DISABLE is set in the environment: nothing is measured"})
        ledger, facts = self._session.ledger, self._session.audit.facts()
        place = ledger.outbox.directory
        recent = ledger.recent()
        history = History(
            ledger.memory.records(),
            recent.events,
            facts,
            ledger.matrices,
            ledger.kinds,
            "" if place is None else shlex.quote(str(place)),
            recent.steps,
            recent.suspects,
        )
        with unseen():
            return diagnose_history(history)

    def plot(self, kind: str = "heatmap", engine: str = "plotly", **options: Any) -> Any:
        """A figure of the run so far, which shows in a notebook and goes to a dashboard: ``wandb.log({"heatmap": monitor.plot()})``.

        It shows what the monitor remembers: at most 400 of the steps that were monitored, both ends, those with spikes, and an even
        choice between. :meth:`Run.plot` of a run directory shows all of them. Synchronises once.

        Args:
            kind: ``"heatmap"`` layers over steps; ``"norm"`` loss, gradient norm before and after clipping, share of clipped steps;
                ``"update"`` update over parameter with the guide of 1e-3; ``"depth"`` one step over the layers; ``"layers"`` single
                layers side by side.
            engine: ``"plotly"``, or ``"matplotlib"`` for a still picture: ``.savefig("heatmap.png")``.
            **options: ``view="gradient"``, ``"clipped"``, ``"update"``, ``"sparsity"``, ``"activation"`` or ``"parameter"`` for
                ``heatmap``, ``depth`` and ``layers``; ``rows=48`` for ``heatmap`` and ``depth``: more layers are shown by blocks;
                ``columns=1000`` for ``heatmap``, and ``relative=`` for its colours: True for each value relative to the median of its
                row, False for the values, None for what suits the view; ``step=`` for ``depth``; ``names=[...]`` for ``layers``.

        Returns:
            A ``plotly.graph_objects.Figure`` or a ``matplotlib.figure.Figure``.

        Raises:
            ValueError: there is no such kind, engine, view, step or layer, or what it shows was not measured.
            TypeError: this kind has no such option.
            ImportError: the engine is not installed.
        """
        from ..analysis.plots.plot import plot
        from ..analysis.plots.sources import ValueSource

        self._session.settle_now()
        inventory = self._session.planner.inventory
        order = None if inventory is None else ModelOrder(inventory.names, inventory.kinds)
        memory = self._session.ledger.memory
        return plot(ValueSource.of_records(memory.records(), order, memory.is_whole), kind, engine, options)

    def missing(self) -> dict[str, str]:
        """Why each key that was asked for has no value in the step that ended last: reason by key."""
        record, planner, why = self._session.settle_now(), self._session.planner, self._session.lost
        if record is None and not why:
            return {}
        follower = self._session.follower
        owned = None if follower is None else planner.owned(follower.optimizers())
        return self._session.ledger.missing(planner.registry.metrics, planner.matchable() or {}, owned, why)

    def complaints(self) -> dict[str, int]:
        """How often each thing went wrong, by cause; a warning comes with the first of each only.

        ``sink:JsonlSink`` counts steps that the sink lost, ``store`` steps that the run directory lost, ``metric:...`` values
        of a metric function that raised, ``internal:...`` failures of the monitor itself.
        """
        return {cause: count for cause, count in self._session.guard.complaints.counts.items() if count}

    def why(self, step: int | None = None) -> str:
        """The story of a step, by default of the worst step of the largest spike, on one screen: what was said of it, the signals
        around it, which parameters moved and since when, and what came after. For ``print``. Spikes of steps in a row are one.

        The signals of the last ``history`` steps are remembered, those around earlier spikes, and the gradients of 64 steps and of the
        100 largest spikes; the command ``gradmon why`` tells of every step in a run directory.

        Raises:
            TypeError, ValueError: the step is none, or is not remembered; or there was no spike, or nothing that looks for spikes.
        """
        if step is not None:
            check.step_number("step", step)
        elif not self._session.ledger.judges.detectors:
            raise ValueError("nothing looks for spikes: call add_preset() or add_detector(SpikeDetector()), or name a step")
        self._session.settle_now()
        self._session.recall()
        return explain(self._session.ledger.recent(), step)

    def top_parameters(self, count: int = 10) -> list[tuple[str, float]]:
        """The parameters with the largest share of the squared gradient norm in the step that ended last, largest first."""
        check.positive_int("count", count)
        record = self._session.settle_now()
        with unseen():
            return [] if record is None else top_shares(record.tables.get(n.GRADIENT_BEFORE_CLIP), count)
