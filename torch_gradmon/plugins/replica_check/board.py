"""Where ranks leave what they have found: the key-value store of ``torch.distributed``.

No rank has to answer, so none can block another one; and no collective is added to those of the training, which a rank in another step
would mix up. A key is written again and again, so the store does not grow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...step.consensus import store_of

#: Number of boards by subject in this process: messages of an earlier training are not those of the next one.
_made: Counter[str] = Counter()


class Board:
    """Messages of each rank, by a name.

    Args:
        subject: the same on all ranks that share the board.
        rank: of this process.
        count: number of ranks.

    Raises:
        ImportError, RuntimeError, ValueError: there is no store.
    """

    def __init__(self, subject: str, rank: int, count: int) -> None:
        _made[subject] += 1
        self._store = store_of(f"torch_gradmon/replicas/{subject}/{_made[subject]}")
        self.rank, self.count = rank, count

    def put(self, name: str, message: Any) -> None:
        """Leave a message of this rank, which replaces an earlier one of that name."""
        self._store.set(f"{name}/{self.rank}", json.dumps(message))

    def read(self, name: str, ranks: Sequence[int], step: int) -> dict[int, Any] | None:
        """The messages of these ranks about ``step``; None while one is missing. Does not wait."""
        keys = [f"{name}/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return None
        many = getattr(self._store, "has_extended_api", bool)()
        found = [json.loads(raw) for raw in (self._store.multi_get(keys) if many else map(self._store.get, keys))]
        return dict(zip(ranks, found, strict=True)) if all(message["step"] == step for message in found) else None
