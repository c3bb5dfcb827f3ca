"""The width sweep on models with exponents known from theory; writes results/width_sweep.json and a picture.

python -m benchmarks.width_sweep                  # under two minutes on one core
python -m benchmarks.width_sweep --repetitions 1 --widths 64 128 256 --no-files
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_gradmon.analysis.width_sweep import LayerVerdict, WidthSweep, width_sweep

from . import width_models as models
from .machine import machine
from .report import RESULTS

WIDTHS = (64, 128, 256, 512, 1024)
#: Seeds of each sweep.
SEEDS = 3
PICTURE = RESULTS.parent.parent / "images" / "width_sweep.png"

#: By name: a description of the model, and the arguments of the sweep. A learning rate is that at the smallest width.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp_standard": (
        "perceptron, standard, Adam",
        {"factory": models.of(models.perceptron, False), "data": models.vectors, "optimizer": "adam", "lr": 3e-3},
    ),
    "mlp_mup": (
        "perceptron, muP, Adam",
        {
            "factory": models.of(models.perceptron, True),
            "data": models.vectors,
            "optimizer": lambda model, width: models.mup_adam(model, width, 3e-3),
        },
    ),
    "transformer_standard": (
        "transformer, standard, Adam",
        {"factory": models.of(models.Transformer, False), "data": models.tokens, "optimizer": "adam", "lr": 3e-3},
    ),
    "transformer_mup": (
        "transformer, muP, Adam",
        {
            "factory": models.of(models.Transformer, True),
            "data": models.tokens,
            "optimizer": lambda model, width: models.mup_adam(model, width, 3e-3),
        },
    ),
    "mlp_standard_sgd": (
        "perceptron, standard, SGD, one large step",
        {"factory": models.of(models.perceptron, False), "data": models.vectors, "optimizer": "sgd", "lr": 0.1, "steps": 1},
    ),
    "mlp_mup_sgd": (
        "perceptron, muP, SGD",
        {
            "factory": models.of(models.perceptron, True),
            "data": models.vectors,
            "optimizer": lambda model, width: models.mup_sgd(model, width, 0.1),
        },
    ),
    "cross_entropy": (
        "perceptron, standard, SGD with width^-1/2, cross-entropy",
        {
            "factory": models.of(models.perceptron, False),
            "data": models.fresh(models.vectors),
            "optimizer": "sgd",
            "lr": 0.4,
            "lr_exponent": -0.5,
        },
    ),
    "squared_error": (
        "perceptron, standard, SGD with width^-1/2, squared error",
        {
            "factory": models.of(models.perceptron, False),
            "data": models.fresh(models.vectors_and_scores),
            "optimizer": "sgd",
            "lr": 0.4 * models.CLASSES / 2,  # the same step: torch's squared error has 2 / classes before the residual
            "lr_exponent": -0.5,
        },
    ),
    "theory_adam": (
        "perceptron, standard, Adam, one small step",
        {
            "factory": models.of(models.perceptron, False),
            "data": models.vectors,
            "optimizer": "adam",
            "lr": 1e-5,
            "steps": 1,
            "expected": "standard",
            "widths": (256, 512, 1024, 2048),
        },
    ),
    "theory_sgd": (
        "perceptron, standard, SGD, one small step",
        {
            "factory": models.of(models.perceptron, False),
            "data": models.vectors,
            "optimizer": "sgd",
            "lr": 1e-3,
            "steps": 1,
            "expected": "standard",
            "widths": (256, 512, 1024, 2048),
        },
    ),
    "theory_transformer": (
        "transformer, standard, Adam, one small step",
        {
            "factory": models.of(models.Transformer, False),
            "data": models.tokens,
            "optimizer": "adam",
            "lr": 1e-6,
            "steps": 1,
            "expected": "standard",
        },
    ),
}


def sweep(name: str, widths: Sequence[int], repetitions: int) -> WidthSweep:
    """The sweeps of one case, each with its own seeds, merged."""
    return width_sweep(**{"widths": widths, **CASES[name][1], "seeds": SEEDS * repetitions})


def alone(found: WidthSweep) -> list[WidthSweep]:
    """The sweeps one by one."""
    return [found.of_seeds(*range(first, first + SEEDS)) for first in found.seeds[::SEEDS]]


def summary(found: WidthSweep, seconds: float) -> dict[str, Any]:
    """The stored result: the verdicts of all sweeps together, and those of each."""
    return {
        "outcome": found.outcome,
        "words": found.words(),
        "seconds": round(seconds, 1),
        "settings": dict(found.settings),
        "verdicts": [_short(verdict) for verdict in found.verdicts],
        "outcomes_alone": [each.outcome for each in alone(found)],
        "states_alone": [_states(each.verdicts) for each in alone(found)],
        "losses": {run.width: [round(loss, 4) for loss in run.losses] for run in found.runs if run.seed == found.seeds[0]},
    }


def _short(verdict: LayerVerdict) -> dict[str, Any]:
    slope = verdict.slope
    return {
        "module": verdict.module,
        "kind": verdict.kind,
        "term": verdict.term,
        "state": verdict.state,
        "exponent": slope and [round(number, 3) for number in (slope.exponent, slope.low, slope.high)],
        "expected": verdict.expected,
        "as_expected": verdict.as_expected,
    }


def _states(verdicts: Sequence[LayerVerdict]) -> dict[str, str]:
    return {f"{verdict.module} {verdict.term}": verdict.state for verdict in verdicts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep every case, print its table and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--repetitions", type=int, default=5, help="sweeps of each case, with seeds of their own")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-files", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, WidthSweep] = {}
    kept = {}
    for name in options.cases:
        start = time.perf_counter()
        found[name] = sweep(name, options.widths, options.repetitions)
        kept[name] = {"title": CASES[name][0], **summary(found[name], time.perf_counter() - start)}
        print(f"\n== {CASES[name][0]} ({kept[name]['seconds']} s; one by one: {', '.join(kept[name]['outcomes_alone'])})\n")
        print(found[name].table(), found[name].words(), sep="\n\n")
    if not options.no_files:
        _write(found, kept)


def _write(found: Mapping[str, WidthSweep], kept: Mapping[str, Any]) -> None:
    from .width_picture import draw

    result = {"machine": machine(), "cases": kept}
    Path(RESULTS / "width_sweep.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw({name: (CASES[name][0], sweep) for name, sweep in found.items()}, PICTURE)


if __name__ == "__main__":
    main()
