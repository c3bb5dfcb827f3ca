"""Who writes to a gradient in place between two looks: one who clears it, or one who clips it. Told by its values, a few times."""

from __future__ import annotations

from torch import Tensor

from .probe import Probe

#: So many times it is looked at.
_LOOKS = 3
#: and so many times until zeros, which a gradient may be by itself, are somebody's who clears it.
_DOUBTS = 9


class Writes:
    """Of one optimizer.

    Attributes:
        is_curious: whether somebody has written between two accumulations, and it is not known who.
        clears: whether that sets gradients to zero; False as long as it is not known.
        clips: whether it does not.
        is_doubtful: whether gradients seem to be carried over from step to step, and their values have to confirm it.
        stays: whether they do.
    """

    def __init__(self) -> None:
        self.is_curious = self.clears = self.clips = False
        self.is_doubtful = self.stays = False
        self._zeros = self._others = self._late = self._doubts = 0

    def begin(self) -> bool:
        """Somebody has written; whether somebody is to look from now on."""
        begins = not (self.is_curious or self.clears or self.clips)
        self.is_curious |= begins
        return begins

    def look(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """What the gradient is just before another one is added. Synchronises, but for where nobody has written."""
        gradient = parameter.grad
        if not self.is_curious or gradient is None or gradient is not probe.gradient:
            return
        if not probe.fired or gradient._version == probe.version or incoming is None:
            return
        if not bool(incoming.any()):  # where all is zero anyway, nothing is told by it
            return
        if bool(gradient.any()):
            self._others += 1
        else:
            self._zeros += 1
        if self._others + self._zeros >= _LOOKS:
            self.is_curious = False
            self.clears = self._zeros > self._others
            self.clips = not self.clears

    def look_at_carried(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """Whether what looks like the gradient of the step before is still that: ``.data.zero_()`` counts no version. Synchronises."""
        gradient = parameter.grad
        if not self.is_doubtful or probe.fired or not probe.after_step or gradient is None or gradient is not probe.gradient:
            return
        if gradient._version != probe.version or incoming is None:
            return
        self._doubts += 1
        self.stays = bool(gradient.any())
        self.is_doubtful = not self.stays and self._doubts < _DOUBTS

    def doubt(self) -> bool:
        """A gradient was carried over, by its version; whether somebody is to look at its values from now on."""
        begins = not (self.is_doubtful or self.stays or self._doubts)
        self.is_doubtful |= begins
        return begins

    def is_late_clip(self, dropped: Tensor) -> bool:
        """Whether a gradient that was written to behind its step, and dropped, is more than zeros. Synchronises a few times."""
        if self._late >= _LOOKS:
            return True
        if bool(dropped.any()):
            self._late += 1
            return True
        self._late = 0
        return False
