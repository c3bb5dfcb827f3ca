"""What a page about two runs says, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...analysis.run import Run
from ...core.keys import TENSOR_SOURCES, parse_key
from ..comparison import text as wording
from ..comparison.result import Difference, Parting
from ..diagnosis.diagnose import diagnosed
from ..diagnosis.history import History
from ..plots import pair_charts
from ..plots.pairing import Pair, PanelPair
from ..plots.panels import LAYER_VIEWS, OfRun, Reel
from .content import CODES, by_name, cell, drawn, facts, findings, spikes, view

#: Partings that are told one by one, and small pictures side by side.
_TOLD, _MOST_LAYERS = 5, 9


def content(
    runs: tuple[Run, Run],
    names: tuple[str, str],
    difference: Difference,
    renamed: Callable[[str], str],
    title: str,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        runs: both.
        names: what they are called on the page, not the same.
        difference: where they part.
        renamed: what a layer of the first is called in the second.
        title: of the page.
        advance: called after each of :data:`torch_gradmon.analysis.report.content.PARTS`.
    """
    pair = Pair(Reel(OfRun(runs[0]), names[0]), Reel(OfRun(runs[1]), names[1]), renamed)
    diagnoses = [diagnosed(History.of_run(run)) for run in runs]
    advance()
    for name in LAYER_VIEWS:
        pair.panels(name)
        advance()
    shown = {name for reel in pair.reels for name, _ in reel.panels()}
    panels = {name: found for name in LAYER_VIEWS if name in shown and (found := pair.panels(name)) is not None}
    marks = [difference.first.step] if difference.first is not None else []
    events = [f"{name}: {spike}" for name, reel in zip(names, pair.reels, strict=True) for spike in spikes(reel)]
    return {
        "title": title,
        "facts": _facts(runs, pair),
        "against": against(difference),
        "findings": [
            {**told, "run": name} for name, diagnosis in zip(names, diagnoses, strict=True) for told in findings(diagnosis)
        ],
        "unseen": [],
        "marks": marks,
        "mark": "the runs part",
        "events": events,
        "spikes": "",
        "codes": CODES,
        "sides": {"apart": "difference", "first": names[0], "second": names[1]},
        "views": {name: view({"apart": each.apart, "first": each.first, "second": each.second}) for name, each in panels.items()},
        "figures": drawn(
            {
                "norm": lambda: pair_charts.norm(pair, marks),
                "update": lambda: pair_charts.update(pair, marks),
                "layers": lambda: pair_charts.layers(pair, _apart(difference, panels.get("gradient")), marks),
            }
        ),
        "layers": _layers(panels.get("gradient"), names),
    }


def against(difference: Difference) -> dict[str, Any]:
    """Where the runs part, for the head of the page."""
    return {
        "parts": difference.parts,
        "words": [line.strip() for line in wording.opening(difference) if line.strip()],
        "step": difference.steps[-1],
        "partings": [_row(parting) for parting in difference.partings[:_TOLD]],
        "more": max(len(difference.partings) - _TOLD, 0),
        "stages": [
            [
                name,
                wording.share(stage.tensors_part, stage.tensors),
                wording.share(stage.values_part, stage.values),
                wording.number(stage.largest),
            ]
            for name, stage in difference.stages.items()
        ],
        "lone": list(wording.lone(difference)),
    }


def _row(parting: Parting) -> list[str]:
    return [parting.key, *wording.both(parting), wording.number(parting.relative)]


def _facts(runs: tuple[Run, Run], pair: Pair) -> list[list[str]]:
    """Those of both runs; one value where they have the same."""
    first, second = (dict(facts(run, reel)) for run, reel in zip(runs, pair.reels, strict=True))
    told = [["runs", " | ".join(pair.titles)]]
    for name in dict.fromkeys((*first, *second)):
        values = dict.fromkeys((first.get(name, "none"), second.get(name, "none")))
        told.append([name, " | ".join(values)])
    return told


def _apart(difference: Difference, gradient: PanelPair | None) -> list[str]:
    """Layers that part in the step in which the runs do, and then those that are farthest apart in any."""
    if gradient is None:
        return []
    keys = [parse_key(parting.other) for parting in difference.partings]
    parted = [key.name for key in keys if key.source in TENSOR_SOURCES]
    ranked = torch.nan_to_num(gradient.apart.values, nan=-1.0).amax(0).argsort(descending=True, stable=True).tolist()
    known = gradient.first.names
    found = dict.fromkeys((*(name for name in parted if name in known), *(known[place] for place in ranked)))
    return list(found)[:_MOST_LAYERS]


def _layers(gradient: PanelPair | None, names: Sequence[str]) -> dict[str, Any]:
    """A row for each layer: how large its gradient is in both, and how far they are apart."""
    if gradient is None:
        return {"columns": ["layer"], "rows": []}
    columns: list[tuple[str, dict[str, float]]] = []
    for name, panel in zip(names, (gradient.first, gradient.second), strict=True):
        known = panel.values.where(panel.values.isfinite(), torch.nan)
        columns.append((f"gradient in {name}, median", by_name(panel, known.nanmedian(0).values)))
    far = gradient.apart.values.nan_to_num(nan=-1.0)
    largest, at = far.max(0)
    steps = torch.tensor([float(step) for step in gradient.apart.steps], dtype=torch.float64, device="cpu")
    columns += [
        ("largest difference", by_name(gradient.apart, largest.where(largest >= 0, torch.nan))),
        ("in step", by_name(gradient.apart, steps[at].where(largest > 0, torch.nan))),
        ("differs since step", by_name(gradient.apart, steps[(far > 0).int().argmax(0)].where(largest > 0, torch.nan))),
    ]
    rows = [[name, *(cell(column.get(name)) for _, column in columns)] for name in gradient.first.names]
    return {"columns": ["layer", *(title for title, _ in columns)], "rows": rows}
