"""The arguments of the callback for Lightning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..core import validation as check
from ..core.errors import display
from .common import whole_model_names

#: The default prefixes of the values of a step and of an epoch.
SECTION, EPOCH = "gradmon/", "gradmon_epoch/"


class CallbackOptions(NamedTuple):
    """The arguments of ``GradMonCallback`` for Lightning, which explains them."""

    log_every: int | None
    track_epochs: bool
    summary: Collection[str]
    prog_bar: Collection[str]
    threshold: float | None
    step_prefix: str
    epoch_prefix: str

    def check(self) -> None:
        """Refuse wrong arguments.

        Raises:
            TypeError, ValueError: with the value and the remedy.
        """
        if self.log_every is not None:
            check.step_number("log_every_n_steps", self.log_every)
        if self.threshold is not None:
            if not isinstance(self.threshold, (int, float)) or isinstance(self.threshold, bool):
                raise TypeError(f"explosion_threshold must be a number, such as 1e4, or None, got {display(self.threshold)}")
            if not self.threshold > 0:
                raise ValueError(f"explosion_threshold={self.threshold!r} must be positive, such as 1e4, or None")
        check.flag(track_epochs=self.track_epochs)
        whole_model_names("summary", self.summary)
        whole_model_names("prog_bar", self.prog_bar)
        for name in ("step_prefix", "epoch_prefix"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a str, such as 'train/', got {display(getattr(self, name))}")

    def state_suffix(self, prefix: str) -> str:
        """Distinguishes the states of several callbacks in a checkpoint: the prefixes that are not the default."""
        prefixes = (
            ("prefix", prefix, ""),
            ("step_prefix", self.step_prefix, SECTION),
            ("epoch_prefix", self.epoch_prefix, EPOCH),
        )
        return "".join(f" {name}={given!r}" for name, given, default in prefixes if given != default)

    def explosion(self, values: Mapping[str, float], step: int) -> str:
        """A warning if the gradient norm is above the threshold or not finite; empty otherwise."""
        norm = next((value for key, value in values.items() if key.endswith(f"{SECTION}grad_norm")), 0.0)
        if self.threshold is None or norm <= self.threshold:
            return ""
        return f"step {step}: the gradient norm before clipping is {norm:.4g}, above explosion_threshold={self.threshold:g}"
