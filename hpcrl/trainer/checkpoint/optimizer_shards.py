"""A rank's part of the optimizer's state in a checkpoint: as much as it holds, where it is, for a save and a load.

Megatron's distributed optimizer cuts the flat buffer of all parameters evenly over the ranks that hold the same
weights, in the middle of a matrix where it falls so.  Its checkpoint that fits any layout ("fully_reshardable") has a
tensor for each parameter and state; to write one, Megatron gathers all ranks' parts on the first of them in fp32, and
to read one, makes room for all of it on every rank.  torch's checkpoints know tensors in pieces, and a range of a
matrix, row by row, is three rectangles at most: the end of a row, whole rows, the beginning of one.  So every rank
writes and reads the rectangles of its own part, under the names and shapes that Megatron gives the tensors.

Invariants: what is in host memory, or on the GPU, is neither gathered nor copied here; a checkpoint's tensors have the
names, shapes and dtype (fp32) of Megatron's, so that either reads the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from hpcrl.errors import HpcrlError
from hpcrl.trainer.megatron.replaced import STOCK

STEP = "step"  #: Megatron keeps it with the groups of parameters
Box = tuple[tuple[int, ...], tuple[int, ...]]  #: offsets, sizes


def param_state(
    optimizer: Any, model: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> dict[int, dict[str, dict[int, ShardedTensor]]] | None:
    """Of each of this rank's parameters and states the rectangles, which hold what is there or, to load, take it in.

    Args:
        optimizer: a DistributedOptimizer.
        model: Megatron's sharded state dict of its model chunks.
        metadata: not used.

    Returns:
        number of the parameter -> name of the state -> number of the rectangle -> fp32 tensor; None for none.
    """
    places = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    found = {}
    for number, (parameter, part) in enumerate(_own(optimizer)):
        place = places[parameter]
        states = _states(optimizer, parameter, is_loading)
        found[number] = {
            name: dict(enumerate(_rectangles(place, f"optimizer.state.{name}.{place.key}", part, state)))
            for name, state in states.items()
        }
    return found or None


@torch.no_grad()
def load_into_optimizer(optimizer: Any, loaded: dict[int, dict[str, dict[int, torch.Tensor]]] | None) -> None:
    """Let the optimizer have what was loaded.

    Args:
        loaded: what `param_state` asked for. Most of it is where it belongs already: that is set once more, without a
            copy.
    """
    for number, (parameter, _) in enumerate(_own(optimizer)):
        tensors = {}
        for name, pieces in (loaded or {})[number].items():
            tensors[name] = _joined([pieces[number].reshape(-1) for number in sorted(pieces)])
        optimizer._set_main_param_and_optimizer_states(parameter, tensors)
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def fill_states(optimizer: Any, loading: bool = False) -> None:
    """Before a save, give an Adam that has not taken a step the moments that it would begin with, as Megatron does
    before a load.

    Else a checkpoint of before the policy's first step (--num-critic-only-steps) lacks what every reader asks for.

    Raises:
        HpcrlError: for one of which a part alone is on the host, whose states Megatron makes in its first step.
    """
    for leaf in () if loading else getattr(optimizer, "chained_optimizers", [optimizer]):
        if fill := getattr(leaf, "init_state_fn", None):
            fill(leaf.optimizer, leaf.config)
        elif isinstance(leaf.optimizer, HybridDeviceOptimizer) and not any(leaf.optimizer.state.values()):
            raise HpcrlError(
                "an optimizer that is partly on the host cannot be saved before its first step",
                "save after --num-critic-only-steps, or leave out --optimizer-offload-fraction",
            )


def _joined(flat: list[torch.Tensor]) -> torch.Tensor:
    """One after another; a copy only of what is not so in memory already."""
    first = flat[0]
    end = first.storage_offset()
    for tensor in flat:
        if tensor.untyped_storage()._cdata != first.untyped_storage()._cdata or tensor.storage_offset() != end:
            return torch.cat(flat)
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _own(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, range]]:
    """The parameters that this rank has a part of, and which elements of them."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, at in bucket["param_map"].items():
                    yield parameter, range(at["param"].start, at["param"].end)


def _states(optimizer: Any, parameter: torch.nn.Parameter, is_loading: bool) -> dict[str, torch.Tensor]:
    """Name -> this rank's part of the parameter in full precision, and of its moments: flat, in fp32."""
    if not converted(optimizer):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        return {name: t.detach() for name, t in tensors.items() if name != STEP and torch.is_tensor(t)}
    adam = optimizer.optimizer
    group, order = optimizer.model_param_group_index_map[parameter]
    mine = adam.param_groups[group]["params"][order]
    made = {}
    for name, state in adam.state[mine].items():
        if torch.is_tensor(state):  # one fp32 tensor on the GPU at a time
            full = torch.empty(mine.shape) if is_loading else adam.get_unscaled_state(mine, name).cpu()
            made["param" if name == "master_param" else name] = full
    return made


