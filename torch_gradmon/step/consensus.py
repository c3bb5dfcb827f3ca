"""Whether all ranks take part in something: asked where nobody has to answer, so that nobody hangs who was left alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from .ranks import Ranks

#: Seconds that a rank waits for the others. They come out of the same backward pass, so that milliseconds are usual.
PATIENCE = 20.0
_PAUSE = 0.005


class Rendezvous:
    """Asks through the key-value store by which the processes of ``torch.distributed`` have found each other.

    Args:
        ranks: those that are asked.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def on(self, what: str) -> bool:
        """Whether every rank has come here with the same ``what``, and as often: the same answer on each rank that asks.

        The first to know writes the answer down, and nobody can write another: either one who saw all come, or one whose
        patience has ended. Who comes to a question that was given up asks the next one.
        """
        _asked[what] += 1
        try:
            store = _store(f"torch_gradmon/{what}/{_asked[what]}")
        except (ImportError, RuntimeError, ValueError):  # it is private, and some backends have none: then nobody can be asked
            return True
        while store.check(["answer"]) and store.get("answer") == b"no":
            _asked[what] += 1
            store = _store(f"torch_gradmon/{what}/{_asked[what]}")
        store.add("here", 1)
        until = time.monotonic() + PATIENCE
        while store.add("here", 0) < self._ranks.count and not store.check(["answer"]):
            if time.monotonic() > until:
                return bool(store.compare_set("answer", "", "no") == b"yes")
            time.sleep(_PAUSE)
        return bool(store.compare_set("answer", "", "yes") == b"yes")


#: How often each thing was asked in this process.
_asked: Counter[str] = Counter()


def _store(prefix: str) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())
