"""Sampling of steps: a loop without findings for a long time is audited only in some of its steps."""

from __future__ import annotations

#: The number of consecutive steps without a finding after which a loop is trusted.
TRUSTED = 300
#: A trusted loop alternates between skipped and audited steps, with enough audited ones for any mistake to become a fact.
RESTED, LOOKED = 48, 16
#: Each pause is twice as long as the one before, and shorter than three quarters of the clean steps until then, up to this many steps.
MOST_RESTED = 16 * RESTED


class Rest:
    """Counts steps.

    Attributes:
        is_on: whether the next step is skipped.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._begin()

    def _begin(self) -> None:
        self._clean, self._until, self._length = 0, TRUSTED, RESTED

    @property
    def left(self) -> int:
        """The number of steps until the pause ends."""
        return self._until - self._clean if self.is_on else 0

    def missed(self, steps: int) -> None:
        """Count ``steps`` steps of the pause, fewer than are left."""
        self._clean += steps

    def step_ended(self, is_clean: bool) -> bool:
        """Count a step, ``is_clean`` if it has no finding. Returns whether a pause begins or ends here."""
        was = self.is_on
        if not is_clean:
            self.is_on = False
            self._begin()
            return was
        self._clean += 1
        if self._clean == self._until:
            self.is_on = not was
            self._until += self._length if self.is_on else LOOKED
            if was:
                self._length = min(2 * self._length, MOST_RESTED)
        return self.is_on != was
