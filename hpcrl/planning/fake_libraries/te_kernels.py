"""What the layers of transformer_engine.py call: GEMMs with their collectives, attention, norm, rotary embedding, the
permutation of tokens to experts, and the optimizer's arithmetic over many tensors.

Shapes, dtypes, what is kept for the backward pass and which arguments must be on the device are the real ones'; of
numbers there are those of the plain formula where that is short, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Split:
    """How a matrix is split over ranks.

    Attributes:
        mode: "column", "row" or None.
        group: the ranks; None: one.
        sequence: activations are split too, by rows.
        fused: its gradient is added to `main_grad`.
    """

    mode: str | None
    group: Any
    sequence: bool
    fused: bool

    @classmethod
    def of_layer(cls, layer: Any) -> Split:
        """That of a layer."""
        group = layer.tp_group if layer.tp_size > 1 else None
        return cls(
            layer.parallel_mode if group else None, group, layer.sequence_parallel, layer.fuse_wgrad_accumulation
        )


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    out = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    out = x.new_empty(x.size(0) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


class Gemm(torch.autograd.Function):
    """x @ weight^T, with the collectives of tensor and sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, split: Split) -> Any:
        assert x.dtype == weight.dtype
        ctx.split = split
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # of a frozen weight no gradient is made
        if split.mode == "column" and split.sequence:
            x = _gather(x, split.group)
        out = x @ weight.t()
        if split.mode == "row":
            out = _scatter(out, split.group) if split.sequence else _reduce(out, split.group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        split = ctx.split
        x, weight = ctx.saved_tensors
        (grad,) = grads
        if x is not None and split.mode == "column" and split.sequence:
            x = _gather(x, split.group)
        if split.mode == "row" and split.sequence:
            grad = _gather(grad.contiguous(), split.group)
        of_x = grad @ weight
        if split.mode == "column":
            of_x = _scatter(of_x, split.group) if split.sequence else _reduce(of_x, split.group)
        if x is None:
            return of_x, None, None
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if split.fused:
            weight.main_grad.add_(of_weight)
            weight.grad_added_to_main_grad = True
            of_weight = dummy_wgrad(list(weight.shape), weight.dtype)
        return of_x, of_weight, None


def dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A gradient that is not read."""
    made = torch.zeros if zero else torch.empty
    return made(shape, dtype=dtype, device=torch.cuda.current_device())


class Attention(torch.autograd.Function):
    """Keeps queries, keys, values, what it gives and a number a row and head."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = query.new_empty(*query.shape[:2], value.size(-1))
        rows = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class Norm(torch.autograd.Function):
    """Keeps its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:2])


class Rope(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.empty_like(grads[0])


# ---- tokens to experts


class _Move(torch.autograd.Function):
    """Rows, and a number for each, in another order: so many of them."""

    @staticmethod
    def forward(ctx: Any, x: Any, probs: Any, rows: int) -> Any:
        ctx.shapes = x.shape, None if probs is None else probs.shape
        return x.new_empty(rows, x.size(1)), None if probs is None else probs.new_empty(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, numbers = ctx.shapes
        of_probs = None if numbers is None or grads[1] is None else grads[1].new_empty(numbers)
        return grads[0].new_empty(rows), of_probs, None


def _on_device(*tensors: torch.Tensor) -> None:
    assert all(tensor.is_cuda for tensor in tensors), "TransformerEngine needs CUDA."


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows by expert, the map back)"""
    out, _, back = moe_permute_with_probs(inp, None, routing_map, num_out_tokens)
    return out, back


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor | None, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows by expert, their probabilities, the map back)"""
    _on_device(inp, routing_map)
    assert num_out_tokens >= 0 and routing_map.shape[0] == inp.shape[0]
    out, moved = _Move.apply(inp, probs, num_out_tokens)
    return out, moved, torch.empty(routing_map.shape[::-1], dtype=torch.int32, device=inp.device)


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of each token summed, where they were."""
    assert pad_offsets is None, "not stood in for"
    _on_device(inp, row_id_map)
    return _Move.apply(inp, None, restore_shape[0])[0]


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Chunks of rows in another order."""
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor | None, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of rows and of their probabilities in another order."""
    _on_device(inp, split_sizes, sorted_index)
    assert split_sizes.size(0) == sorted_index.size(0)
    return _Move.apply(inp, probs, inp.size(0))


# ---- many tensors at once


def multi_tensor_applier(op: Any, noop_flag_buffer: torch.Tensor, tensor_lists: Any, *args: Any) -> Any:
    """op over all of them."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(_: int, noop: torch.Tensor, lists: Any, per_tensor: bool = False) -> Any:
    """(norm of all together, of each)"""
    _on_device(noop, *lists[0])
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(_: int, noop: torch.Tensor, lists: Any, scale: float) -> None:
    """Each of the second list is one of the first, times `scale`."""
    _on_device(noop, *lists[0])
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(_: int, noop: torch.Tensor, lists: Any, scale: torch.Tensor) -> None:
    """The same with a factor on the device."""
    _on_device(noop, scale, *lists[0])
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
