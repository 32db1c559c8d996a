"""A tensor that is there only in part, for loaders that take their own part out of the whole.

vLLM's loaders are given whole tensors and narrow them to what their worker holds.  A PartTensor has the shape of the
whole and the numbers of that part alone; narrowed to (a part of) it, it is a plain tensor.

Invariant: an element that is not there is never made up: whatever needs one raises PartMissing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

Span = tuple[int, int]  #: (start, length)
_AS_IT_IS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_OF_ALL = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


class PartMissing(RuntimeError):
    """More of a tensor was asked for than is there."""


class PartTensor(torch.Tensor):
    """`part` of a tensor of `shape`.

    Attributes:
        spans: for each dimension what is there, in ascending order, one behind the other in `part`.
    """

    part: torch.Tensor
    spans: tuple[tuple[Span, ...], ...]

    def __new__(cls, shape: Sequence[int], part: torch.Tensor, spans: Sequence[Sequence[Span]]) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=part.dtype, device=part.device)  # type: ignore[return-value]

    def __init__(self, shape: Sequence[int], part: torch.Tensor, spans: Sequence[Sequence[Span]]) -> None:
        self.part = part
        self.spans = tuple(tuple((int(a), int(n)) for a, n in dimension) for dimension in spans)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartTensor({list(self.shape)}, {self.spans})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = args[0] if args else None
        if isinstance(found, cls):
            if func in _AS_IT_IS:
                return cls(found.shape, found.part, found.spans)
            if func in _OF_ALL:
                return cls(found.shape, func(found.part, *args[1:], **kwargs), found.spans)
            if func is torch.ops.aten.slice.Tensor:
                return _narrowed(found, *args[1:], **kwargs)
            if func is torch.ops.aten.unsqueeze.default:
                return _unsqueezed(found, args[1])
            if func is torch.ops.aten.select.int and _whole(found, args[1]):
                return _selected(found, args[1], args[2])
            if func is torch.ops.aten.unbind.int:
                dim = args[1] if len(args) > 1 else 0
                if _whole(found, dim):
                    return [_selected(found, dim, i) for i in range(found.shape[dim])]
        raise PartMissing(
            f"{func} needs more of {found if isinstance(found, cls) else 'a tensor'} than this worker holds"
        )


def part_tensor(
    shape: Sequence[int], part: torch.Tensor, rows: Sequence[Sequence[int]], columns: Sequence[int] | None
) -> torch.Tensor:
    """The part that a worker holds as a tensor of `shape`; a plain one where that is all of it.

    Args:
        rows: (start, length) one below the other.
        columns: of the second dimension, or None for all.
    """
    spans: list[Sequence[Span]] = [tuple((a, n) for a, n in rows)]
    if len(shape) > 1:
        spans.append([(columns[0], columns[1]) if columns is not None else (0, shape[1])])
    spans += [((0, size),) for size in shape[2:]]
    return _build(shape, part, spans)


def _build(shape: Sequence[int], part: torch.Tensor, spans: Sequence[Sequence[Span]]) -> torch.Tensor:
    if all(_covers(dimension, size) for dimension, size in zip(spans, shape, strict=True)):
        return part
    return PartTensor(shape, part, spans)


def _covers(spans: Sequence[Span], size: int) -> bool:
    at = 0
    for start, length in spans:
        if start != at:
            return False
        at += length
    return at == size


def _whole(tensor: PartTensor, dim: int) -> bool:
    return _covers(tensor.spans[dim], tensor.shape[dim])


def _narrowed(
    tensor: PartTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    if step != 1:
        raise PartMissing(f"every {step}th of {tensor} was asked for")
    dim, size = dim % tensor.dim(), tensor.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    shape = [*tensor.shape[:dim], max(0, last - first), *tensor.shape[dim + 1 :]]
    kept = []
    at = 0
    begin = 0
    for offset, length in tensor.spans[dim]:
        low = max(first, offset)
        high = min(last, offset + length)
        if low < high:
            if not kept:
                begin = at + low - offset
            kept.append((low - first, high - low))
        at += length
    part = tensor.part.narrow(dim, begin, sum(length for _, length in kept))
    return _build(shape, part, [*tensor.spans[:dim], kept, *tensor.spans[dim + 1 :]])


def _unsqueezed(tensor: PartTensor, dim: int) -> torch.Tensor:
    dim %= tensor.dim() + 1
    shape = list(tensor.shape)
    spans = list(tensor.spans)
    shape.insert(dim, 1)
    spans.insert(dim, ((0, 1),))
    return _build(shape, tensor.part.unsqueeze(dim), spans)


def _selected(tensor: PartTensor, dim: int, index: int) -> torch.Tensor:
    dim %= tensor.dim()
    shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    return _build(shape, tensor.part.select(dim, index), [*tensor.spans[:dim], *tensor.spans[dim + 1 :]])
