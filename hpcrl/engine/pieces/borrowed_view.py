"""A part that still lies in another process's memory, given to loaders as it is: they copy it straight into their
parameters.

    borrowed = BorrowedPart((rows, columns), dtype, take)
    borrowed.add((slice(0, 4), slice(0, 8)), view)       # until there is a tile for every element
    load(BorrowedView(borrowed)); borrowed.settle()      # what the loader has kept now has memory of its own

Invariant: no plain tensor over the borrowed memory leaves this module.  A BorrowedView can be narrowed, and copied into
another tensor; for any other operation the part is first copied into memory of its own (`settle`), on which the
operation then runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from hpcrl.weights.pieces.elements import copy
from hpcrl.weights.redistribution.layouts import Index

Area = tuple[int, int, int, int]  #: rows [a, b), columns [c, d)
aten = torch.ops.aten
_AS_IT_IS = {aten.detach.default, aten.alias.default}


class BorrowedPart:
    """A part of `shape` (rows, columns), in tiles.

    Attributes:
        take: gives uint8 [bytes] of memory of our own.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, take: Callable[[int], torch.Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._take = take
        self._tiles: list[tuple[Area, torch.Tensor]] = []
        self._own: torch.Tensor | None = None

    def add(self, where: Index, tile: torch.Tensor) -> None:
        """Elements that have come: [rows, columns] of the part's dtype, in memory of others."""
        rows, columns = where
        self._tiles.append(((rows.start, rows.stop, columns.start, columns.stop), tile))

    def settle(self) -> torch.Tensor:
        """The part in memory of its own; the borrowed memory is not read after this."""
        if self._own is None:
            rows, columns = self.shape
            mine = self._take(rows * columns * self.dtype.itemsize).view(self.dtype).view(rows, columns)
            self.copy_to(mine, (0, rows, 0, columns))
            self._own = mine
            self._tiles = []
        return self._own

    def copy_to(self, target: torch.Tensor, area: Area) -> None:
        """An area of the part into a tensor of the area's shape."""
        top, bottom, left, right = area
        if self._own is not None:
            copy(target, self._own[top:bottom, left:right])
            return
        for (first, last, begin, end), tile in self._tiles:
            a = max(first, top)
            b = min(last, bottom)
            c = max(begin, left)
            d = min(end, right)
            if a < b and c < d:
                copy(target[a - top : b - top, c - left : d - left], tile[a - first : b - first, c - begin : d - begin])


class BorrowedView(torch.Tensor):
    """An area of a borrowed part, with the dtype and on the device of that memory."""

    borrowed: BorrowedPart
    area: Area
    __torch_function__ = torch._C._disabled_torch_function_impl  # a parameter's own class need not know of this one

    def __new__(cls, borrowed: BorrowedPart, area: Area | None = None) -> Self:
        top, bottom, left, right = area or (0, borrowed.shape[0], 0, borrowed.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, (bottom - top, right - left), dtype=borrowed.dtype)  # type: ignore[return-value]

    def __init__(self, borrowed: BorrowedPart, area: Area | None = None) -> None:
        self.borrowed = borrowed
        self.area = area or (0, borrowed.shape[0], 0, borrowed.shape[1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BorrowedView({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is aten.copy_.default
            and type(args[1]) is cls
            and type(args[0]) is not cls
            and args[0].shape == args[1].shape
        ):
            if not args[0].is_meta:
                with torch._C.DisableTorchFunctionSubclass():
                    args[1].borrowed.copy_to(args[0], args[1].area)
            return args[0]
        if args and type(args[0]) is cls:
            if func in _AS_IT_IS:
                return cls(args[0].borrowed, args[0].area)
            if func is aten.slice.Tensor and (len(args) < 5 or args[4] == 1) and not kwargs:
                return _narrowed(args[0], *args[1:4])
            if func is aten.narrow.default:
                return _narrowed(args[0], args[1], args[2], args[2] + args[3])
        own = tree_map_only(cls, _settled, (args, kwargs))
        return func(*own[0], **own[1])


def _settled(tensor: BorrowedView) -> torch.Tensor:
    top, bottom, left, right = tensor.area
    return tensor.borrowed.settle()[top:bottom, left:right]


def _narrowed(tensor: BorrowedView, dim: int = 0, start: int | None = None, end: int | None = None) -> BorrowedView:
    dim %= 2
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    area = list(tensor.area)
    at = 2 * dim
    area[at], area[at + 1] = tensor.area[at] + first, tensor.area[at] + max(first, last)
    return BorrowedView(tensor.borrowed, (area[0], area[1], area[2], area[3]))
