"""Buckets: tensors packed one after the other into a buffer for one transfer.

Invariants: a bucket holds at most `limit` bytes, or one single tensor that is larger; every tensor begins at a multiple
of 64 bytes and none overlap; whatever the tensors, copying in and looking them up again gives the same bits.  What a
bucket's layout says on a wire is checked in full before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from hpcrl.model_files.safetensors_files import ITEM_BYTES

if TYPE_CHECKING:
    import torch

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Where one tensor is in its bucket: name, dtype (torch's name), shape, offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """The layout of one transfer: slots in order of offset.

    Attributes:
        nbytes: where the last one ends.
    """

    slots: tuple[Slot, ...]
    nbytes: int

    def to_wire(self) -> dict[str, Any]:
        """Plain lists for JSON."""
        return {
            "names": [s.name for s in self.slots],
            "dtype_names": [s.dtype for s in self.slots],
            "shapes": [list(s.shape) for s in self.slots],
            "offsets": [s.offset for s in self.slots],
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Bucket:
        """The layout that `to_wire` wrote.

        Raises:
            ValueError: says what is wrong with anything else.
        """
        try:
            columns = [wire[key] for key in ("names", "dtype_names", "shapes", "offsets")]
            slots = tuple(
                Slot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in zip(*columns, strict=True)
            )
            bucket = cls(slots, wire["nbytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"malformed bucket: {error!r}") from error
        _check(bucket)
        return bucket


def _check(bucket: Bucket) -> None:
    end = 0
    names = set()
    for slot in bucket.slots:
        if not isinstance(slot.name, str) or not slot.name or slot.name in names:
            raise ValueError(f"malformed bucket: name {slot.name!r} is empty, repeated or no text")
        if not isinstance(slot.dtype, str) or slot.dtype not in ITEM_BYTES:
            raise ValueError(f"malformed bucket: {slot.name} has dtype {slot.dtype!r}")
        if not all(_whole(size) for size in slot.shape):
            raise ValueError(f"malformed bucket: {slot.name} has shape {slot.shape!r}")
        if not _whole(slot.offset) or slot.offset % ALIGN or slot.offset < end:
            raise ValueError(f"malformed bucket: {slot.name} begins at {slot.offset!r}")
        names.add(slot.name)
        end = slot.offset + slot.nbytes
    if not _whole(bucket.nbytes) or bucket.nbytes != end:
        raise ValueError(f"malformed bucket: it ends at {end}, not at {bucket.nbytes!r}")


def _whole(number: object) -> bool:
    return type(number) is int and number >= 0


@dataclass
class Packer:
    """Lays tensors out, bucket by bucket, in the order in which they come.

    Attributes:
        limit: bytes of a bucket; a tensor larger than that has its own bucket.
    """

    limit: int
    slots: list[Slot] = field(default_factory=list)
    end: int = 0

    def fits(self, dtype: str, shape: Iterable[int]) -> bool:
        """Whether one more tensor may go into the bucket that is being filled."""
        return not self.slots or _align(self.end) + prod(shape) * ITEM_BYTES[dtype] <= self.limit

    def add(self, name: str, dtype: str, shape: Iterable[int]) -> Slot:
        """Give a tensor its place."""
        slot = Slot(name, dtype, tuple(shape), _align(self.end))
        self.slots.append(slot)
        self.end = slot.offset + slot.nbytes
        return slot

    def take(self) -> Bucket:
        """The filled bucket; the next `add` begins a new one."""
        bucket = Bucket(tuple(self.slots), self.end)
        self.slots = []
        self.end = 0
        return bucket


def _align(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def dtype_name(tensor: torch.Tensor) -> str:
    """torch.float32 -> "float32".

    Raises:
        ValueError: for a dtype that does not travel.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"tensors of dtype {name} cannot be sent")
    return name


def fill(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int, room: Callable[[int, int], torch.Tensor]
) -> Iterator[tuple[Bucket, torch.Tensor, bool]]:
    """Copy named tensors into buckets of at most `limit` bytes; yields (layout, buffer, is it the last bucket).

    room(i, n) gives the uint8 buffer of bucket i, at least n bytes long.  A buffer is complete when it is yielded;
    `room` may hand out the same one again after that.  No more than one tensor is looked ahead.  Yields nothing for no
    tensors.
    """
    packer = Packer(limit)
    number = 0
    buffer = None
    for name, tensor in tensors:
        dtype = dtype_name(tensor)
        shape = tuple(tensor.shape)
        if not packer.fits(dtype, shape):
            assert buffer is not None
            yield packer.take(), buffer, False
            number += 1
        first = not packer.slots
        slot = packer.add(name, dtype, shape)
        if first:
            buffer = room(number, max(limit, slot.nbytes))
        assert buffer is not None
        view(buffer, slot).copy_(tensor)
    if packer.slots:
        assert buffer is not None
        yield packer.take(), buffer, True


def view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor of one slot, sharing the buffer's memory."""
    import torch

    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def views(buffer: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a bucket by name, sharing the buffer's memory."""
    return [(slot.name, view(buffer, slot)) for slot in bucket.slots]
