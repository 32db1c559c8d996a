"""The elements of a piece as they are sent: cast to the dtype that the engines want, quantised to FP8 with scales, or
copied as bits.

Invariant: what is sent is bit for bit what `hpcrl.models.files.fp8` makes of the whole tensor: the largest value of a
block that is on several ranks is agreed among them before anything is encoded.
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
