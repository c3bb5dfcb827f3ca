"""Which whole-model values are shown or needed, and which statistics of tensors that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core import keys as n
from ..core.moments import ALL_COLUMNS, VIEWS, Column
from .gradient_summary import DISTRIBUTION
from .micro_batches import DOCUMENTATION as BATCHES
from .summary_keys import DOCUMENTATION, UPDATE_EVERY, UPDATE_KEYS


class SummaryChoice:
    """The whole-model values of one monitor: those of a preset, others that were added, and those that detectors need.

    Args:
        keys: names in :data:`DOCUMENTATION`.
        all_columns: measure every statistic of the gradients, and of the rest on every tenth step, for a run directory.
        of_layers: the needs of per-layer values, see :attr:`LayerSelection.needs`.
    """

    def __init__(
        self, keys: Iterable[str] = (), all_columns: bool = False, of_layers: Mapping[str, frozenset[Column]] | None = None
    ) -> None:
        self._keys = tuple(keys)
        self._instead: tuple[str, ...] | None = None
        self._more: tuple[str, ...] = ()
        self._signals: set[str] = set()
        self._all_columns, self._with_batches = all_columns, False
        self._of_layers = dict(of_layers or {})

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of a preset's values: the script's, or those of an override."""
        return self._keys if self._instead is None else self._instead

    def use(self, keys: Iterable[str]) -> None:
        """Show the values of a preset."""
        self._keys = tuple(keys)

    def add(self, name: str) -> None:
        """Show one more value.

        Raises:
            ValueError: it was added before.
        """
        if name in self._more:
            raise ValueError(f"the whole-model value {name!r} was added already")
        self._more = (*self._more, name)

    def add_batches(self) -> None:
        """Show values of the gradients of micro-batches."""
        self._with_batches = True

    def require(self, *signals: str) -> None:
        """Compute these values in any case, because a detector or a decision needs them."""
        self._signals.update(signals)

    def store_all_columns(self) -> None:
        """Measure every statistic of the gradients, and of the rest on every tenth step."""
        self._all_columns = True

    def override_keys(self, keys: Iterable[str] | None) -> None:
        """Override the names of the script's preset with ``keys``; None restores them."""
        self._instead = None if keys is None else tuple(keys)

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of all requested values."""
        asked_for = (*self.keys, *(name for name in self._more if name not in self.keys))
        return asked_for if not self._with_batches else (*asked_for, *BATCHES)

    @property
    def wanted(self) -> set[str]:
        """The names of shown values and those that detectors need."""
        return self._signals.union(self.keys, self._more).intersection(DOCUMENTATION)

    @property
    def update_every(self) -> int:
        """The interval of steps that measure updates: 1 if a detector needs them."""
        return 1 if not self._signals.isdisjoint(UPDATE_KEYS) else UPDATE_EVERY

    def needs_of_gradients(self) -> dict[str, frozenset[Column]]:
        """The statistics of gradients that all values need, by source."""
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        views = ["max", *(view for name, view in DISTRIBUTION.items() if name in self.wanted)]
        return {
            n.GRADIENT_BEFORE_CLIP: ALL_COLUMNS if self._all_columns else square.union(*(VIEWS[view].columns for view in views)),
            # sums and squares show a run directory that gradients are unchanged, so it stores them once
            n.GRADIENT: square | {Column.SUM} if self._all_columns else square,
        }

    def needs(self, step: int) -> dict[str, frozenset[Column]]:
        """The statistics that the next values need, by source, for all trainable parameters."""
        wanted, needs = self.wanted, dict(self._of_layers)
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        if wanted or self._with_batches:
            needs |= self.needs_of_gradients()
        if self._with_batches:
            needs[n.GRADIENT_LOCAL] = square
        update_step = step % self.update_every == 0
        if "param_norm" in wanted:
            needs[n.PARAMETER] = square
        if update_step and not wanted.isdisjoint(UPDATE_KEYS):
            needs[n.UPDATE] = square
        if self._all_columns:
            stored = (n.PARAMETER, n.UPDATE, n.GRADIENT_BEFORE_CLIP) if update_step else (n.GRADIENT_BEFORE_CLIP,)
            needs.update({source: ALL_COLUMNS for source in stored if source in needs})
        return needs
