"""The forms of what stands as JSON in a run directory, which somebody else may have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..core.keys import NO_ATTENTION

_Found = TypeVar("_Found")
Form = Callable[[Any], bool]


def _is(*kinds: type) -> Form:
    return lambda found: type(found) in kinds


def _list_of(form: Form) -> Form:
    return lambda found: type(found) is list and all(map(form, found))


def _by_name(form: Form) -> Form:
    return lambda found: type(found) is dict and all(map(form, found.values()))


def _object(*required: str, **forms: Form) -> Form:
    """An object that has the ``required`` ones of these members; others than these may be anything."""
    return lambda found: (
        type(found) is dict
        and all(name in found for name in required)
        and all(form(found[name]) for name, form in forms.items() if name in found)
    )


def _maybe(form: Form) -> Form:
    return lambda found: found is None or form(found)


_TEXT, _WHOLE, _NUMBER, _FLAG = _is(str), _is(int), _is(int, float), _is(bool)
_NAMES, _NUMBERS, _ANY = _list_of(_TEXT), _list_of(_NUMBER), _by_name(lambda found: True)
_FINDINGS = _list_of(
    _object(
        "rule", "first", "last", "count",
        rule=_TEXT, first=_WHOLE, last=_WHOLE, count=_WHOLE, where=_NAMES, evidence=_by_name(_NUMBER),
    )
)  # fmt: skip
_CHANGE = _object(
    "number",
    number=_WHOLE, since=_maybe(_WHOLE), until=_maybe(_WHOLE), first=_maybe(_WHOLE), steps=_maybe(_WHOLE), every=_maybe(_WHOLE),
    preset=_maybe(_TEXT), ended=_TEXT,
)  # fmt: skip
_FACTS: dict[str, Form] = {
    "torch": _TEXT,
    "model": _TEXT,
    "preset": _maybe(_TEXT),
    "trainer": _TEXT,
    "every": _maybe(lambda found: _WHOLE(found) and found > 0),
    "parameters": _by_name(_object("shape", shape=_list_of(_WHOLE), dtype=_TEXT)),
    "kinds": _by_name(_TEXT),
    "matrices": _by_name(_WHOLE),
    "frozen": _NAMES,
    "optimizers": _list_of(
        _object("optimizer", "settings", "parameters", optimizer=_TEXT, number=_WHOLE, parameters=_NAMES, settings=_object(
            lr=_maybe(_NUMBER), initial_lr=_maybe(_NUMBER), weight_decay=_maybe(_NUMBER),
        ))
    ),
    "chance": _by_name(_NUMBER),
    "process": _ANY,
    "clip_bound": _maybe(_NUMBER),
    "raised": _TEXT,
    "unwritten": _WHOLE,
    "lost_after": _maybe(_WHOLE),
    "lost_why": _TEXT,
    "tune": _object(
        session=_TEXT, listens=_FLAG, ended=_FLAG, number=_WHOLE, why=_TEXT,
        in_force=_maybe(_CHANGE), waits=_maybe(_CHANGE), last=_maybe(_CHANGE),
    ),
    "audit": _FINDINGS, "replicas": _FINDINGS, "setup": _FINDINGS, "data": _FINDINGS, "foresight": _FINDINGS,
}  # fmt: skip
_CONTEXT: dict[str, Form] = {
    "lr": _NUMBERS,
    "amp_scale": _maybe(_NUMBER),
    "overhead_pct": _maybe(_NUMBER),
    "tags": _ANY,
    "batch_norms": lambda found: _by_name(_NUMBERS)(found) and all(name.isdecimal() and len(name) < 10 for name in found),
    "rows": _object(
        "ids", "losses", "count", "sum", "nonfinite", ids=_list_of(_is(int, str)), losses=_NUMBERS, count=_WHOLE, sum=_NUMBER,
        nonfinite=_WHOLE,
    ),
    "skipped": _TEXT,
    "interrupted": _TEXT,
    "action": _TEXT,
    NO_ATTENTION: _TEXT,
    # these stand elsewhere
    "time": lambda found: False,
    "applied": lambda found: False,
}  # fmt: skip
_EVENT: dict[str, Form] = {
    "step": _WHOLE, "signal": _TEXT, "value": _NUMBER, "score": _NUMBER, "threshold": _NUMBER, "reason": _TEXT,
    "usual": _maybe(_NUMBER), "where": _TEXT, "action": _TEXT,
}  # fmt: skip


def _fitting(found: Mapping[str, _Found], forms: Mapping[str, Form]) -> dict[str, _Found]:
    return {name: value for name, value in found.items() if name not in forms or forms[name](value)}


def facts_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the facts about a run that are of their form, or of none that is known."""
    return _fitting(found, _FACTS)


def context_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise of the context of a step."""
    return _fitting(found, _CONTEXT)


def is_event(found: Any) -> bool:
    """Whether it is a spike, whatever else it says."""
    return type(found) is dict and _fitting(found, _EVENT).keys() == found.keys()
