"""The report on a spike as text, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...core import keys as n
from ...core.formatting import ShownText, cut_start, factor_text, significant
from ...runs.detail_request import request_text
from ...spikes.attribution import ParameterAttribution
from ...spikes.signals import largest
from .report import SpikeReport, no_spike
from .source import StepSource

#: Parameters, ranks and other spikes that are shown, and micro-batches or groups of each.
_LAYERS, _RANKS, _OTHERS, _ITEMS = 8, 8, 5, 8
_NAME_WIDTH, _WIDTH = 40, 11
_TITLES = ("norm", "usual", "times", "score", "share", "since")


def explain(source: StepSource, step: int | None = None) -> ShownText:
    """The report on ``step``, by default on the worst step of the largest spike, or that there is no spike.

    Raises:
        ValueError: the step is unknown.
    """
    if step is None and not source.events:
        return ShownText(no_spike(source))
    report = SpikeReport.of(source, step)
    lines = [*_heading(report), "", *_signals(report), "", *_parameters(report)]
    for sentence in report.recovery:
        lines += ["", sentence]
    if report.others:
        shown = largest(report.others, _OTHERS)
        left = len(report.others) - len(shown)
        lines += ["", f"other spikes: {', '.join(other.when for other in shown)}{f' and {left} smaller ones' if left else ''}"]
    return ShownText("\n".join(lines))


def _heading(report: SpikeReport) -> Iterator[str]:
    context = dict(report.context)
    action, skipped, _ = context.pop("action", ""), context.pop("skipped", ""), context.pop("in_a_row", 0)
    interrupted = context.pop("interrupted", "")
    if not report.events:
        yield f"step {report.step}: {skipped or 'no detector called it a spike'}"
    yield from (f"step {report.step}: {event.reason}" for event in report.events)
    spike = report.episode
    if spike is not None and len(spike.steps) > 1:
        worst = "" if report.step == spike.worst.step else f", the largest in step {spike.worst.step}"
        yield f"  one spike of {len(spike.steps)} steps in a row, {spike.first} to {spike.last}{worst}"
    applied = context.pop("applied", True)
    if action:
        yield f"  {action}"
    elif not applied:
        yield f"  the step was not applied{f': {interrupted}' if interrupted else ''}"
    if tuned := context.pop("tuned", None):
        yield f"  measured under a live change of detail (gradmon detail, number {tuned['number']}): {request_text(tuned)}"
    tags, norms, rows = context.pop("tags", {}), context.pop("batch_norms", {}), context.pop("rows", {})
    facts = {name: value for name, value in {**tags, **context}.items() if name not in ("time", "overhead_pct", n.NO_ATTENTION)}
    if facts:
        yield "  " + ", ".join(f"{name} {_fact(value)}" for name, value in facts.items())
    if rows:
        named = [f"{name} ({significant(float(loss))})" for name, loss in zip(rows["ids"], rows["losses"], strict=True)]
        yield f"  rows with the largest losses, of {rows['count']} with a sum of {significant(rows['sum'])}: {', '.join(named)}"
    for rank, each in list(norms.items())[:_RANKS]:
        yield f"  norms of the micro-batches of rank {rank}: {_items(list(map(significant, each)))}"
    if len(norms) > _RANKS:
        yield f"  ... and {len(norms) - _RANKS} more ranks"


def _items(items: Sequence[str]) -> str:
    return ", ".join(items[:_ITEMS]) + (", ..." if len(items) > _ITEMS else "")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return _fact(value[0]) if len(value) == 1 else f"[{_items(list(map(_fact, value)))}]"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())[:80]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{cut_start(name, _NAME_WIDTH - 1):<{_NAME_WIDTH}}" + "".join(f"{f' {cell}':>{_WIDTH}}" for cell in cells)


def _signals(report: SpikeReport) -> Iterator[str]:
    yield _row("signal", [f"[{number}]" if number == report.step else str(number) for number in report.around])
    yield from (_row(name, list(map(_fact, facts))) for name, facts in report.facts)
    yield from (_row(name, list(map(significant, values))) for name, values in report.signals)


def _parameters(report: SpikeReport) -> Iterator[str]:
    suspects, step, is_spike = report.suspects, report.step, bool(report.events)
    if not suspects:
        yield "the gradients of this step are not known (a monitor keeps 64 steps, and 100 with a spike; a run directory all)"
        return
    yield _row("parameter, by suspicion", _TITLES)
    yield from (_row(suspect.name, _cells(suspect, step)) for suspect in suspects[:_LAYERS])
    found = report.cause
    calm = sum(each.since is None and not (each.nonfinite or each.is_spoiled_after) for each in suspects)
    known = ""
    if not is_spike or not found.is_common:  # otherwise the last line states it
        is_known = any(suspect.score is not None for suspect in suspects)
        known = (
            f"{calm} of {len(suspects)} as usual" if is_known else "too few earlier steps are known to determine what is usual"
        )
    if (left := len(suspects) - _LAYERS) > 0:
        yield f"... and {left} more{'; ' * bool(known)}{known}"
    elif known:
        yield f"{len(suspects)} parameters, {known}"
    if is_spike and found.words:
        yield found.words


def _cells(suspect: ParameterAttribution, step: int) -> list[str]:
    return [
        significant(suspect.norm),
        significant(suspect.usual),
        "-" if suspect.factor is None else factor_text(suspect.factor),
        "-" if suspect.score is None else f"{suspect.score:.1f}",
        "-" if suspect.share is None else f"{suspect.share:.1%}",
        "-" if suspect.since is None else "this step" if suspect.since == step else str(suspect.since),
    ]
