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
    "one-rank-apart": Mistake(
        "warning",
        "One rank is far from all others, or of two one from the other, check after check: it has other data, or computes otherwise",
        "Compare what that rank reads with the others, such as its shard, its tokenisation and its normalisation; if the data are alike, "
        "suspect its device, and call monitor.replay_step() there. If each rank is meant to have data of another kind, this is no fault",
        repeats=1,
        weight=110.0,
    ),
    "ranks-not-compared": Mistake(
        "info",
        "Ranks are not compared with each other, because some give no answer: they have no monitor, another model, or other options",
        "Create the monitor on every rank, with the same options, or name the ranks of one model by process_group=",
        repeats=1,
        warns=False,
        weight=20.0,
    ),
}
