"""The tensors inside inputs and outputs of modules, each with its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor

#: Levels of nested containers that are searched.
DEPTH = 4


def tensors_of(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Each tensor inside ``value`` with its path: ``path[0]`` for sequences and integer keys, ``path.key`` for other keys and
    dataclasses.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif depth < DEPTH:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from tensors_of(item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}", depth + 1)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                yield from tensors_of(item, f"{path}[{index}]", depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from tensors_of(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)


def copied(value: Any) -> Any:
    """``value`` with lists, tuples, dicts and tensors copied recursively. Does not synchronise."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def rest_of(path: str, name: str, taken: Container[str]) -> str:
    """What ``path`` adds to its prefix ``name``; in brackets if a module has that name.

    >>> rest_of("head.logits", "head", {"head"}), rest_of("head.logits", "head", {"head", "head.logits"})
    ('.logits', '[logits]')
    """
    rest = path[len(name) :]
    ends = [place for place in range(len(name) + 1, len(path) + 1) if place == len(path) or path[place] in ".[@"]
    if not rest.startswith(".") or not any(path[:end] in taken for end in ends):
        return rest
    first = ends[0] - len(name)
    return f"[{rest[1:first]}]{rest[first:]}"
