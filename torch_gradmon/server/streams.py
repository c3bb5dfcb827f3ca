"""Server-sent events: what is new, as soon as it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .board import Board, version

#: Seconds between two looks at a file, and after which a sign of life is sent.
LOOK, ALIVE = 0.3, 10.0
#: A comment, which pages ignore; sending it shows whether anybody still listens.
SIGN = ("", None)
Event = tuple[str, Any]


def of_run(board: Board, name: str, look: float = LOOK) -> Iterator[Event]:
    """The row of a run whenever it changes, until another run takes its place."""
    path = board.path(name)
    known: Any = None
    began: float | None = None  # of another run in the same directory it is another time
    sent = 0.0
    while path is not None:
        current = version(path)
        card = board.card(name)
        if card is not None and began is not None and card.began != began:
            yield "replaced", {}
            return
        began = began if card is None else card.began
        fresh = None if card is None else (current, card.state, card.findings)
        if card is not None and fresh != known:
            known, sent = fresh, time.monotonic()
            yield "card", {"version": current, "card": card.to_dict()}
        elif time.monotonic() - sent > ALIVE:
            sent = time.monotonic()
            yield SIGN
        else:
            time.sleep(look)


def of_all(board: Board, look: float = LOOK) -> Iterator[Event]:
    """The rows that have changed, all of them at first, and the names of runs that are gone."""
    known: dict[str, Any] = {}
    sent = 0.0
    while True:
        cards = {card.name: card for card in board.cards()}
        changed = [card.to_dict() for name, card in cards.items() if known.get(name) is not card]
        gone = [name for name in known if name not in cards]
        if changed or gone or not sent:
            known, sent = dict(cards), time.monotonic()
            yield "cards", {"cards": changed, "gone": gone}
        elif time.monotonic() - sent > ALIVE:
            sent = time.monotonic()
            yield SIGN
        time.sleep(look)


def written(events: Iterator[Event], as_json: Callable[[Any], str]) -> Iterator[bytes]:
    """The events as a browser reads them."""
    for kind, data in events:
        yield b": alive\n\n" if data is None else f"event: {kind}\ndata: {as_json(data)}\n\n".encode()
