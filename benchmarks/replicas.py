"""What it costs a rank to take the fingerprints of one check, beside a training step: ``python -m benchmarks.replicas``.

Both in turns, in one process, on a GPT of 10 million parameters with AdamW. Writes ``benchmarks/results/replicas.json`` and a paragraph
of the documentation.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from torch_gradmon.plugins.replica_check import Common, Snapshot

from .machine import machine
from .models import GPT, GPT_10M
from .report import RESULTS, write_section
from .timing import clock_for, spread
from .training import Side, batch_of

ROUNDS, WARM_UP, SEQUENCES = 11, 2, 8
#: Steps between two checks, by default.
EVERY = 100


def measure() -> dict[str, Any]:
    """Times of steps and of checks, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    side = Side(GPT(GPT_10M))
    names = {id(parameter): name for name, parameter in side.model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    clock = clock_for(torch.device("cpu"))
    tensors = 0

    def check() -> None:
        nonlocal tensors
        snapshot, items = Snapshot(0), list(Common(None).of_optimizer(side.optimizer, names, is_averaged=False, first=0))
        snapshot.add(items)
        snapshot.start_copy()
        snapshot.digests()
        tensors = len(items)

    steps, checks = [], []
    for number in range(WARM_UP + ROUNDS):
        tokens, following = batch_of(GPT_10M, SEQUENCES, generator, torch.device("cpu"))
        times = clock(lambda: side.step(tokens, following)), clock(check)  # noqa: B023 (called at once)
        if number >= WARM_UP:
            steps.append(1e3 * times[0])
            checks.append(1e3 * times[1])
    shares = [100 * check / (step * EVERY) for step, check in zip(steps, checks, strict=True)]
    return {
        "machine": machine(),
        "parameters": sum(parameter.numel() for parameter in side.model.parameters()),
        "tensors": tensors,
        "every": EVERY,
        "step_ms": spread(steps),
        "check_ms": spread(checks),
        "share_pct": spread(shares),
    }


def paragraph(result: dict[str, Any]) -> str:
    """The words of the documentation."""
    check, step, share = (
        f"{of['median']:{form}} ({of['quartile_1']:{form}} to {of['quartile_3']:{form}})"
        for of, form in ((result["check_ms"], ".0f"), (result["step_ms"], ".0f"), (result["share_pct"], ".3f"))
    )
    return (
        f"A check of a GPT of {result['parameters']:,} parameters with AdamW, {result['tensors']:,} tensors, takes {check} ms beside "
        f"steps of {step} ms, with one thread: {share} % of the training at every {result['every']} steps. Medians, quartiles in brackets; "
        f"{result['machine']['processor']}, torch {torch.__version__}."
    )


def main() -> None:
    """Measure, print, and write."""
    result = measure()
    (RESULTS / "replicas.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(paragraph(result))
    write_section("replicas", paragraph(result))


if __name__ == "__main__":
    main()
