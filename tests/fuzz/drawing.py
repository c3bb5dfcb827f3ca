"""Draws programs from seeds."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

from . import asks, models, optimizers
from .program import Program
from .rules import excluded

#: The choices of each field besides the plainest, and how often one of them is taken.
CHOICES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "architecture": (0.85, tuple(name for name in models.ARCHITECTURES if name not in ("mlp", "single"))),
    "dropout": (0.3, (0.25,)),
    "checkpoint": (0.5, ("reentrant", "nonreentrant")),
    "dtype": (0.5, ("float64", "bfloat16", "autocast", "autocast_f16", "autocast_set")),
    "scaler": (0.3, (True,)),
    "surroundings": (
        0.25,
        ("anomaly", "deterministic", "default_float64", "saved_tensors", "device", "fast_path", "dispatch_mode", "function_mode"),
    ),
    "optimizer": (0.9, tuple(name for name in optimizers.OPTIMIZERS if name != "sgd")),
    "players": (0.3, ("halves", "turns", "gan", "in_backward")),
    "critic_steps": (0.2, (2,)),
    "wrapped": (0.15, ("lookahead", "holder")),
    "micro_batches": (0.3, (2, 3)),
    "unfinished": (0.3, (True,)),
    "edit": (
        0.6,
        (
            *("clip_norm", "clip_norm_loose", "clip_value", "by_hand", "scale", "replace", "noise"),
            *("data_neg", "data_flip", "data_clamp", "drop_one"),
        ),
    ),
    "edit_at": (0.35, ("hook_before", "hook_after")),
    "zero": (0.6, ("zeros_before", "none_after", "zeros_after", "never")),
    "scheduler": (0.25, ("cosine", "step")),
    "evaluation": (0.4, ("eval", "eval_grad", "train", "train_grad")),
    "trains_in_eval": (0.1, (True,)),
    "penalty": (0.15, ("graph", "look")),
    "twice": (0.12, ("same", "one")),
    "hooks": (0.25, ("gradient", "accumulated", "forward", "step")),
    "ema": (0.15, (True,)),
    "mistake": (0.12, ("step_twice", "clip_after_step", "zero_before_step", "clip_scaled", "clip_micro")),
    "preset": (0.7, ("none", "minimal", "full")),
    "layers": (0.35, ("blocks", "top", "all", "weight")),
    "every": (0.3, (2, 3)),
    "run_dir": (0.3, (True,)),
    "on_spike": (0.4, ("none", "function", "skip")),
    "flight_recorder": (0.15, (4,)),
    "post_spike_steps": (0.2, (0, 1)),
    "max_overhead": (0.08, (1e-9,)),
    "update_sample": (0.2, ("2", "weight")),
    "eps": (0.2, (0.0, 1e-3)),
    "style": (0.2, ("run1/", "metric_first")),
    "names": (0.15, ("renamed", r"\.0")),
    "hand": (0.2, ("attached", "alone")),
    "monitor_clips": (0.5, (True,)),
    "companion": (0.08, (True,)),
    "start_step": (0.3, (10, 7)),
    "poll": (0.3, ("sometimes", "never")),
}
#: Fields of which each member is taken by itself.
SEVERAL: dict[str, tuple[float, tuple[str, ...]]] = {
    "extras": (0.15, models.EXTRAS),
    "log": (0.25, ("start", "forward", "backward", "step", "late")),
    "metrics": (0.1, tuple(asks.GROUPS)),
    "sinks": (0.15, ("collecting", "failing", "jsonl")),
}
EVENTS = (
    *(
        "skip",
        "nan",
        "inf",
        "zero_otherwise",
        "freeze",
        "thaw",
        "reload",
        "save",
        "raise_forward",
        "raise_backward",
        "raise_closure",
    ),
    *("detach_attach", "detach_attach_mid", "leave", "resume", "detail_minimal", "detail_full", "phantom"),
)


def draw(seed: int) -> Program:
    """The program of a seed: choices that do not go together are taken back, as few as need be."""
    p, numbers = _drawn(seed), random.Random(seed)
    while why := excluded(p):
        simpler = plainer(p)
        numbers.shuffle(simpler)
        p = next((q for q in simpler if excluded(q) != why), simpler[0])
    return p


def plainer(p: Program) -> list[Program]:
    """The programs with one choice less."""
    found = []
    for field in fields(p):
        value = getattr(p, field.name)
        if value != field.default and field.name not in ("seed", "steps"):
            if value == "gan":
                found.append(replace(p, architecture="mlp", players="one"))
                continue
            fewer = [tuple(v for v in value if v != each) for each in value] if isinstance(value, tuple) else [field.default]
            found += [replace(p, **{field.name: each}) for each in fewer]
    return found


def _drawn(seed: int) -> Program:
    """Each field has numbers of its own, so that a new one changes no other."""

    def numbers(name: str) -> random.Random:
        return random.Random(f"{seed}/{name}")

    chosen: dict[str, Any] = {"seed": seed, "steps": numbers("steps").randint(4, 12)}
    for name, (chance, others) in CHOICES.items():
        if numbers(name).random() < chance:
            chosen[name] = numbers(f"{name} is").choice(others)
    for name, (chance, members) in SEVERAL.items():
        chosen[name] = tuple(each for each in members if numbers(f"{name}: {each}").random() < chance)
    if numbers("events").random() < 0.4:
        kinds = sorted(EVENTS, key=lambda kind: numbers(f"event: {kind}").random())[: numbers("number of events").randint(1, 2)]
        chosen["events"] = tuple(sorted((numbers(f"{kind} at").randrange(chosen["steps"]), kind) for kind in kinds))
    return Program(**_completed(chosen, numbers("completed")))


def _completed(chosen: dict[str, Any], numbers: random.Random) -> dict[str, Any]:
    """What some choices need to be of any use."""
    kinds = {kind for _, kind in chosen.get("events", ())}
    if "gan" in (chosen.get("players"), chosen.get("architecture")) or (chosen.get("critic_steps") and "players" not in chosen):
        chosen |= {"architecture": "gan", "players": "gan"}
    if chosen.get("checkpoint") and numbers.random() < 0.5:
        chosen["architecture"] = numbers.choice(("language", "residual"))
    if "raise_closure" in kinds:
        chosen["optimizer"] = numbers.choice(optimizers.BY_CLOSURE)
    if chosen.get("mistake") == "clip_scaled":
        chosen |= {"scaler": True, "edit": numbers.choice(("clip_norm", "clip_value", "by_hand"))}
    if "inf" in kinds or chosen.get("dtype") == "autocast_f16":
        chosen["scaler"] = True
    return chosen


def spread(count: int, among: int) -> list[int]:
    """Seeds of programs that together have every choice, and each as often as can be: the greedy cover."""
    parts = {seed: choices(draw(seed)) for seed in range(among)}
    seen: dict[Any, int] = {}
    chosen: list[int] = []
    for _ in range(count):
        left = [seed for seed in parts if seed not in chosen]
        chosen.append(max(left, key=lambda seed: sum(0.06 ** seen.get(part, 0) for part in parts[seed])))
        for part in parts[chosen[-1]]:
            seen[part] = seen.get(part, 0) + 1
    return sorted(chosen)


def choices(p: Program) -> list[tuple[str, Any]]:
    """What the program has of :func:`all_choices`."""
    found = {name: value for name, value in p.choices().items() if name not in ("seed", "steps", "events")}
    single = [(name, each) for name, value in found.items() for each in (value if isinstance(value, tuple) else (value,))]
    return single + [("events", kind) for _, kind in p.events]


def all_choices() -> set[tuple[str, Any]]:
    """Every choice that is not the plainest."""
    single = {(name, other) for name, (_, others) in CHOICES.items() for other in others}
    several = {name: members for name, (_, members) in SEVERAL.items()} | {"events": EVENTS}
    return single | {(name, each) for name, members in several.items() for each in members}
