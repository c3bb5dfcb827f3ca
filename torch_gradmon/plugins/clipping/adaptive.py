"""Clips whose limit adapts to the gradients.

The state of a clip stays on the device of the gradients, in float64 if the device supports it. The device takes the decisions,
so nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class DeviceValue(NamedTuple):
    """A 0-d value of the step and its name under ``gradmon/``. ``there``: whether it exists; None if it adds up over calls."""

    name: str
    value: Tensor
    there: Tensor | None = None


class AdaptiveClip:
    """The alternative to a number in ``ModuleMonitor.clip_grad_norm_(max_norm=...)``."""

    def factors(self, rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[DeviceValue]]:
        """Factors for the gradients, at most 1. Updates the state. Does not synchronise.

        Args:
            rows: statistics of the gradients, ``[n, 8]``. Only counts and sums of squares are used. A row is zero where a
                parameter has no gradient.
            names: names of the parameters.

        Returns:
            One 0-d factor for all gradients or factors ``[n]``, and the values to report with the step.
        """
        raise NotImplementedError

    def kept(self) -> Any:
        """The state so far, for :meth:`put_back`. Does not synchronise."""
        raise NotImplementedError

    def put_back(self, kept: Any) -> None:
        """Restore the state ``kept`` after a skipped step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers. Synchronises with the device."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, bit for bit.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is invalid; nothing is loaded.
        """
        raise NotImplementedError