def converted(optimizer: Any) -> bool:
    """Whether Transformer Engine's Adam keeps its states in fewer bits, or scaled, so that fp32 is made of them."""
    careful = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return careful and not isinstance(optimizer.optimizer, HybridDeviceOptimizer)


def _rectangles(
    place: ShardedTensor | ShardedTensorFactory, key: str, part: range, state: torch.Tensor
) -> Iterator[ShardedTensor]:
    """The pieces of a checkpoint's tensor that are elements `part` of the parameter at `place`."""
    for whole, begin in _pieces(place, key):
        shape = tuple(whole.local_shape)
        first = max(part.start, begin)
        last = min(part.stop, begin + prod(shape))
        done = first - part.start
        for offsets, sizes in boxes(shape, first - begin, last - begin) if first < last else ():
            size = prod(sizes)
            yield _rectangle(whole, key, offsets, sizes, state[done : done + size])
            done += size


def _pieces(place: ShardedTensor | ShardedTensorFactory, key: str) -> Iterator[tuple[ShardedTensor, int]]:
    """The tensors that Megatron makes of a parameter, without data (of gate and up projection, which are one matrix
    here, two), and the element of the parameter that each begins with."""
    if isinstance(place, ShardedTensor):
        yield place, 0
        return
    blank = torch.empty(place.data.shape, dtype=torch.float32, device="meta")
    for piece in nested_values({"": place.build_fn(key, blank, place.replica_id, None)}):
        assert piece.data.is_contiguous(), f"{key} is stored in pieces that are not rows of the parameter"
        yield piece, piece.data.storage_offset()


def _rectangle(
    whole: ShardedTensor, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], data: torch.Tensor
) -> ShardedTensor:
    axes = whole.prepend_axis_num  # such as the layer: these are axes of the stored tensor alone
    sizes = (1,) * axes + sizes
    return replace(
        whole,
        key=key,
        data=data.view(sizes),
        dtype=data.dtype,
        local_shape=sizes,
        global_offset=tuple(at + by for at, by in zip(whole.global_offset, (0,) * axes + offsets, strict=True)),
        axis_fragmentations=None,  # no grid: ranks' rectangles are of all sizes
        prepend_axis_num=0,
        replica_id=(*whole.replica_id[:-1], 0),  # no other data-parallel rank has it
    )


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of a tensor, row by row, as rectangles in that order."""
    if len(shape) < 2:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = prod(shape[1:])
    while begin < end:
        at, inside = divmod(begin, row)
        rows = (end - begin) // row
        if not inside and rows:  # whole rows
            yield (at, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
            continue
        stop = min(end, (at + 1) * row)
        for offsets, sizes in boxes(shape[1:], inside, stop - at * row):
            yield (at, *offsets), (1, *sizes)
        begin = stop


# ---- torch's Adam, which Megatron's optimizers have without Transformer Engine and Apex


def set_states(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """As Megatron's own of that name, which wants every key of the state; the loader leaves `step` out."""
    group, order = optimizer.model_param_group_index_map[model_param]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    step = {"step": state["step"]} if "step" in state else {}
    STOCK["_set_main_param_and_optimizer_states"](optimizer, model_param, tensors | step)


NO_PARAMETER = "no parameter"  #: in place of one, in the state of an Adam that has none


def _torch_adams(optimizer: Any) -> Iterator[Any]:
    """The torch Adam(W) optimizers inside a Megatron optimizer; of one that is on the CPU, those in it.

    None of one that is partly there and partly on the GPU, where it is not torch's: Megatron fills that one itself.
    """
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(leaf.optimizer, "sub_optimizers", [leaf.optimizer])
        if all(isinstance(one, torch.optim.Adam) for one in inner):
            yield from inner


def before_load(optimizer: Any) -> None:
    """Fill empty Adam states; call it before `sharded_state_dict(..., is_loading=True)`, which asserts that all have a
    step.

    So it does of an Adam without parameters, such as the experts' in a pipeline stage whose layers are all dense: that
    one gets the step of the rank's others, without a tensor.
    """
    adams = list(_torch_adams(optimizer))
    for adam in adams:
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    zeros = {key: torch.zeros_like(param.data) for key in ("exp_avg", "exp_avg_sq")}
                    adam.state[param] = {"step": torch.tensor(0.0), **zeros}
    filled = [any(group["params"] for group in adam.param_groups) for adam in adams]
    steps = [state["step"] for adam, full in zip(adams, filled, strict=True) if full for state in adam.state.values()]
    for adam, full in zip(adams, filled, strict=True):
        if not full:
            adam.state[NO_PARAMETER] = {"step": steps[0].clone() if steps else torch.tensor(0.0)}
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if adams and hasattr(leaf.optimizer, "sub_optimizers"):
            leaf.optimizer._sync_sub_optimizers_state_to_hdo()


def after_load(optimizer: Any) -> None:
    """Give each parameter its own step tensor; call it after `load_state_dict`.

    The stock loader gives one tensor to all parameters, AdamW counts it up once for each, and its bias correction is
    silently wrong.
    """
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
