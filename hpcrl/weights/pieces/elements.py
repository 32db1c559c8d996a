"""The elements of a piece as they are sent and received: cast to the dtype that the engines want, quantised to FP8 with
scales, copied as bits, or, for --weight-update delta, only those that changed since the last update.

    count = write(new, old, item, out)          # the sender; `old` is then `new`
    read(buffer, count, elements, item)         # the receiver: (positions, values) of what changed

With a delta message go its *change counts*: for each piece WHOLE, or how many of its elements changed.  The message
itself has the whole piece, or nothing, or: how many changed in each block of 65,536 elements (int32), the position of
each in its block (uint16), and the new values.  One element of two bytes thus takes four, and a piece of which half has
changed is sent whole.

Invariants: what is sent is bit for bit what `hpcrl.models.files.fp8` makes of the whole tensor: the largest value of a
block that is on several ranks is agreed among them before anything is encoded; changed elements are compared and put
back bit by bit, so the result is exactly what was sent; a piece takes at most as many bytes as it does whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from hpcrl.errors import DataError
from hpcrl.models.files.fp8 import BAND, Scheme, encode, scales_for
from hpcrl.models.slicing import SourceRectangle
from hpcrl.weights.redistribution.layouts import Rectangle, sources
from hpcrl.weights.redistribution.loads import ALIGN

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  #: of an element's size


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in the shape and with the item size that it has."""
    return tensor.view(WORDS[tensor.element_size()])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, of the same shape."""
    if target.device.type == source.device.type == "cpu" and target.dtype == source.dtype:
        if target.numel():
            np.copyto(_array(target), _array(source))  # of rows with gaps a quarter quicker than torch
    else:
        target.copy_(source)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor, of the same memory; only as long as the tensor lives.

    Not `tensor.numpy()`: after that its memory cannot be resized any more, and a rank that shares its GPU or host with
    an engine puts its weights away by that.
    """
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": np.dtype(f"u{size}").str,
        "shape": tuple(tensor.shape),
        "strides": tuple(step * size for step in tensor.stride()),
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


WHOLE = -1
BLOCK = 1 << 16


def change_counts(pieces: int) -> torch.Tensor:
    """Room for the change counts of a message: int32 [pieces]."""
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

    All uint8 [bytes].

    Args:
        item: bytes of an element.

    Returns:
        The piece's change count.
    """
    words = new.view(WORDS[item])
    before = old.view(WORDS[item])
    at = torch.from_numpy(np.flatnonzero(words.numpy() != before.numpy()))  # six times as quick as torch's
    count = len(at)
    elements = len(words)
    if size(count, elements, item) >= size(WHOLE, elements, item):
        out[: len(new)].copy_(new)
        old.copy_(new)
        return WHOLE
    if count:
        blocks = -(-elements // BLOCK)
        values = words[at]
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

    Raises:
        ValueError: if it is not of a piece with so many elements.
    """
    blocks = -(-elements // BLOCK)
    begin = _values_at(count, elements)
    each = buffer[: 4 * blocks].view(torch.int32).long()
    if int(each.min()) < 0 or int(each.sum()) != count:
        raise ValueError(f"{int(each.sum())} changed elements were to come, {count} were announced")
    low = buffer[4 * blocks : 4 * blocks + 2 * count].view(torch.int16).long() & (BLOCK - 1)
    at = low + torch.repeat_interleave(torch.arange(blocks), each) * BLOCK
    if count and int(at.max()) >= elements:
        raise ValueError(f"element {int(at.max())} of a piece of {elements} was to change")
    return at, buffer[begin : begin + count * item].view(WORDS[item])


#: the largest values of a rank's quantised tensors, to be raised to those of all ranks that hold parts of the same
Agree = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True)
class OwnTensor:
    """A rank's part of a Hugging Face tensor: number `which` of those that a parameter is made of.

    Attributes:
        parameter: with the places of all of them in it.
        shape: of the whole tensor.
        value: what is sent of the parameter, of its shape and dtype; None: itself.
    """

    parameter: torch.Tensor
    places: Sequence[SourceRectangle]
    which: int
    shape: tuple[int, ...]
    value: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def matrix(self) -> torch.Tensor:
        """[rows, columns]; a vector has one column, of more dimensions all but the first are columns.

        Made each time, if it is not the parameter itself.
        """
        tensor = self.parameter.detach() if self.value is None else self.value(self.parameter)
        return tensor if tensor.dim() == 2 else tensor.view(len(tensor), -1)


