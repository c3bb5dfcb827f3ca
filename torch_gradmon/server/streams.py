"""Server-sent events: what is new, as soon as it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ..analysis.many_runs.card import RunCard
from ..runs.format import version
from .board import RunBoard

#: Seconds between two looks at a file, and after which a row is sent again: its age has changed, and sending it shows whether the page is
#: still open.
LOOK, ALIVE = 0.3, 10.0
#: A comment, which pages ignore.
SIGN = ("", None)
Event = tuple[str, Any]


def of_run(board: RunBoard, name: str, look: float = LOOK) -> Iterator[Event]:
    """The row of a run whenever it changes, until another run takes its place."""
    path = board.path(name)
    known: Any = None
    began: float | None = None  # of another run in the same directory it is another time
    sent = 0.0
    while path is not None:
        card, now = board.card(name), time.monotonic()
        if card is not None and began is not None and card.began != began:
            yield "replaced", {}
            return
        began = began if card is None else card.began
        fresh = None if card is None else _state(card)
        if fresh != known or now - sent > ALIVE:
            known, sent = fresh, now
            yield ("gone", {}) if card is None else ("card", {"version": version(path), "card": card.to_dict()})
        else:
            time.sleep(look)


def of_all(board: RunBoard, look: float = LOOK) -> Iterator[Event]:
    """The rows that have changed, and the names of runs that are gone; at first all of them, which is marked."""
    known: dict[str, Any] = {}
    sent: float | None = None
    while True:
        cards = {card.name: card for card in board.cards()}
        states = {name: _state(card) for name, card in cards.items()}
        changed = [cards[name].to_dict() for name, state in states.items() if known.get(name) != state]
        gone = [name for name in known if name not in states]
        if changed or gone or sent is None:
            yield "cards", {"cards": changed, "gone": gone, "all": sent is None}
            known, sent = states, time.monotonic()
        elif time.monotonic() - sent > ALIVE:
            sent = time.monotonic()
            yield SIGN
        time.sleep(look)


def _state(card: RunCard) -> Any:
    """What a page has to know at once; the age of the last step is not."""
    return card.step, card.steps, card.state, card.began, card.spikes, card.is_diagnosed, tuple(card.findings), card.loss


def written(events: Iterator[Event], as_json: Callable[[Any], str]) -> Iterator[bytes]:
    """The events as a browser reads them."""
    for kind, data in events:
        yield b": alive\n\n" if data is None else f"event: {kind}\ndata: {as_json(data)}\n\n".encode()
