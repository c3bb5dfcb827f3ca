"""Whether all ranks take part in an exchange. No rank has to answer, so none can block the others."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from ..core.compat import second_connection
from .ranks import Ranks

#: Seconds that a rank waits for the others; usually milliseconds, since all come from the same backward pass.
PATIENCE = 20.0
_PAUSE = 0.005


class Rendezvous:
    """Meets the other ranks in the key-value store of ``torch.distributed``.

    Args:
        ranks: those that should meet.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def on(self, what: str) -> bool:
        """Whether every rank has called this with the same ``what``, equally often. The answer is the same on all ranks.

        The first rank to know stores the answer, and no other rank can replace it: either one that saw all arrive, or one whose patience
        has ended. A rank that arrives after a timeout takes part in the next attempt.
        """
        _asked[what] += 1
        try:
            store = store_of(f"torch_gradmon/{what}/{_asked[what]}")
        except (ImportError, RuntimeError, ValueError):  # a private API, and some backends have no store
            return True
        while store.check(["answer"]) and store.get("answer") == b"no":
            _asked[what] += 1
            store = store_of(f"torch_gradmon/{what}/{_asked[what]}")
        store.add("here", 1)
        until = time.monotonic() + PATIENCE
        while store.add("here", 0) < self._ranks.count and not store.check(["answer"]):
            if time.monotonic() > until:
                return bool(store.compare_set("answer", "", "no") == b"yes")
            time.sleep(_PAUSE)
        return bool(store.compare_set("answer", "", "yes") == b"yes")


#: Number of attempts by subject, in this process.
_asked: Counter[str] = Counter()


def store_of(prefix: str, connected_anew: bool = False) -> Any:
    """The key-value store of ``torch.distributed``, below ``prefix``; ``connected_anew``: with a connection of its own.

    Raises:
        ImportError, RuntimeError, ValueError: a private name is gone, or there is no store, or none that can be connected.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = _get_default_store()
    return PrefixStore(prefix, second_connection(store) if connected_anew else store)
