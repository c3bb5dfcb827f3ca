"""Fingerprints: those of a naive computation, and different for every change that must not be missed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from torch_gradmon.statistics import fingerprint
from torch_gradmon.statistics.fingerprint import fingerprints

_MASK = (1 << 64) - 1


def naive(tensor: Tensor) -> int:
    """Word by word, in numbers of any size."""
    raw = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    raw += bytes(-len(raw) % 8)
    total = 0
    for place in range(0, len(raw), 8):
        word = (int.from_bytes(raw[place : place + 8], "little") + place // 8 * 0x9E3779B97F4A7C15) & _MASK
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
        total = (total + (word ^ word >> 31)) & _MASK
    return total - (1 << 64) if total >> 63 else total


TENSORS = [
    torch.randn(33),
    torch.randn(5, 7).bfloat16(),
    torch.zeros(0),
    torch.tensor(3.0),
    torch.arange(5000, dtype=torch.float32),
    torch.ones(3, dtype=torch.bool),
    torch.randn(4, 6).t(),
    torch.randn(3, dtype=torch.complex64),
    torch.randn(7, dtype=torch.float64)[1:],
    torch.randn(9)[3:],
    torch.full((11,), torch.nan),
    torch.randint(0, 255, (13,), dtype=torch.uint8),
    torch.ones(3, requires_grad=True),
]


@pytest.mark.parametrize("at_once", [1, 3, 64, 1 << 15])
def test_they_are_those_of_the_naive_computation_in_any_batches(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fingerprint._AT_ONCE, "cpu", at_once)
    assert fingerprints(TENSORS).tolist() == [naive(tensor) for tensor in TENSORS]
    assert [int(fingerprints([tensor])) for tensor in TENSORS] == [naive(tensor) for tensor in TENSORS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_flipped_bit_shows(dtype: torch.dtype) -> None:
    tensor = torch.randn(24).to(dtype)
    before = int(fingerprints([tensor]))
    words = tensor.view(torch.uint8)
    for place in range(len(words)):
        for bit in range(8):
            words[place] ^= 1 << bit
            assert int(fingerprints([tensor])) != before
            words[place] ^= 1 << bit
    assert int(fingerprints([tensor])) == before


def test_elements_that_change_places_show_and_pairs_that_change_alike() -> None:
    """Where a sum is blind to the first, and an exclusive or to the second. Numbers with few bits are the hard ones."""
    draw = random.Random(0)
    seen: set[int] = set()
    for _ in range(3000):
        values = [draw.choice([0.0, 1.0, 2.0, -1.0, 0.5]) for _ in range(64)]
        tensor = torch.tensor(values)
        before = int(fingerprints([tensor]))
        one, other = draw.sample(range(64), 2)
        if values[one] != values[other]:
            tensor[[one, other]] = tensor[[other, one]]
            assert int(fingerprints([tensor])) != before
        tensor = torch.tensor(values)
        tensor.view(torch.int32)[[one, other]] ^= 1 << draw.randrange(32)
        assert int(fingerprints([tensor])) != before
        seen.add(before)
    assert len(seen) > 2990


def test_zeros_of_another_number_and_sign_differ() -> None:
    found = fingerprints([torch.zeros(16), torch.zeros(32), torch.zeros(16).neg_()]).tolist()
    assert len(set(found)) == 3
