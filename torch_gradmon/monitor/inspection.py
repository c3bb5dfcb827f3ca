"""What the methods of the monitor do that takes more than a few lines: descriptions, records, reasons, diagnosis."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import keys as n
from ..core import validation as check
from ..core.errors import display
from ..core.records import SpikeEvent, StepRecord, StepView
from ..core.torch_modes import outside_dispatch_modes
from ..runs.detail_request import DetailRequest, request_text
from ..step.summary import BATCH_DOCUMENTATION, KEY_DOCUMENTATION, ON_REQUEST, top_shares
from .runtime import Runtime
from .steps import MODEL_GONE

if TYPE_CHECKING:
    from ..analysis.diagnosis import Diagnosis


def describe(runtime: Runtime) -> dict[str, str]:
    known = {**KEY_DOCUMENTATION, **BATCH_DOCUMENTATION, **ON_REQUEST}
    record, registry = runtime.pipeline.last, runtime.planner.registry
    # some whole-model values are switched on by other calls than add_*; the last record shows which
    last = () if record is None else record.values
    on_request = [key.metric for key in last if key.source == n.SUMMARY and key.metric in ON_REQUEST]
    texts = {f"{n.SUMMARY}/{name}": known[name] for name in (*runtime.factory.summary.choice.shown, *on_request)}
    for metric in registry.metrics:
        unit = "" if metric.unit == "1" else f" [{metric.unit}]"
        often = "" if metric.every == 1 else f", on every {metric.every}th step"
        texts[f"{metric.source}/{metric.pattern.pattern}/{metric.name}"] = f"{metric.documentation}{unit}{often}"
    if (sample := runtime.captures.parameters.sample_description()) is not None:
        for key in texts:
            if key.startswith((f"{n.SUMMARY}/update_", f"{n.UPDATE}/")):
                texts[key] += f"; {sample}"
    return texts


def last_record(runtime: Runtime) -> StepView | None:
    step, policy, change = runtime.state.ended, runtime.built_in.policy, detail_of(runtime)
    if step is None:
        return None

    def read(value: Callable[[StepRecord], Any], otherwise: Any) -> Any:
        last = runtime.settle_now()
        if runtime.state.ended != step:
            raise RuntimeError(f"step {step} is over: read its values before the next step ends, or keep them in a run directory")
        return otherwise if last is None else value(last)

    def spikes() -> tuple[SpikeEvent, ...]:
        runtime.settle_now(judges=True)
        return read(lambda found: found.events, ())  # type: ignore[no-any-return]

    def top_gradients(count: int = 10) -> list[tuple[str, float]]:
        check.positive_int("count", count)
        with outside_dispatch_modes():
            return read(lambda found: top_shares(found.tables.get(n.GRADIENT_BEFORE_CLIP), count), [])  # type: ignore[no-any-return]

    rollback = None if policy is None else policy.rolled_back
    detail = None if change is None else change.facts()
    return StepView(
        step,
        top_gradients,
        metrics=lambda: read(runtime.pipeline.publisher.shown, {}),
        spikes=spikes,
        rollback=lambda: rollback,
        detail=lambda: detail,
        context=lambda: read(lambda found: dict(found.context), {}),
    )


def name_of(runtime: Runtime, module: str | nn.Module) -> str:
    """The canonical name of a watched module. A str is returned unchanged."""
    if isinstance(module, str):
        return module
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module of the watched model or a name for it, got {display(module)}")
    inventory = runtime.planner.inventory
    for name, reference in () if inventory is None else inventory.modules.items():
        if reference() is module:
            return str(name)
    what = type(module).__name__
    raise ValueError(f"this {what} is not part of the watched model; pass its name as a str, or watch its model")


def missing(runtime: Runtime) -> dict[str, str]:
    record, planner = runtime.settle_now(), runtime.planner
    why = _why_nothing(runtime, record)
    if record is None and not why:
        return {}
    follower = runtime.loop
    owned = None
    if follower is not None and planner.inventory is not None:
        owned = {planner.inventory.names[position] for own in follower.ownership.owned.values() for position in own}
    factory, pipeline, names = runtime.factory, runtime.pipeline, planner.matchable() or {}
    if record is None or why:
        reasons = dict.fromkeys(factory.requested(names), why)
    else:
        reasons = factory.missing(record, pipeline.absent, names, owned)
    # the keys are made as those of the values are
    return dict(zip(pipeline.publisher.format_keys(dict.fromkeys(reasons, 0.0)), reasons.values(), strict=True))


def _why_nothing(runtime: Runtime, record: StepRecord | None) -> str:
    """Why no key has a value in the last step, whose record this is; empty where there are values, or was no step yet."""
    why, state = runtime.stale_reason, runtime.state
    ended = state.ended
    if record is None and not why and ended is None and state.is_open and state.progress.times:
        steps = max(state.progress.times.values())
        return (
            f"step {state.step} is open until all attached optimizers have stepped; one of them has stepped {steps} "
            f"time{'s' * (steps > 1)} so far, and from its eleventh step on the others are not waited for"
        )
    if record is not None or why or ended is None:
        return why
    return MODEL_GONE if runtime.planner.has_lost_model else f"step {ended} was not monitored"


def diagnose(runtime: Runtime) -> Diagnosis:
    from ..analysis.diagnosis import Diagnosis
    from ..analysis.diagnosis.diagnose import diagnose_history
    from ..analysis.diagnosis.history import History

    record = runtime.settle_now()
    if runtime.fence.inert:
        return Diagnosis((), None, {"everything": "GRADMON_DISABLE is set in the environment: nothing is measured"})
    pipeline, model = runtime.pipeline, runtime.factory.model
    data, setup = runtime.built_in.data, runtime.built_in.setup
    place, recent = pipeline.directory.path, pipeline.history.recent()
    history = History(
        pipeline.history.sampled(),
        recent.events,
        runtime.findings(),
        model.get("matrices", {}),
        model.get("kinds", {}),
        "" if place is None else shlex.quote(str(place)),
        recent.steps,
        recent.suspects,
        {} if data is None else data.chance,
        setup.groups,
        frozenset(setup.frozen),
        data is not None and data.acts,
        model.get("parameters", {}),
        pipeline.directory.facts.get("trainer", ""),
        clip_bound=pipeline.directory.facts.get("clip_bound"),
    )
    with outside_dispatch_modes():
        found = diagnose_history(history)
    why = "" if history.records else _why_nothing(runtime, record)
    return replace(found, unseen={"everything": why}) if why else found


def words(runtime: Runtime) -> Iterator[str]:
    module = runtime.planner.module()
    count = len(runtime.planner.registry.metrics)
    yield "nothing" if module is None else type(module).__name__
    yield "1 metric" if count == 1 else f"{count} metrics"
    yield "no step yet" if runtime.state.step is None else f"step {runtime.state.step}"
    if spikes := len({event.step for event in runtime.pipeline.history.recent().events}):
        yield f"{spikes} of the last steps with spikes"
    if (detail := detail_of(runtime)) is not None:
        yield f"for now {request_text(detail.facts())}"
    if runtime.fence.inert:
        yield "disabled by GRADMON_DISABLE"
    elif runtime.loop is None and not runtime.state.is_manual:
        yield "not attached to an optimizer"
    if place := runtime.pipeline.directory.description:
        yield place


def checked_ids(ids: Any, losses: Any) -> Any:
    """What identifies the rows of these losses, as a tensor or a list."""
    if not isinstance(losses, Tensor) or losses.is_complex() or losses.dtype == torch.bool:
        raise TypeError(f"log_sample_losses takes the losses as a tensor of real numbers, got {display(losses)}")
    if losses.layout is not torch.strided or losses.ndim != 1 or not len(losses):
        raise ValueError(
            f"log_sample_losses takes one loss for each row, a dense tensor [rows], got {display(losses)}; reduce other dimensions"
        )
    if isinstance(ids, Tensor):
        is_list = ids.ndim == 1 and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    else:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids  # of numpy
        is_list = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
    if not is_list:
        raise TypeError(f"log_sample_losses takes ids as a tensor of whole numbers, [rows], or as a list, got {display(ids)}")
    if len(ids) != len(losses):
        raise ValueError(f"log_sample_losses takes one id for each of the {len(losses)} losses, got {display(ids)}")
    return ids


def detail_of(runtime: Runtime) -> DetailRequest | None:
    """The live change in force, with the number of steps that are left."""
    tuning = runtime.built_in.detail
    return None if tuning.in_force is None else replace(tuning.in_force, steps=tuning.left)
