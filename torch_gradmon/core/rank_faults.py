"""Faults between ranks that should be equal: severity, cause, and what to do."""

from __future__ import annotations

from .loop_mistakes import Mistake

RANK_FAULTS: dict[str, Mistake] = {
    "ranks-not-synchronised": Mistake(
        "error",
        "Ranks use different gradients where they should have the same: each trains a model of its own",
        "Call the wrapper, not its .module, and leave no_sync() before the last backward pass of a step; put every trained parameter "
        "below the wrapper, and change gradients after the backward pass in the same way on all ranks. If ranks are meant to differ, name "
        "those parameters by rank_distinct_regex=, the ranks of one model by process_group=, or pass check_replicas=0",
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
        "All ranks train on the same batches, so more ranks add nothing",
        "Give each rank its own part of the data, by a DistributedSampler or a seed that depends on the rank",
        repeats=1,
        weight=130.0,
    ),
}
