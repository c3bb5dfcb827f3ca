"""Sampling of steps: a loop without findings for a long time is audited only in some of its steps."""

from __future__ import annotations

#: The number of consecutive steps without a finding after which a loop is trusted.
TRUSTED = 300
#: A trusted loop alternates between skipped and audited steps, with enough audited ones for any mistake to become a fact.
RESTED, LOOKED = 48, 16


class Rest:
    """Counts steps.

    Attributes:
        is_on: whether the next step is skipped.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._clean = 0

    @property
    def left(self) -> int:
        """The number of steps until the pause ends."""
        return RESTED - (self._clean - TRUSTED) % (RESTED + LOOKED) if self.is_on else 0

    def missed(self, steps: int) -> None:
        """Count ``steps`` steps of the pause, fewer than are left."""
        self._clean += steps

    def step_ended(self, is_clean: bool) -> bool:
        """Count a step, ``is_clean`` if it has no finding. Returns whether a pause begins or ends here."""
        self._clean = self._clean + 1 if is_clean else 0
        was, trusted = self.is_on, self._clean - TRUSTED
        self.is_on = trusted >= 0 and trusted % (RESTED + LOOKED) < RESTED
        return was != self.is_on
