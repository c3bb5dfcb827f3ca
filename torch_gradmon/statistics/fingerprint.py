"""Fingerprints of tensors: eight bytes that are equal for equal bits. Other bits have others, except with a chance of about 2**-64.

A tensor is read as words of eight bytes, the last one filled up with zeros. Each word is added to a multiple of its position and mixed by
the finalizer of splitmix64 (Steele, Lea and Flood, 2014), and the mixed words are added modulo 2**64. Mixing is a bijection, so a single
word that changes always shows; and since the position is mixed in, so do words that change places. Additions of integers are exact: no
order of them, and so no device, gives another sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.torch_modes import copied_to_device, outside_dispatch_modes

#: Bytes of a word.
WORD = 8
#: Words that are mixed at once, with some scratch tensors of this size. Those of a CPU fit its cache.
_AT_ONCE = {"cpu": 1 << 15}
_ELSEWHERE = 1 << 22


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_SHIFTS = 30, 27, 31


class _Piece(NamedTuple):
    """Words of a tensor that are mixed at once, and the number of the first one."""

    tensor: int
    start: int
    words: Tensor


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """One for each dense tensor on one device: int64. Only the order of the elements matters, not the strides. Does not synchronise."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    with torch.no_grad(), outside_dispatch_modes():
        device = tensors[0].device
        found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        for pieces in _batches(tensors, _AT_ONCE.get(device.type, _ELSEWHERE)):
            places = [piece.tensor for piece in pieces]
            sums = _sums(pieces, device)
            if len(places) == 1:
                found[places[0]] += sums[0]
            else:
                found.index_add_(0, copied_to_device(torch.tensor(places, dtype=torch.int64, device="cpu"), device), sums)
        return found


def packed(found: Tensor) -> Tensor:
    """Fingerprints as four numbers of 16 bits each, which a copy in floating point keeps."""
    return found.view(torch.int16)


def unpacked(copy: Tensor) -> Tensor:
    return copy.to(torch.int16).view(torch.int64)


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """The words of a tensor in one or two parts. Only a tensor with gaps or another order of dimensions is copied."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return
    flat = flat.view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    whole = flat.numel() // WORD * WORD
    if whole:
        yield flat[:whole].view(torch.int64)
    if rest := flat.numel() - whole:
        yield torch.cat([flat[whole:], flat.new_zeros(WORD - rest)]).view(torch.int64)


def _batches(tensors: Sequence[Tensor], most: int) -> Iterator[list[_Piece]]:
    """Pieces of at most ``most`` words together; words are made when they are needed, so that copies are not kept."""
    pieces: list[_Piece] = []
    free = most
    for number, tensor in enumerate(tensors):
        done = 0
        for part in _words(tensor):
            start = 0
            while start < len(part):
                piece = _Piece(number, done + start, part[start : start + free])
                pieces.append(piece)
                start, free = start + len(piece.words), free - len(piece.words)
                if not free:
                    yield pieces
                    pieces, free = [], most
            done += len(part)
    if pieces:
        yield pieces


def _sums(pieces: Sequence[_Piece], device: torch.device) -> Tensor:
    lengths = [len(piece.words) for piece in pieces]
    mixed = torch.arange(sum(lengths), device=device)
    if len(pieces) > 1:
        ends = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
        firsts = torch.tensor([piece.start for piece in pieces], dtype=torch.int64, device="cpu")
        known = copied_to_device(torch.stack([ends, firsts - ends + torch.tensor(lengths, device="cpu")]), device)
        mixed += torch.repeat_interleave(known[1], torch.diff(known[0], prepend=known[0].new_zeros(1)), output_size=sum(lengths))
        words = torch.cat([piece.words for piece in pieces])
    else:
        mixed += pieces[0].start
        words = pieces[0].words
    mixed.mul_(_GOLDEN).add_(words)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # the shift of a signed number repeats its sign
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            mixed.mul_(factor)
    if len(pieces) == 1:
        return mixed.sum().view(1)
    totals = mixed.cumsum(0)[known[0] - 1]
    return torch.diff(totals, prepend=totals.new_zeros(1))
