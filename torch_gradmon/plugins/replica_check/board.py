"""Where ranks leave their messages: the key-value store of ``torch.distributed``.

No rank has to answer, so none can block another one; and no collective is added to those of the training, which a rank in another step
would mix up. A key is written again and again, so within a training the memory of a server does not grow; each training has keys
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...step.exchange import BoundedStore


class Board:
    """Messages of each rank, by a name.

    Args:
        subject: the same on all ranks that share the board.
        rank: of this process among them.
        count: their number.

    Raises:
        ImportError, RuntimeError, ValueError: there is no store, or none that can be used beside the training.
        TimeoutError: the store did not answer in time. So does each method; RuntimeError, if the connection is lost.
    """

    def __init__(self, subject: str, rank: int, count: int) -> None:
        self._store = BoundedStore(f"torch_gradmon/replicas/{subject}")
        self._store.call("add", "made", 1)
        self._training = 0
        self._counted: set[str] = set()  # names of the messages that this rank has left in this training
        self.rank, self.count = rank, count

    def has_changed(self) -> bool:
        """Whether a rank has made a board for the subject since this was asked last, so that messages have to be left again.

        They are kept apart by the number of boards that all ranks have made: those of an earlier training are not read.
        """
        before, self._training = self._training, self._store.call("add", "made", 0)
        if self._training != before:
            self._counted.clear()
        return self._training != before

    def put(self, name: str, message: Any) -> None:
        """Leave a message of this rank, which replaces an earlier one of that name."""
        self._store.call("set", self._key(name, self.rank), json.dumps(message))
        if name not in self._counted:
            self._counted.add(name)
            self._store.call("add", f"{self._training}/{name}/here", 1)

    def silent(self, name: str) -> tuple[int, int]:
        """How many ranks have left no message of that name in this training, and the first of them. One request, and log2 if any."""
        missing = self.count - self._store.call("add", f"{self._training}/{name}/here", 0)
        keys = [self._key(name, rank) for rank in range(self.count)]
        return (missing, self._store.first_absent(keys)) if missing > 0 else (0, -1)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._training}/{name}/{rank}"

    def read(self, name: str, ranks: Sequence[int], step: int) -> dict[int, Any] | None:
        """The messages of these ranks about ``step``; None while one is missing. Does not wait."""
        keys = [self._key(name, rank) for rank in ranks]
        if not self._store.call("check", keys):
            return None
        found = [json.loads(raw) for raw in self._store.values(keys)]
        return dict(zip(ranks, found, strict=True)) if all(message["step"] == step for message in found) else None
