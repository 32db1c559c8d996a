"""What of a piece differs from what was sent of it last, for --weight-update delta.

    count = write(new, old, item, out)          # the sender; `old` is then `new`
    read(buffer, count, elements, item)         # the receiver: (positions, values) of what changed

A message has a *letter* beside its bytes: for each piece WHOLE, or how many of its elements changed.  What follows is
the whole piece, or nothing, or: how many changed in each block of 65,536 elements (int32), where in its block each lies
(uint16), and the new values.  One element of two bytes thus takes four, and a piece of which half has changed is sent
whole.

Invariant: elements are compared and put back bit by bit, so what is put together is exactly what was sent; a piece
takes at most as many bytes as it does whole.
"""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.redistribution.rounds import ALIGN
from hpcrl.weights.pieces.bits import WORDS

WHOLE = -1
BLOCK = 1 << 16


def letter_of(pieces: int) -> torch.Tensor:
    """Room for a letter: int32 [pieces]."""
    return torch.full((pieces,), WHOLE, dtype=torch.int32)


def size(count: int, elements: int, item: int) -> int:
    """Bytes of a piece of which `count` elements have changed, or which is sent WHOLE, with the gap behind it."""
    if count == 0:
        return 0
    nbytes = elements * item if count == WHOLE else _values_at(count, elements) + count * item
    return -(-nbytes // ALIGN) * ALIGN


def _values_at(count: int, elements: int) -> int:
    """Where the values begin: behind the counts of the blocks and the places, at a multiple of 8."""
    return -(-(4 * -(-elements // BLOCK) + 2 * count) // 8) * 8


def write(new: torch.Tensor, old: torch.Tensor, item: int, out: torch.Tensor) -> int:
    """What changed from `old` to `new` into `out`, which has room for all of `new`; then `old` has the bits of `new`.

    All uint8 [bytes]; item: bytes of an element.  Returns the letter's number.
    """
    words, before = new.view(WORDS[item]), old.view(WORDS[item])
    at = torch.from_numpy(np.flatnonzero(words.numpy() != before.numpy()))  # six times as quick as torch's
    count, elements = len(at), len(words)
    if size(count, elements, item) >= size(WHOLE, elements, item):
        out[: len(new)].copy_(new)
        old.copy_(new)
        return WHOLE
    if count:
        blocks, values = -(-elements // BLOCK), words[at]
        begin = _values_at(count, elements)
        out[: 4 * blocks].view(torch.int32).copy_(torch.bincount(at >> 16, minlength=blocks))
        out[4 * blocks : 4 * blocks + 2 * count].view(torch.int16).copy_(
            at & (BLOCK - 1)
        )  # the low bits, which int16 keeps
        out[begin : begin + count * item].view(words.dtype).copy_(values)
        before[at] = values
    return count


def read(buffer: torch.Tensor, count: int, elements: int, item: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, int64 [count], ascending; values, words of `item` bytes [count]) of what `write` made of a piece.

    ValueError if it is not of a piece with so many elements.
    """
    blocks, begin = -(-elements // BLOCK), _values_at(count, elements)
    each = buffer[: 4 * blocks].view(torch.int32).long()
    if int(each.min()) < 0 or int(each.sum()) != count:
        raise ValueError(f"{int(each.sum())} changed elements were to come, {count} were announced")
    low = buffer[4 * blocks : 4 * blocks + 2 * count].view(torch.int16).long() & (BLOCK - 1)
    at = low + torch.repeat_interleave(torch.arange(blocks), each) * BLOCK
    if count and int(at.max()) >= elements:
        raise ValueError(f"element {int(at.max())} of a piece of {elements} was to change")
    return at, buffer[begin : begin + count * item].view(WORDS[item])