@torch.no_grad()
def largest_values(tensor: OwnTensor, scheme: Scheme) -> torch.Tensor:
    """fp32, of the shape of the scales: the largest absolute value of each block, of what this rank holds; 0 where it
    holds none."""
    rows, columns = tensor.shape
    high, wide = {"block": scheme.block, "channel": (1, columns), "tensor": (rows, columns)}[scheme.strategy]
    found = tensor.parameter.new_zeros(-(-rows // high), -(-columns // wide), dtype=torch.float32)
    matrix = tensor.matrix
    for place in tensor.places:
        if place.tensor != tensor.which:
            continue
        left, right = place.columns or (0, columns)
        row = place.rows[0]
        while row < place.rows[1]:  # a band of blocks at a time, so that little is widened at once
            last = min((row // high + max(1, BAND // (high * (right - left)))) * high, place.rows[1])
            part = matrix[place.at + row - place.rows[0] : place.at + last - place.rows[0]]
            if place.left is not None:
                part = part[:, place.left : place.left + right - left]
            part = part.abs().float()
            over = row % high
            before = left % wide
            tall = -(-(over + last - row) // high)
            broad = -(-(before + right - left) // wide)
            padded = part.new_zeros(tall * high, broad * wide)
            padded[over : over + last - row, before : before + right - left] = part
            largest = padded.view(tall, high, broad, wide).amax(dim=(1, 3)).nan_to_num(nan=math.inf, posinf=math.inf)
            area = found[row // high : row // high + tall, left // wide : left // wide + broad]
            area.copy_(torch.maximum(area, largest))
            row = last
    return found.view(scheme.scale_shape(tensor.shape))


@dataclass(frozen=True)
class PieceValues:
    """What a rank can send: its tensors, the dtypes that are wanted, and the scales of those that are quantised (by
    their names)."""

    own: Mapping[str, OwnTensor]
    dtypes: Mapping[str, str]
    scheme: Scheme | None
    scales: Mapping[str, torch.Tensor]
    last: dict[int, torch.Tensor] = field(default_factory=dict)  #: the parameter that was made last, by its id

    def _matrix(self, tensor: OwnTensor) -> torch.Tensor:
        """`OwnTensor.matrix`, made once for the pieces of one parameter, which follow one another."""
        if tensor.value is None:
            return tensor.matrix
        if id(tensor.parameter) not in self.last:
            self.last.clear()
            self.last[id(tensor.parameter)] = tensor.matrix
        return self.last[id(tensor.parameter)]

    @torch.no_grad()
    def write(self, name: str, area: Rectangle, out: torch.Tensor) -> None:
        """The rectangle of a tensor into `out` (of its shape, in the wanted dtype)."""
        if name in self.scales:
            scale = self.scales[name]
            out.copy_((scale if scale.dim() > 1 else scale.view(-1, 1))[area[0] : area[1], area[2] : area[3]])
            return
        tensor = self.own[name]
        quantised = self.scheme is not None and self.scheme.scale_name(name) in self.scales
        matrix = self._matrix(tensor)
        for part, piece in sources(tensor.places, tensor.which, area):
            if quantised:
                self._code(name, matrix[part], area, piece, out)
            else:
                copy(out[piece], matrix[part])

    def _code(
        self, name: str, values: torch.Tensor, area: Rectangle, piece: tuple[slice, slice], out: torch.Tensor
    ) -> None:
        assert self.scheme is not None
        scale = self.scales[self.scheme.scale_name(name)]
        high, wide = self.scheme.block
        step = max(1, BAND // max(1, values.shape[1]))
        for start in range(0, values.shape[0], step):
            band = values[start : start + step].float()
            top = area[0] + piece[0].start + start
            each = scale
            if self.scheme.strategy != "tensor":
                rows = torch.arange(top, top + len(band), device=scale.device) // (
                    high if self.scheme.strategy == "block" else 1
                )
                each = scale[rows]
            if self.scheme.strategy == "block":
                left = area[2] + piece[1].start
                each = each[:, torch.arange(left, left + band.shape[1], device=scale.device) // wide]
            begin = piece[0].start + start
            out[begin : begin + len(band), piece[1]].copy_(encode(band, each))


def prepare_values(
    own: Mapping[str, OwnTensor], dtypes: Mapping[str, str], scheme: Scheme | None, agree: Agree
) -> PieceValues:
    """Find all scales; collective, because blocks may be on several ranks.

    Raises:
        DataError: names a matrix that cannot be quantised.
    """
    scales: dict[str, torch.Tensor] = {}
    if scheme is not None:
        largest = [(name, largest_values(own[name], scheme)) for name in own if scheme.takes(name, own[name].shape)]
        agree(largest)
        for name, values in largest:
            if not values.isfinite().all():
                raise DataError(f"{name} cannot be quantised: it has infinite or undefined numbers")
            scales[scheme.scale_name(name)] = scales_for(values, scheme.power_of_two)
    return PieceValues(own, dtypes, scheme, scales)
