"""Reads what wandb wrote offline: its own protocol buffers in the framing of a LevelDB log."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4


def records(directory: Path) -> list[Any]:
    """All records of the one run below ``directory``, which is finished: wandb's own process may still be writing."""
    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 30
    while True:
        found = list(_parsed(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"the run in {path} does not end")
        time.sleep(0.05)


def _parsed(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    position, message = _HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER
        if position + length > len(data):
            return
        message += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows, in order."""
    rows = []
    for record in records(directory):
        if record.WhichOneof("record_type") == "history":
            rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})
    return rows


def summary(directory: Path) -> dict[str, Any]:
    """The run's summary as it was left."""
    found: dict[str, Any] = {}
    for record in records(directory):
        if record.WhichOneof("record_type") == "summary":
            found.update({_key(item): json.loads(item.value_json) for item in record.summary.update})
    return found


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)
