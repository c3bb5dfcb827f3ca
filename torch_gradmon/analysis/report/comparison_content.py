"""The content of a page about two runs, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.keys import TENSOR_SOURCES, parse_key
from ..comparison import text
from ..comparison.result import ComparisonResult
from ..diagnosis.diagnose import diagnose_history
from ..diagnosis.history import History
from ..plots import pair_charts
from ..plots.pairing import PanelPair, RunPair
from ..plots.panel_set import PanelSet
from ..plots.sources import ValueSource
from ..plots.views import LAYER_VIEWS
from ..run import Run
from .content import CODES, by_name, facts, figures, findings, known_medians, layer_table, spikes, view

#: Divergences that are listed, and layers drawn side by side.
_DIVERGENCES, _MOST_LAYERS = 5, 9


def content(
    runs: tuple[Run, Run],
    names: tuple[str, str],
    difference: ComparisonResult,
    renamed: Callable[[str], str],
    title: str,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """The data of the page.

    Args:
        runs: both runs.
        names: their names on the page, which differ.
        difference: the result of comparing them.
        renamed: maps the name of a layer in the first run to its name in the second.
        title: of the page.
        advance: called after each of :data:`torch_gradmon.analysis.report.content.PARTS`.
    """
    pair = RunPair(PanelSet(ValueSource.of_run(runs[0]), names[0]), PanelSet(ValueSource.of_run(runs[1]), names[1]), renamed)
    diagnoses = [diagnose_history(History.of_run(run)) for run in runs]
    advance()
    for name in LAYER_VIEWS:
        pair.panels(name)
        advance()
    shown = {name for panels in pair.panel_sets for name, _ in panels.panels()}
    pairs = {name: found for name in LAYER_VIEWS if name in shown and (found := pair.panels(name)) is not None}
    marks = [difference.first.step] if difference.first is not None else []
    return {
        "title": title,
        "facts": _facts(runs, pair),
        "against": comparison(difference),
        "findings": [
            {**found, "run": name} for name, diagnosis in zip(names, diagnoses, strict=True) for found in findings(diagnosis)
        ],
        "unseen": [],
        "marks": marks,
        "mark": "the runs diverge",
        "events": [f"{name}: {spike}" for name, panels in zip(names, pair.panel_sets, strict=True) for spike in spikes(panels)],
        "spikes": "",
        "codes": CODES,
        "sides": {"apart": "difference", "first": names[0], "second": names[1]},
        "views": {
            name: view({"apart": each.difference, "first": each.first, "second": each.second}) for name, each in pairs.items()
        },
        "figures": figures(
            {
                "norm": lambda: pair_charts.norm(pair, marks),
                "update": lambda: pair_charts.update(pair, marks),
                "layers": lambda: pair_charts.layers(pair, _differing_layers(difference, pairs.get("gradient")), marks),
            }
        ),
        "layers": _layers(pairs.get("gradient"), names),
    }


def comparison(difference: ComparisonResult) -> dict[str, Any]:
    """Where the runs diverge, for the head of the page."""
    shown = difference.divergences[:_DIVERGENCES]
    return {
        "parts": difference.diverges,
        "words": [line.strip() for line in text.opening(difference) if line.strip()],
        "step": difference.steps[-1],
        "partings": [[each.key, *text.both(each), text.number(each.relative)] for each in shown],
        "more": len(difference.divergences) - len(shown),
        "stages": text.stage_rows(difference),
        "lone": list(text.unmatched(difference)),
    }


def _facts(runs: tuple[Run, Run], pair: RunPair) -> list[list[str]]:
    """The facts of both runs; one value if they are equal."""
    first, second = (dict(facts(run, panels)) for run, panels in zip(runs, pair.panel_sets, strict=True))
    found = [["runs", " | ".join(pair.titles)]]
    for name in dict.fromkeys((*first, *second)):
        values = dict.fromkeys((first.get(name, "none"), second.get(name, "none")))
        found.append([name, "\n| ".join(values) if any("\n" in value for value in values) else " | ".join(values)])
    return found


def _differing_layers(difference: ComparisonResult, gradient: PanelPair | None) -> list[str]:
    """The layers that diverge in the first divergent step, then those with the largest differences in any step."""
    if gradient is None:
        return []
    keys = [parse_key(divergence.other) for divergence in difference.divergences]
    divergent = [key.name for key in keys if key.source in TENSOR_SOURCES]
    largest = torch.nan_to_num(gradient.difference.values, nan=-1.0).amax(0)
    known = gradient.first.names
    ranked = (known[place] for place in largest.argsort(descending=True, stable=True).tolist())
    found = dict.fromkeys((*(name for name in divergent if name in known), *ranked))
    return list(found)[:_MOST_LAYERS]


def _layers(gradient: PanelPair | None, names: Sequence[str]) -> dict[str, Any]:
    """A row for each layer: the size of its gradient in both runs, and the differences."""
    if gradient is None:
        return layer_table((), [])
    both = zip(names, (gradient.first, gradient.second), strict=True)
    columns = [(f"gradient in {name}, median", known_medians(panel)) for name, panel in both]
    apart = gradient.difference
    far = apart.values.nan_to_num(nan=-1.0)
    largest, at = far.max(0)
    steps = torch.tensor([float(step) for step in apart.steps], dtype=torch.float64, device="cpu")
    columns += [
        ("largest difference", by_name(apart, largest.where(largest >= 0, torch.nan))),
        ("in step", by_name(apart, steps[at].where(largest > 0, torch.nan))),
        ("differs since step", by_name(apart, steps[(far > 0).int().argmax(0)].where(largest > 0, torch.nan))),
    ]
    return layer_table(gradient.first.names, columns)
