"""Which of the values that somebody logs is the loss."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .keys import Key

_IS_LOSS = re.compile(r"(?:^|[/_.\s-])loss(?:[/_.](?:train|training|total|step|batch))*$", re.IGNORECASE)
_OF_EVALUATION = re.compile(r"(?:^|[/_.\s-])(?:val|valid|validation|eval|evaluation|test)(?:$|[/_.\s-])", re.IGNORECASE)
#: Words beside which a loss is that of the training and no part of it, as a penalty is.
_WHOLE = frozenset({"train", "training", "total", "step", "batch", "loss", ""})
#: Of what was logged by hand.
_BY_HAND = ""


def is_loss(key: Key) -> bool:
    """Whether it is logged by hand and has the name of a loss of the training, be it a part of it."""
    return key.source == _BY_HAND and bool(_IS_LOSS.search(key.name)) and not _OF_EVALUATION.search(key.name)


def loss_among(keys: Iterable[Key]) -> Key | None:
    """``loss``, ``train/loss``, ``loss/train`` or the like, the shortest such key, and ``kl_loss`` only where there is no other."""
    return min(filter(is_loss, keys), key=_partial, default=None)


def _partial(key: Key) -> tuple[bool, int, str]:
    """How far a loss is from being that of the whole training."""
    return not _WHOLE.issuperset(re.split(r"[/_.\s-]", key.name.lower())), len(key.name), key.name
