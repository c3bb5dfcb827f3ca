"""A training program as plain data: what trains, how, under which monitor. The defaults are the plainest choice of each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Program:
    """One program. ``seed`` seeds weights and data; everything else is a choice of :mod:`tests.fuzz.drawing`."""

    seed: int = 0
    steps: int = 5
    # what trains
    architecture: str = "mlp"
    extras: tuple[str, ...] = ()  # of models.EXTRAS
    dropout: float = 0.0
    checkpoint: str = ""  # "reentrant" or "nonreentrant"
    dtype: str = "float32"  # also "autocast", "autocast_f16" and "autocast_set", without its context manager
    scaler: bool = False
    surroundings: str = ""  # what is switched on around the loop
    # what steps
    optimizer: str = "sgd"
    players: str = (
        "one"  # "halves": two optimizers of one loss; "turns": two losses; "gan"; "in_backward": one for each parameter
    )
    critic_steps: int = 1
    wrapped: str = ""  # an optimizer around the optimizer
    # the loop
    micro_batches: int = 1
    unfinished: bool = False  # the last window of accumulation is left incomplete
    edit: str = ""  # of the gradients, between backward and step
    edit_at: str = "loop"  # or in a step pre-hook registered "hook_before" or "hook_after" watch
    zero: str = "none_before"  # set to None or to zero, before the forward or after the step; or "never"
    scheduler: str = ""
    evaluation: str = ""  # between two steps
    log: tuple[str, ...] = ()  # when the loss is logged
    trains_in_eval: bool = False
    penalty: str = ""  # a gradient penalty by autograd.grad: part of the loss, or only looked at
    twice: str = ""  # a second backward pass of the same loss, to all parameters or to one
    hooks: str = ""  # of the user
    ema: bool = False
    events: tuple[tuple[int, str], ...] = ()  # what happens in single iterations
    mistake: str = ""  # of the loop, in every iteration
    # the monitor
    preset: str = "standard"
    layers: str = ""
    every: int = 1
    metrics: tuple[str, ...] = ()  # groups of asks.GROUPS
    run_dir: bool = False
    sinks: tuple[str, ...] = ()
    on_spike: str = "warn"
    flight_recorder: int = 0
    post_spike_steps: int = 3
    max_overhead: float = 0.0
    update_sample: str = ""
    eps: float = 1e-8
    style: str = ""  # of keys: a prefix, or "metric_first"
    names: str = ""  # "renamed", or a pattern of names to exclude
    hand: str = ""  # steps begun and ended by hand, "attached" or "alone"
    monitor_clips: bool = False  # monitor.clip_grad_norm_ in the place of torch's
    companion: bool = False  # a second monitor on the same model
    start_step: int = 0
    poll: str = "always"  # when values are read

    @property
    def attached(self) -> bool:
        """Whether hooks on optimizers follow the loop."""
        return self.hand != "alone"

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return self.dtype.startswith("autocast")

    def has_event(self, *kinds: str) -> bool:
        """Whether any of these happens in some iteration."""
        return any(kind in kinds for _, kind in self.events)

    def ends_with(self, *kinds: str) -> bool:
        """Whether any of these happens in the last iteration."""
        return any(at == self.steps - 1 and kind in kinds for at, kind in self.events)

    def name(self, name: str) -> str:
        """What the keys call a parameter or module."""
        return name.replace("body", "net") if self.names == "renamed" else name

    def choices(self) -> dict[str, Any]:
        """What is not the plainest choice."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def __str__(self) -> str:
        return f"Program({', '.join(f'{name}={value!r}' for name, value in self.choices().items())})"
