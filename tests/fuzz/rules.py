"""What cannot go together in a program, and why; and features to choose programs by."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .edits import CLIPS, SCALINGS, UNSEEN
from .optimizers import BY_CLOSURE
from .program import Program
from .surroundings import SEEING

Predicate = Callable[[Program], bool]

_DENSE = ("adam", "adamw", "adamw_fused", "nesterov", "momentum", "rmsprop", "adafactor", "muon", "lbfgs", "sgd_fused")
_LOST = ("skip", "raise_backward")
_NARROW = ("bfloat16", "autocast", "autocast_set")
_HAS_NARROW_LSTM = torch.ops.mkldnn._is_mkldnn_bf16_supported()
FUSED = ("adamw_fused", "sgd_fused")


def _twice(p: Program, *groups: str) -> bool:
    return {*groups} <= {*p.metrics}


#: What torch cannot train, with a monitor or without.
OF_TORCH: list[tuple[str, Predicate]] = [
    ("scaler.step takes no closure", lambda p: p.scaler and p.optimizer in BY_CLOSURE),
    ("GradScaler has no kernel for these", lambda p: p.scaler and p.architecture in ("complex", "sparse")),
    ("sparse gradients are for few optimizers", lambda p: p.architecture == "sparse" and p.optimizer in _DENSE),
    (
        "no fused kernel for complex numbers",
        lambda p: p.architecture == "complex" and p.optimizer in (*FUSED, "muon", "adafactor"),
    ),
    ("complex numbers have no order", lambda p: p.architecture == "complex" and p.edit in ("clip_value", "data_clamp")),
    ("complex and narrow do not mix", lambda p: p.architecture == "complex" and (p.dtype == "bfloat16" or p.casts)),
    ("there is a gradient to clip by value", lambda p: p.edit == "clip_value" and p.mistake == "zero_before_step"),
    ("a penalty of complex gradients is no real loss", lambda p: p.penalty == "graph" and p.architecture == "complex"),
    ("a script takes no hook of Python", lambda p: "jit" in p.extras and p.has_event("raise_forward")),
    ("LBFGS views gradients as flat", lambda p: p.optimizer == "lbfgs" and p.architecture in ("odd", "complex", "sparse")),
    ("Muon came with torch 2.9", lambda p: p.optimizer == "muon" and not hasattr(torch.optim, "Muon")),
    ("Muon is for matrices alone", lambda p: p.optimizer == "muon" and (p.architecture in ("odd", "conv") or p.players != "one")),
    (
        "these do not take a parameter of no elements",
        lambda p: "empty" in p.extras and p.optimizer in ("adafactor", "muon", "lbfgs"),
    ),
    ("the kernel is not deterministic there", lambda p: p.optimizer == "sgd_fused" and p.dtype == "bfloat16"),
    ("a fused momentum that was made of some parameters", lambda p: p.optimizer == "sgd_fused" and p.edit == "drop_one"),
    (
        "a fused momentum whose first step is refused holds what was in memory",
        lambda p: p.optimizer == "sgd_fused" and p.scaler and any(at == 0 and kind in ("nan", "inf") for at, kind in p.events),
    ),
    ("no kernel of this width", lambda p: p.architecture == "recurrent" and p.dtype == "autocast_f16"),
    ("nor of this one without AVX-512", lambda p: p.architecture == "recurrent" and p.dtype in _NARROW and not _HAS_NARROW_LSTM),
    (
        "these have no second derivative",
        lambda p: p.penalty == "graph" and p.architecture in ("sparse", "recurrent", "language", "encoder"),
    ),
    (
        "checkpointing by re-entry allows no autograd.grad and no inputs",
        lambda p: bool(p.penalty or p.twice) and p.checkpoint == "reentrant",
    ),
    (
        "checkpointing by re-entry wants an input that needs a gradient",
        lambda p: p.checkpoint == "reentrant" and p.architecture == "language" and p.has_event("freeze"),
    ),
    ("a graph with checkpoints is not kept", lambda p: bool(p.twice) and bool(p.checkpoint)),
    ("anomalies raise", lambda p: p.surroundings == "anomaly" and p.has_event("nan", "inf")),
    ("no deterministic kernel", lambda p: p.surroundings == "deterministic" and p.architecture in ("sparse", "recurrent")),
    (
        "attention does not mix dtypes",
        lambda p: p.surroundings == "default_float64" and p.architecture in ("language", "encoder"),
    ),
    (
        "sparse tensors are not cloned by hooks",
        lambda p: p.surroundings == "saved_tensors" and bool(p.penalty or p.twice or p.checkpoint),
    ),
]

#: What this generator does not draw, since it would make no sense.
OF_SENSE: list[tuple[str, Predicate]] = [
    ("only these have blocks to recompute", lambda p: bool(p.checkpoint) and p.architecture not in ("language", "residual")),
    ("a GAN is an architecture and a way to train it", lambda p: (p.players == "gan") != (p.architecture == "gan")),
    ("a critic has its steps in a GAN", lambda p: p.critic_steps > 1 and p.players != "gan"),
    ("no extras inside of two players", lambda p: p.architecture == "gan" and bool(p.extras)),
    ("a closure is for one optimizer", lambda p: p.optimizer in BY_CLOSURE and (p.players != "one" or bool(p.mistake))),
    ("this loop unscales one optimizer after the other", lambda p: p.scaler and p.players in ("turns", "gan", "in_backward")),
    ("a wide loss is not scaled", lambda p: p.scaler and p.dtype == "float64"),
    ("a narrow one is", lambda p: p.dtype == "autocast_f16" and not p.scaler),
    (
        "most edits have no sparse kernel",
        lambda p: p.architecture == "sparse" and (bool(p.mistake) or p.edit in (*CLIPS, *UNSEEN, "noise")),
    ),
    ("an edit is at some place", lambda p: p.edit_at != "loop" and not p.edit),
    ("with a closure the hooks come before the gradients", lambda p: p.edit_at != "loop" and p.optimizer in BY_CLOSURE),
    (
        "clips inside of hooks are torch's",
        lambda p: p.monitor_clips and (not p.edit.startswith("clip_norm") or p.edit_at != "loop"),
    ),
    ("there is a window to leave unfinished", lambda p: p.unfinished and p.micro_batches == 1),
    ("an infinite loss is for a scaler", lambda p: p.has_event("inf") and not p.scaler),
    ("a step by closure is not skipped", lambda p: p.has_event(*_LOST) and p.optimizer in BY_CLOSURE),
    ("closures raise where there are any", lambda p: p.has_event("raise_closure") and p.optimizer not in BY_CLOSURE),
    ("a scaler wants a step before its update", lambda p: p.has_event(*_LOST) and p.scaler),
    (
        "players do not skip",
        lambda p: p.has_event(*_LOST, "raise_forward", "freeze") and p.players in ("turns", "gan", "in_backward"),
    ),
    ("in backward there is no time for anything else", lambda p: p.players == "in_backward" and _is_rich(p)),
    (
        "a wrapper is around one plain optimizer",
        lambda p: bool(p.wrapped) and (p.optimizer in BY_CLOSURE or p.scaler or p.players == "in_backward"),
    ),
    ("no hook doubles a sparse gradient", lambda p: p.hooks == "gradient" and p.architecture == "sparse"),
    ("a mistake is in a plain loop", lambda p: bool(p.mistake) and (p.players != "one" or bool(p.hand) or p.has_event(*_LOST))),
    (
        "scaled or not",
        lambda p: (
            (p.mistake == "clip_scaled" and not (p.scaler and p.edit in CLIPS))
            or (p.mistake in ("step_twice", "zero_before_step") and p.scaler)
        ),
    ),
    ("what is clipped while it is scaled has a loop to do it", lambda p: p.mistake == "clip_scaled" and p.edit_at != "loop"),
]

#: What the contract does not speak of.
OF_CONTRACT: list[tuple[str, Predicate]] = [
    ("by hand the monitor is told of one optimizer", lambda p: p.hand == "alone" and p.players != "one"),
    ("by hand nobody sees an optimizer raise", lambda p: p.hand == "alone" and p.has_event("raise_closure")),
    ("by hand one measures what one knows of", lambda p: p.hand == "alone" and p.edit_at != "loop"),
    (
        "by hand one does not see these",
        lambda p: p.hand == "alone" and bool({"local", "update", "update_function", "optimizer"} & {*p.metrics}),
    ),
    ("by hand a scaler is named", lambda p: p.hand == "alone" and p.scaler),
    (
        "a step that is begun by hand is not cut",
        lambda p: (
            bool(p.hand)
            and p.has_event("detach_attach", "detach_attach_mid", "leave", "resume", "detail_minimal", "detail_full", "phantom")
        ),
    ),
    ("one number begins the run", lambda p: bool(p.start_step) and (p.hand == "alone" or p.has_event("resume"))),
    (
        "of micro-batches that are thrown away nothing is promised",
        lambda p: (
            "local" in p.metrics
            and (p.players in ("turns", "gan") or p.has_event(*_LOST, "raise_closure") or p.optimizer == "lbfgs")
        ),
    ),
    (
        "a metric is asked for once",
        lambda p: _twice(p, "gradient", "gradient_some") or _twice(p, "activation", "activation_some"),
    ),
    (
        "of a model that is called by its parts the forward is not seen",
        lambda p: p.players == "gan" and bool({"start", "step", "late"} & {*p.log}),
    ),
    ("a preset or nothing shows", lambda p: p.preset == "none" and not p.metrics and not p.layers),
    (
        "a value for a step that went out with detach() is too late for sinks",
        lambda p: "start" in p.log and bool(p.sinks) and p.has_event("detach_attach", "detach_attach_mid", "leave"),
    ),
    (
        "a group of nothing that steps in backward",
        lambda p: p.players == "in_backward" and "empty" in p.extras and bool(p.layers),
    ),
    ("two who measure every step save nothing", lambda p: bool(p.max_overhead) and bool(p.flight_recorder)),
    (
        "a script in a reference takes no hooks",
        lambda p: "jit" in p.extras and bool({"difference", "coordinates"} & {*p.metrics}),
    ),
    (
        "a new monitor has another reference",
        lambda p: p.has_event("resume") and bool({"difference", "coordinates"} & {*p.metrics}),
    ),
    ("a name is matched as it is shown", lambda p: p.names == "renamed" and "activation_some" in p.metrics),
    ("calls are counted in forwards of the root", lambda p: p.players == "gan" and bool({"split", "coordinates"} & {*p.metrics})),
    ("layers that are excluded", lambda p: p.names not in ("", "renamed") and bool(p.layers)),
    ("NaN is never accepted", lambda p: p.on_spike == "skip" and p.has_event("nan", "inf")),
    (
        "an actor must know the optimizers, and their preset",
        lambda p: (
            p.on_spike == "skip" and (bool(p.hand) or p.preset == "none" or p.optimizer == "lbfgs" or p.has_event("resume"))
        ),
    ),
    ("a model with the recorder's hooks is not saved, nor is a script", lambda p: p.has_event("save") and "jit" in p.extras),
    (
        "one change at a time",
        lambda p: p.has_event("detail_minimal", "detail_full") and (len(p.events) > 1 or bool(p.max_overhead)),
    ),
    ("what is seen by modes is seen of the recorder too", lambda p: p.surroundings in SEEING and bool(p.max_overhead)),
]

RULES = [*OF_TORCH, *OF_SENSE, *OF_CONTRACT]


def _is_rich(p: Program) -> bool:
    plain = p.micro_batches == 1 and not (p.edit or p.scaler or p.twice or p.penalty or p.mistake or p.hooks or p.hand)
    return (
        not plain
        or p.checkpoint == "reentrant"
        or p.optimizer in (*BY_CLOSURE, "muon")
        or p.architecture in ("sparse", "language")
    )


def _is_unfinished(p: Program) -> bool:
    leaves = p.has_event("detach_attach", "leave", "resume")
    looks = p.evaluation == "train_grad" and (p.steps % 2 == 1 or leaves)
    return p.has_event("phantom") or p.ends_with(*_LOST) or looks or (p.has_event(*_LOST) and leaves)


#: Features of programs by which ``--only`` chooses some.
FEATURES: dict[str, Predicate] = {
    "hook after watch": lambda p: p.edit_at == "hook_after",
    "layers alone": lambda p: bool(p.layers) and p.preset == "none",
    "frozen in mid-run": lambda p: p.has_event("freeze"),
    "edits with the same sums": lambda p: p.edit in UNSEEN,
    "clamp of NaN": lambda p: p.edit == "data_clamp" and p.has_event("nan", "inf"),
    "trains in eval mode": lambda p: p.trains_in_eval,
    "autocast without a context": lambda p: p.dtype == "autocast_set",
    "seen by modes": lambda p: p.surroundings in ("dispatch_mode", "function_mode"),
    "the fast path of encoders": lambda p: p.surroundings == "fast_path" and p.architecture == "encoder",
    "layers and metrics in a run directory": lambda p: p.run_dir and bool(p.layers) and "gradient_some" in p.metrics,
    "a wrapping optimizer": lambda p: p.wrapped == "lookahead",
    "detached in mid-step": lambda p: p.has_event("detach_attach_mid"),
    "unfinished": lambda p: _is_unfinished(p),
    "scaled by a factor": lambda p: p.edit in SCALINGS,
    "jit": lambda p: "jit" in p.extras,
    "autograd.grad": lambda p: bool(p.penalty),
    "a sink that raises": lambda p: "failing" in p.sinks,
    "in backward": lambda p: p.players == "in_backward",
    "saved whole": lambda p: p.has_event("save"),
    "not finite": lambda p: p.has_event("nan"),
    "data edits under a scaler": lambda p: p.scaler and p.edit.startswith("data_"),
    "log of parts": lambda p: p.players == "gan" and bool(p.log),
    "difference of parts": lambda p: p.players == "gan" and "difference" in p.metrics,
    "attention under full": lambda p: (
        (p.preset == "full" or p.has_event("detail_full")) and p.architecture in ("language", "encoder")
    ),
    "dropped gradients": lambda p: p.edit == "drop_one" or p.mistake == "zero_before_step",
    "clip of both players": lambda p: p.monitor_clips and p.players in ("gan", "turns"),
    "state of a kind": lambda p: "optimizer" in p.metrics,
    "top of some": lambda p: (
        p.preset == "none"
        and p.poll != "never"
        and ("gradient_some" in p.metrics or ("gradient" in p.metrics and p.names not in ("", "renamed")))
    ),
    "a closure that raises": lambda p: p.has_event("raise_closure"),
    "clipped twice": lambda p: p.monitor_clips and p.mistake in ("clip_micro", "zero_before_step"),
    "scaled and nobody's": lambda p: p.scaler and p.optimizer == "muon",
    "missing after a live change": lambda p: p.has_event("detail_minimal", "detail_full"),
    "logged when it is away": lambda p: p.has_event("leave", "detach_attach", "detach_attach_mid", "resume") and bool(p.log),
}


def excluded(p: Program) -> str:
    """The rule that excludes this program, or nothing."""
    return next((why for why, applies in RULES if applies(p)), "")
