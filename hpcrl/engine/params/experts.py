"""One tensor of a checkpoint as a worker of an engine holds it, and the experts of a mixture-of-experts layer in vLLM
by the names of the checkpoint.

vLLM stacks all experts of a worker into two parameters: w13_weight [experts, gate and up rows, hidden] and w2_weight
[experts, hidden, intermediate]; its CPU build then rearranges each expert for its grouped product and pads the
intermediate size.  That arrangement is a permutation; `unpacking` finds it by having vLLM arrange the numbers of the
elements, so nothing here depends on how it looks, and what is shown is what the layer multiplies with.

Invariant: an arrangement that is not a permutation, or that is not known to leave the matrices as they are, is never
shown as if it were one: `experts` then returns None.
What crosses to the trainer (`to_wire`) is plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from hpcrl.models.files.safetensors_files import Entry

Segment = tuple[int, int]  #: (start, length)
Cut = tuple[tuple[Segment, ...], Segment | None]  #: rows, columns or None for all


@dataclass(frozen=True)
class TensorShard:
    """One tensor of the checkpoint on this worker.

    Attributes:
        shape: of the whole tensor.
        rows, columns: the parts of its first and second dimension that this worker holds, in the order in which it
            holds them (columns None: all); show(): that part as the model uses it.
        same_as: the tensor that this one is tied to and which alone is sent.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[Segment, ...]
    columns: Segment | None
    show: Callable[[], torch.Tensor]
    same_as: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Everything but the tensor, as plain values."""
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            "rows": self.rows,
            "columns": self.columns,
            "same_as": self.same_as,
        }


def in_blocks(segment: Segment, size: int, block: int) -> Segment | None:
    """A segment of `size` elements, counted in blocks; None if a block lies over its edge."""
    start, length = segment
    if start % block or (length % block and start + length != size):
        return None
    return start // block, -(-length // block)


PLAIN = ("TRITON", "BATCHED_TRITON")  #: kernels of CUDA that take the two parameters as they come from the loader
DIGIT = 128  #: numbers below it are exact in every dtype that experts have


def is_experts(layer: nn.Module) -> bool:
    """Whether a module holds unquantised experts, stacked."""
    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) and hasattr(layer, "w13_weight")


def experts(path: str, layer: Any, others: set[int]) -> dict[str, TensorShard] | None:
    """The pieces of every expert of the model, also of those that other workers hold (no rows of them are ours).

    Args:
        others: ids of the parameters of other modules, which a layer may hold too (the router's bias). None: not to be
            shown.
    """
    own = {name for name, p in layer._parameters.items() if p is not None and id(p) not in others}
    gate, up, down = (getattr(layer, f"ckpt_{name}_name", name) for name in ("gate_proj", "up_proj", "down_proj"))
    prefix = path.partition(".experts")[0]
    config = layer.moe_config
    parallel = config.moe_parallel_config
    copies = getattr(parallel, "enable_eplb", False)  # places then change while the engine runs
    if own != {"w13_weight", "w2_weight"} or up is None or copies or _isa(layer) is None:
        return None
    hidden = getattr(config, "hidden_dim_unpadded", None) or layer.hidden_size
    width = getattr(config, "intermediate_size_per_partition_unpadded", None) or layer.intermediate_size_per_partition
    whole = width * parallel.tp_size
    start = width * parallel.tp_rank
    dtype = str(layer.w13_weight.dtype).removeprefix("torch.")
    places = layer.expert_map.tolist() if layer.expert_map is not None else list(range(layer.global_num_experts))
    found = {}
    for number, place in enumerate(places):
        name = f"{prefix}.experts.{number}"
        for half, part in enumerate((gate, up)):
            rows = ((start, width),) if place >= 0 else ((0, 0),)
            show = partial(_half, layer, place, half, width, hidden)
            found[f"{name}.{part}.weight"] = TensorShard((whole, hidden), dtype, rows, None, show)
        rows = ((0, hidden),) if place >= 0 else ((0, 0),)
        found[f"{name}.{down}.weight"] = TensorShard(
            (hidden, whole), dtype, rows, (start, width), partial(_down, layer, place, hidden, width)
        )
    return found


def coded_expert_cuts(path: str, layer: Any, names: Mapping[str, Entry]) -> dict[str, Cut]:
    """This worker's parts of FP8 experts with scales of blocks, by the checkpoint's names; nothing of those that other
    workers hold.

    None of a matrix that it holds whole, or where a block lies over the edge of a part.
    """
    method = getattr(layer, "quant_method", None)
    if (
        type(method) is not Fp8MoEMethod
        or not method.weight_block_size
        or getattr(method, "weight_scale_refine", None) is not None
    ):
        return {}
    config, places, (high, wide) = (
        layer.moe_config,
        getattr(layer, "expert_map_manager", None),
        method.weight_block_size,
    )
    parallel = config.moe_parallel_config
    if places is None or places.num_fused_shared_experts or getattr(config, "tp_shard_with_padding", False):
        return {}
    if getattr(parallel, "enable_eplb", False):  # places then change while the engine runs
        return {}
    gate, up, down = (getattr(layer, f"ckpt_{name}_name", name) for name in ("gate_proj", "up_proj", "down_proj"))
    found: dict[str, Cut] = {}
    for number in range(layer.global_num_experts):
        elsewhere = places.map_global_to_local(number) < 0  # what its loader asks, and then takes nothing
        for part in (gate, up, down):
            coded = f"{path.partition('.experts')[0]}.experts.{number}.{part}.weight"
            scales = f"{coded}_scale_inv"
            if coded not in names or scales not in names:
                continue
            if elsewhere:
                found[coded] = found[scales] = ((0, 0),), None
                continue
            whole, other = names[coded].shape if part != down else reversed(names[coded].shape)
            along, across = (high, wide) if part != down else (wide, high)
            width = whole // parallel.tp_size
            mine = in_blocks((width * parallel.tp_rank, width), whole, along)
            if parallel.tp_size == 1 or whole % parallel.tp_size or mine is None:
                continue
            segment = (width * parallel.tp_rank, width)
            found[coded] = ((segment,), None) if part != down else (((0, other),), segment)
            found[scales] = ((mine,), None) if part != down else (((0, -(-other // across)),), mine)
    return found


def _isa(layer: Any) -> str | None:
    """For which instructions the CPU build arranged the experts; "" if they are as they were loaded, None if
    unknown."""
    method = layer.quant_method
    kernel = getattr(method.moe_kernel, "fused_experts", None)
    if getattr(kernel, "_use_zentorch", False) or kernel is None:
        return None
    backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
    return getattr(kernel, "isa", None) if backend == "CPU" else "" if backend in PLAIN else None


def _half(layer: Any, place: int, half: int, rows: int, columns: int) -> torch.Tensor:
    """The gate (half 0) or up matrix (half 1) of this worker's expert `place`: [rows, columns]; no rows if place <
    0."""
    if place < 0:
        return layer.w13_weight.new_empty(0, columns)
    both = _expert(layer, layer.w13_weight, place)
    begin = half * (both.shape[0] // 2)  # padding follows each half
    return both[begin : begin + rows, :columns].contiguous()


def _down(layer: Any, place: int, rows: int, columns: int) -> torch.Tensor:
    """The down matrix of this worker's expert `place`: [rows, columns]; no rows if place < 0."""
    if place < 0:
        return layer.w2_weight.new_empty(0, columns)
    return _expert(layer, layer.w2_weight, place)[:rows, :columns].contiguous()


def _expert(layer: Any, stacked: torch.Tensor, place: int) -> torch.Tensor:
    """One expert of a stack, arranged as the loader left it."""
    one = stacked.data[place]
    if not (isa := _isa(layer)):
        return one
    return one.reshape(-1)[unpacking(one.shape[0], one.shape[1], one.dtype, isa)].view(one.shape)


@cache
def unpacking(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where each element of a [rows, columns] matrix lies once the CPU build has arranged it: int64 [rows * columns].

    Raises:
        ValueError: if vLLM does more than to rearrange.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = rows * columns
    numbers = torch.arange(count)
    origin = torch.zeros(count, dtype=torch.int64)
    scale = 1
    while scale < count or scale == 1:
        digits = (numbers // scale % DIGIT).to(dtype).view(1, rows, columns)
        origin += cpu_prepack_moe_weight(digits, isa).reshape(-1).long() * scale
        scale *= DIGIT
    found = torch.full((count,), -1)
    found[origin.clamp(0, count - 1)] = numbers
    if (found < 0).any():
        raise ValueError(f"vLLM's arrangement of experts for {isa} is not a permutation")
    return found
