"""Which logged value is the loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .keys import Key

#: The networks of a GAN, which have a loss each.
_NETWORK = "d|g|dis|disc|discriminator|gen|generator|critic"
_IS_LOSS = re.compile(rf"(?:^|[/_.\s-])loss(?:[/_.\s-](?:train|training|total|step|batch|{_NETWORK}))*$", re.IGNORECASE)
_OF_NETWORK = re.compile(rf"loss[/_.\s-](?:.*[/_.\s-])?(?:{_NETWORK})(?:$|[/_.\s-])", re.IGNORECASE)
_OF_EVALUATION = re.compile(r"(?:^|[/_.\s-])(?:val|valid|validation|eval|evaluation|test)(?:$|[/_.\s-])", re.IGNORECASE)
#: Other words in the name of a loss that make it a part of the training loss, such as a penalty, are not in this set.
_WHOLE = frozenset({"train", "training", "total", "step", "batch", "loss", ""})
#: The source of logged values.
_LOGGED = ""


def is_loss(key: Key) -> bool:
    """Whether it is a logged value with the name of a training loss, or of a part of one."""
    return key.source == _LOGGED and bool(_IS_LOSS.search(key.name)) and not _OF_EVALUATION.search(key.name)


def is_whole_loss(key: Key) -> bool:
    """Whether it is a logged value with the name of a whole training loss, such as ``loss`` or ``train/loss``."""
    return is_loss(key) and not _partial(key)[0]


def is_loss_of_network(key: Key) -> bool:
    """Whether it is the loss of one network of a GAN, such as ``loss_d``, which need not fall."""
    return is_loss(key) and bool(_OF_NETWORK.search(key.name))


def loss_among(keys: Iterable[Key]) -> Key | None:
    """The shortest key such as ``loss``, ``train/loss`` or ``loss/train``; a partial loss such as ``kl_loss`` only if there is no other."""
    return min(filter(is_loss, keys), key=_partial, default=None)


def loss_in(values: Mapping[Key, float]) -> float | None:
    """The loss among these values; None if there is none."""
    key = loss_among(values)
    return None if key is None else values[key]


def _partial(key: Key) -> tuple[bool, int, str]:
    """Sort key: partial losses last, then by length."""
    return not _WHOLE.issuperset(re.split(r"[/_.\s-]", key.name.lower())), len(key.name), key.name
