"""Values into a monitor, values out of it, and what follows from them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core import keys as n
from ...core import validation as check
from ...core.errors import display
from ...core.keys import Key
from ...core.records import ModelOrder, StepRecord
from ...core.torch_modes import outside_dispatch_modes
from ...step.plan import checked_aggregation
from ...step.summary import top_shares
from ..runtime import Runtime
from ..steps.step_planning import MODEL_GONE
from .queries import Queries

if TYPE_CHECKING:
    from ...analysis.diagnosis import Diagnosis

_DISABLED = {"everything": "GRADMON_DISABLE is set in the environment: nothing is measured"}


@dataclass(slots=True)
class ValuesService:
    """Logs values into a runtime and reads its records. Getters do not communicate, and synchronise at most once a step."""

    runtime: Runtime

    # --- in ------------------------------------------------------------------------------------------------------------------

    def log_scalar(self, key: str, value: Any, aggregation_fn: str | Callable[..., Any] | None, reduce: str | None) -> None:
        """Log one number."""
        check.log_key(key)
        if reduce is not None:
            check.one_of("reduce", reduce, ("mean", "sum", "min", "max"))
        with outside_dispatch_modes():
            if isinstance(value, Tensor) and value.numel() != 1:
                shape = tuple(value.shape)
                raise ValueError(f"log_scalar({key!r}) takes one number, got a tensor of shape {shape}; use log_tensor")
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError(f"log_scalar({key!r}) takes a real number, got a complex one, {display(value)}; log its abs()")
        if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
            raise TypeError(f"log_scalar({key!r}) takes a number, got {display(value)}")
        self.log_key(Key("", key, ""), value, aggregation_fn, reduce or "")

    def log_scalars(self, values: Mapping[str, Any]) -> None:
        """Log several numbers."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log_scalars takes a dict of numbers by key, got {display(values)}")
        for key, value in values.items():
            self.log_scalar(key, value, None, None)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: str | Callable[..., Any] | None) -> None:
        """Log a tensor as one number."""
        check.log_key(key)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"log_tensor({key!r}) takes a tensor, got {display(tensor)}; use log_scalar")
        with outside_dispatch_modes():
            if tensor.is_complex():
                raise TypeError(f"log_tensor({key!r}) takes real numbers, got dtype {tensor.dtype}; log its abs()")
        if Queries(self.runtime).is_listening:
            aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
            self.runtime.lifecycle.values.log(Key("", key, ""), tensor, aggregation, is_measured=True)

    def log_rows(self, ids: Any, losses: Any) -> None:
        """Log the loss of each row."""
        if not isinstance(losses, Tensor) or losses.is_complex() or losses.dtype == torch.bool:
            raise TypeError(f"log_rows takes the losses as a tensor of real numbers, got {display(losses)}")
        if losses.layout is not torch.strided or losses.ndim != 1 or not len(losses):
            raise ValueError(
                f"log_rows takes one loss for each row, a dense tensor [rows], got {display(losses)}; reduce other dimensions"
            )
        if isinstance(ids, Tensor):
            is_list = ids.ndim == 1 and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        else:
            ids = ids.tolist() if hasattr(ids, "tolist") else ids  # of numpy
            is_list = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
        if not is_list:
            raise TypeError(f"log_rows takes ids as a tensor of whole numbers, [rows], or as a list, got {display(ids)}")
        if len(ids) != len(losses):
            raise ValueError(f"log_rows takes one id for each of the {len(losses)} losses, got {display(ids)}")
        self.runtime.log_rows(ids, losses)

    def log_key(self, key: Key, value: Any, aggregation_fn: str | Callable[..., Any] | None, reducer: str) -> None:
        """Log a value under a key in parts."""
        if not isinstance(key, Key):
            raise TypeError(f"log_key takes a Key(source, name, metric), and log_scalar a text; got {key!r}")
        self.runtime.lifecycle.values.log(key, value, checked_aggregation(aggregation_fn, "aggregation_fn"), reducer)

    # --- out -----------------------------------------------------------------------------------------------------------------

    def missing(self) -> dict[str, str]:
        """Why keys have no value in the last step."""
        record, planner = Queries(self.runtime).settle_now(), self.runtime.planner
        why = self._why_nothing(record)
        if record is None and not why:
            return {}
        follower = self.runtime.loop
        owned = None if follower is None else planner.owned(follower.optimizers)
        factory, pipeline, names = self.runtime.factory, self.runtime.pipeline, planner.matchable() or {}
        if record is None or why:
            reasons = dict.fromkeys(factory.requested(names), why)
        else:
            reasons = factory.missing(record, pipeline.absent, names, owned)
        # the keys are made as those of the values are
        return dict(zip(pipeline.publisher.format_keys(dict.fromkeys(reasons, 0.0)), reasons.values(), strict=True))

    def _why_nothing(self, record: StepRecord | None) -> str:
        """Why no key has a value in the last step, whose record this is; empty where there are values, or was no step yet."""
        why, state = Queries(self.runtime).stale_reason, self.runtime.state
        ended = state.clock.ended
        if record is None and not why and ended is None and state.is_open and state.progress.times:
            steps = max(state.progress.times.values())
            return (
                f"step {state.clock.step} is open until all attached optimizers have stepped; one of them has stepped {steps} "
                f"time{'s' * (steps > 1)} so far, and from its eleventh step on the others are not waited for"
            )
        if record is not None or why or ended is None:
            return why
        return MODEL_GONE if self.runtime.planner.has_lost_model else f"step {ended} was not monitored"

    def all_metrics(self) -> dict[int, dict[str, float]]:
        """The values of the last monitored steps, by step and key."""
        Queries(self.runtime).settle_now()
        pipeline = self.runtime.pipeline
        return {record.step: pipeline.publisher.shown(record) for record in pipeline.history.records()}

    def top_parameters(self, count: int) -> list[tuple[str, float]]:
        """The parameters with the largest shares of the squared gradient norm."""
        check.positive_int("count", count)
        record = Queries(self.runtime).settle_now()
        with outside_dispatch_modes():
            return [] if record is None else top_shares(record.tables.get(n.GRADIENT_BEFORE_CLIP), count)

    # --- analysis ------------------------------------------------------------------------------------------------------------

    def diagnose(self) -> Diagnosis:
        """The findings about the training so far."""
        from ...analysis.diagnosis import Diagnosis
        from ...analysis.diagnosis.diagnose import diagnose_history
        from ...analysis.diagnosis.history import History

        record = Queries(self.runtime).settle_now()
        if self.runtime.fence.inert:
            return Diagnosis((), None, _DISABLED)
        pipeline, model = self.runtime.pipeline, self.runtime.factory.model
        facts = Queries(self.runtime).findings()
        data, setup = self.runtime.plugin("data_check"), self.runtime.plugin("setup_check")
        place, recent = pipeline.directory.path, pipeline.history.recent()
        history = History(
            pipeline.history.sample.records(),
            recent.events,
            facts,
            model.matrices,
            model.kinds,
            "" if place is None else shlex.quote(str(place)),
            recent.steps,
            recent.suspects,
            {} if data is None else data.chance,
            [] if setup is None else setup.groups,
            [] if setup is None else setup.frozen,
            data is not None and data.acts,
            model.parameters,
            pipeline.directory.facts.get("trainer", ""),
            clip_bound=pipeline.directory.facts.get("clip_bound"),
        )
        with outside_dispatch_modes():
            found = diagnose_history(history)
        why = "" if history.records else self._why_nothing(record)
        return replace(found, unseen={"everything": why}) if why else found

    def plot(self, kind: str, engine: str, options: Mapping[str, Any]) -> Any:
        """A figure of the steps that are remembered."""
        from ...analysis.plots.plot import plot
        from ...analysis.plots.sources import ValueSource

        Queries(self.runtime).settle_now()
        inventory, sample = self.runtime.planner.inventory, self.runtime.pipeline.history.sample
        order = None if inventory is None else ModelOrder(inventory.names, inventory.kinds)
        return plot(ValueSource.of_records(sample.records(), order, sample.is_whole), kind, engine, dict(options))

    def why(self, step: int | None) -> str:
        """The text about a step, by default about the largest spike."""
        from ...analysis.spike_report.text import explain

        if step is not None:
            check.step_number("step", step)
        elif not self.runtime.pipeline.detection.detector_set.detectors:
            raise ValueError("nothing looks for spikes: call add_preset() or add_detector(SpikeDetector()), or name a step")
        Queries(self.runtime).settle_now()
        self.runtime.backfill()
        return explain(self.runtime.pipeline.history.recent(), step)
