"""Faults between ranks that should be equal: severity, cause, and what to do."""

from __future__ import annotations

from .loop_mistakes import Mistake

RANK_FAULTS: dict[str, Mistake] = {
    "ranks-not-synchronised": Mistake(
        "error",
        "Ranks use different gradients where they should have the same: each trains a model of its own",
        "Call the wrapper, not its .module, and leave no_sync() before the last backward pass of a step; put every trained parameter "
        "below the wrapper, and change gradients after the backward pass in the same way on all ranks",
        repeats=1,
        weight=150.0,
    ),
    "ranks-diverged": Mistake(
        "error",
        "What ranks should have in common differs: parameters, the state of the optimizer, or its settings",
        "Start all ranks from one initialisation or checkpoint, with the optimizer's state and the same settings; if one tensor of one "
        "rank differs from then on, suspect its memory or device, and restart from a checkpoint before that step",
        repeats=1,
        weight=150.0,
    ),
    "same-batches-on-all-ranks": Mistake(
        "warning",
        "All ranks train on the same batches: their gradients are equal, and more ranks add nothing",
        "Give each rank its own part of the data: DistributedSampler with sampler.set_epoch(epoch), or a seed that depends on the rank",
        repeats=1,
        weight=130.0,
    ),
    "one-rank-apart": Mistake(
        "warning",
        "The loss of one rank is far from those of all others, for many steps",
        "Look at the data of that rank, at its preprocessing, and at its device",
        repeats=1,
        weight=110.0,
    ),
}
