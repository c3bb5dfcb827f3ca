"""A loop in which nothing was seen for long is looked at in some of its steps only."""

from __future__ import annotations

#: Steps in a row in which there was nothing to say, from which on a loop is taken to be what it seems.
TRUSTED = 300
#: From there on, in turns: so many steps that are not looked at, and so many that are, enough for any mistake to be a fact.
RESTED, LOOKED = 48, 16


class Rest:
    """Counts steps.

    Attributes:
        is_on: whether the next step is not looked at.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._clean = 0

    def step_ended(self, is_clean: bool) -> bool:
        """Take note of a step, ``is_clean`` if there was nothing to say of it; whether a rest begins or ends here."""
        self._clean = self._clean + 1 if is_clean else 0
        was, trusted = self.is_on, self._clean - TRUSTED
        self.is_on = trusted >= 0 and trusted % (RESTED + LOOKED) < RESTED
        return was != self.is_on
