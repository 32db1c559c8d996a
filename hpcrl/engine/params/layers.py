"""What a vLLM model holds, by the names of the checkpoint, and what it really multiplies with.

vLLM fuses matrices (q, k, v into one), splits them over tensor-parallel workers, and its CPU build replaces each by a
packed copy.  A `TensorShard` says where one checkpoint tensor is on this worker and shows it again: a linear layer by
applying it to the identity (x * 1 + 0 + ... is exact, except for the sign of zero), an embedding by looking up all ids,
experts as experts.py says.

Invariant: `pieces` covers every parameter of the model, or names the modules whose parameters it cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from hpcrl.engine.params.experts import Cut, Segment, TensorShard, coded_expert_cuts, experts, in_blocks, is_experts
from hpcrl.engine.params.special_layers import absorbed, delta_nets
from hpcrl.models.files.safetensors_files import Entry
from hpcrl.weights.comparison import dtype_name

CHUNK = 1024  #: rows of the identity that are multiplied at once


@dataclass(frozen=True)
class Holdings:
    """All pieces by name.

    Attributes:
        opaque: prefixes of names that the model takes but that cannot be shown again, such as those of FP8 layers.
        unseen: what the checkpoint has under them.
        cuts: of those among them whose layer is known to need no more, this worker's part.
    """

    pieces: Mapping[str, TensorShard]
    opaque: tuple[str, ...]
    unseen: Mapping[str, Entry]
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def span(self, name: str, shape: Sequence[int]) -> Cut:
        """The rows and columns of a tensor of that shape which this worker needs; all of it where that is not known."""
        if name in self.pieces:
            return self.pieces[name].rows, self.pieces[name].columns
        if name in self.cuts:
            return self.cuts[name]
        return ((0, shape[0]),), None

    @property
    def wanted(self) -> set[str]:
        """The names that every update must bring."""
        return {name for name, piece in self.pieces.items() if piece.same_as is None} | self.unseen.keys()

    def with_more(self, other: Holdings) -> Holdings:
        """Both together, which have no name in common."""
        return Holdings(
            {**self.pieces, **other.pieces},
            (*self.opaque, *other.opaque),
            {**self.unseen, **other.unseen},
            {**self.cuts, **other.cuts},
        )

    def takes(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return name in self.pieces or name in self.unseen or (not self.unseen and name.startswith(self.opaque or "\0"))

    def wants(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype in which an update must bring a tensor; None if that is not known."""
        found = self.pieces.get(name) or self.unseen.get(name)
        return (found.shape, found.dtype) if found else None


def holdings(model: nn.Module, names: Mapping[str, Entry] | None = None) -> Holdings:
    """Take stock of a loaded model (not in the middle of an update).

    Args:
        names: the tensors of its checkpoint, which tell whether a matrix that vLLM fuses is fused there too.
    """
    modules = dict(model.named_modules())
    if (head := getattr(model, "lm_head", None)) is not None:
        modules.setdefault("lm_head", head)  # where it is the embedding itself, it is listed once only
    return stock(modules, getattr(model, "packed_modules_mapping", None) or {}, names or {})


def stock(
    modules: Mapping[str, nn.Module], packed: Mapping[str, Sequence[str]], names: Mapping[str, Entry]
) -> Holdings:
    """As `holdings`, of modules by their paths in the checkpoint.

    Args:
        packed: the matrices that vLLM fuses into a layer of this name.
    """
    pieces = delta_nets(modules)
    opaque: list[str] = []
    cuts: dict[str, Cut] = {}
    owners: dict[int, str] = {}  # id of an embedding's weight -> its name
    for path, layer in modules.items():
        own = {name: p for name, p in layer._parameters.items() if p is not None}
        if all(f"{path}.{name}" in pieces for name in own):
            continue
        if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            pieces |= _embedding(path, layer, owners)
        elif _is_matrix(layer):
            pieces |= _linear(path, layer, {} if f"{path}.weight" in names else packed)
        elif is_experts(layer) and (parts := experts(path, layer, _ids(modules, layer))) is not None:
            pieces |= parts
        elif getattr(layer, "quant_method", None) is not None:
            opaque += _opaque_prefixes(path, packed)
            cuts |= coded_cuts(path, layer, {} if f"{path}.weight" in names else packed, names) | coded_expert_cuts(
                path, layer, names
            )
        elif not hasattr(layer, "W_UV"):  # whose own are made of another layer's, see special_layers
            pieces |= _plain(
                path, {name: p for name, p in own.items() if f"{path}.{name}" not in pieces}, layer, opaque
            )
    pieces |= absorbed(modules, pieces)
    prefixes = tuple(dict.fromkeys(opaque))
    unseen = {n: e for n, e in names.items() if n not in pieces and n.startswith(prefixes or "\0")}
    return Holdings(pieces, prefixes, unseen, {name: cut for name, cut in cuts.items() if name in unseen})


def _is_matrix(layer: nn.Module) -> bool:
    """Whether a layer is linear and not quantised."""
    linear = isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
    return linear and not _is_convolution(layer)


def _is_convolution(layer: nn.Module) -> bool:
    """Whether a linear layer is how vLLM keeps the weight of a convolution over rows, [channels, 1, size]."""
    return (
        isinstance(layer, LinearBase)
        and isinstance(weight := getattr(layer, "weight", None), torch.Tensor)
        and weight.dim() == 3
    )


def _ids(modules: Mapping[str, nn.Module], layer: nn.Module) -> set[int]:
    """Ids of the parameters of all other modules."""
    return {
        id(p) for other in modules.values() if other is not layer for p in other._parameters.values() if p is not None
    }


def _opaque_prefixes(path: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """How the checkpoint's names of a module begin; vLLM keeps experts in modules of its own below theirs."""
    before, inside, _ = path.partition(".experts")
    if inside:
        return [f"{before}.experts."]
    prefix, dot, leaf = path.rpartition(".")
    return [f"{path}.", *(f"{prefix}{dot}{part}." for part in packed.get(leaf, ()))]


def _embedding(path: str, layer: VocabParallelEmbedding, owners: dict[int, str]) -> dict[str, TensorShard]:
    """An embedding, or the head that turns states into logits (which may be the same tensor, packed another time)."""
    shard = layer.shard_indices
    name = f"{path}.weight"
    is_head = isinstance(layer, ParallelLMHead) or path.rpartition(".")[2] == "lm_head"
    owner = owners.setdefault(id(layer.weight), name)
    rows: Segment = (shard.org_vocab_start_index, shard.num_org_elements)
    show = partial(_product, layer, 0, rows[1]) if is_head else partial(_lookup, layer, rows[1])
    shape = (layer.org_vocab_size, layer.embedding_dim)
    found = {
        name: TensorShard(shape, _dtype(layer.params_dtype), (rows,), None, show, None if owner == name else owner)
    }
    if (bias := getattr(layer, "bias", None)) is not None:
        found[f"{path}.bias"] = TensorShard(
            shape[:1], _dtype(layer.params_dtype), (rows,), None, partial(_part, layer, "bias", 0, rows[1], bias.dtype)
        )
    return found


@dataclass(frozen=True)
class HeldMatrix:
    """A matrix of the checkpoint in a linear layer: its name without .weight, shape, cut, and rows [begin, end) of the
    layer."""

    name: str
    shape: tuple[int, int]
    cut: Cut
    begin: int
    end: int


def matrices_of(path: str, layer: LinearBase, packed: Mapping[str, Sequence[str]]) -> list[HeldMatrix]:
    """Those that were fused into a linear layer."""
    prefix, _, leaf = path.rpartition(".")
    local = list(layer.output_partition_sizes)
    whole = _whole_sizes(layer, local)
    starts = [_start(layer, i, size) for i, size in enumerate(local)]
    offsets = [0, *accumulate(local)]
    names = [f"{prefix}.{part}" if prefix else part for part in packed.get(leaf, [leaf])]
    groups = _groups(leaf, len(names), len(local))
    if len(groups) != len(names):  # fused in the checkpoint too
        names = [path]
    columns = None
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
        columns = (layer.tp_rank * layer.input_size_per_partition, layer.input_size_per_partition)
    found = []
    for name, group in zip(names, groups, strict=True):
        bases = [0, *accumulate(whole[i] for i in group)]
        rows = tuple((base + starts[i], local[i]) for base, i in zip(bases, group, strict=False))
        shape = (bases[-1], layer.input_size)
        found.append(HeldMatrix(name, shape, (rows, columns), offsets[group[0]], offsets[group[-1] + 1]))
    return found


def _groups(leaf: str, names: int, sizes: int) -> list[list[int]]:
    """Which of a layer's output sizes each matrix of the checkpoint has."""
    if names == sizes:
        return [[i] for i in range(sizes)]
    if (leaf, names, sizes) == ("in_proj_qkvz", 2, 4):  # Qwen3.5: queries, keys and values are one, gates another
        return [[0, 1, 2], [3]]
    return [list(range(sizes))]


def coded_cuts(
    path: str, layer: nn.Module, packed: Mapping[str, Sequence[str]], names: Mapping[str, Entry]
) -> dict[str, Cut]:
    """This worker's parts of the FP8 matrices of a linear layer, and of the scales of their blocks, by the checkpoint's
    names.

    None of a matrix where a block lies over the edge of a part, or where the checkpoint's shapes are not what the layer
    says.
    """
    method = getattr(layer, "quant_method", None)
    if type(method) is not Fp8LinearMethod or not method.weight_block_size or not isinstance(layer, LinearBase):
        return {}
    high, wide = method.weight_block_size
    found: dict[str, Cut] = {}
    for matrix in matrices_of(path, layer, packed):
        (rows, columns), (height, width) = matrix.cut, matrix.shape
        grid = -(-height // high), -(-width // wide)
        down = [in_blocks(segment, height, high) for segment in rows]
        across = [in_blocks(columns, width, wide)] if columns is not None else []
        coded = f"{matrix.name}.weight"
        scales = f"{matrix.name}.weight_scale_inv"
        shapes = [tuple(names[name].shape) if name in names else None for name in (coded, scales)]
        if shapes == [matrix.shape, grid] and None not in (*down, *across):
            found[coded] = matrix.cut
            found[scales] = tuple(segment for segment in down if segment), across[0] if across else None
    return found


def _linear(path: str, layer: LinearBase, packed: Mapping[str, Sequence[str]]) -> dict[str, TensorShard]:
    """A linear layer: one piece for each matrix that was fused into it."""
    found: dict[str, TensorShard] = {}
    dtype = _dtype(layer.params_dtype)
    for matrix in matrices_of(path, layer, packed):
        (rows, columns), begin, end = matrix.cut, matrix.begin, matrix.end
        found[f"{matrix.name}.weight"] = TensorShard(
            matrix.shape, dtype, rows, columns, partial(_product, layer, begin, end)
        )
        if getattr(layer, "bias", None) is not None:
            show = partial(_part, layer, "bias", begin, end, layer.params_dtype)
            found[f"{matrix.name}.bias"] = TensorShard(matrix.shape[:1], dtype, rows, None, show)
    extra = {n: p for n, p in layer._parameters.items() if p is not None and n not in ("weight", "bias")}
    return found | {f"{path}.{n}": _whole_piece(layer, n, p) for n, p in extra.items()}


def _whole_sizes(layer: LinearBase, local: list[int]) -> list[int]:
    """Output sizes of each fused matrix over all workers."""
    if isinstance(layer, QKVParallelLinear):
        key_heads = layer.total_num_kv_heads
        return [
            layer.total_num_heads * layer.head_size,
            key_heads * layer.head_size,
            key_heads * getattr(layer, "v_head_size", layer.head_size),
        ]
    if isinstance(layer, ColumnParallelLinear):
        return [size * layer.tp_size for size in local]
    return local


def _start(layer: LinearBase, number: int, size: int) -> int:
    """Where this worker's rows of fused matrix `number` begin."""
    if not isinstance(layer, ColumnParallelLinear):
        return 0
    rank = layer.tp_rank
    if isinstance(layer, QKVParallelLinear) and number > 0:
        rank //= layer.num_kv_head_replicas
    return rank * size


def _plain(path: str, own: Mapping[str, torch.Tensor], layer: nn.Module, opaque: list[str]) -> dict[str, TensorShard]:
    """Parameters that are used as they are, such as the scales of norms.

    Args:
        own: those of the layer, by name.
    """
    found = {}
    for name, parameter in own.items():
        full = f"{path}.{name}" if path else name
        if (
            torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
            and hasattr(parameter, "weight_loader")
        ):
            opaque.append(full)  # split over workers in a way that only its loader knows
        else:
            found[full] = _whole_piece(layer, name, parameter)
    return found


def _whole_piece(layer: nn.Module, name: str, parameter: torch.Tensor) -> TensorShard:
    shape = tuple(parameter.shape)
    rows = ((0, shape[0]),) if shape else ()
    return TensorShard(shape, dtype_name(parameter), rows, None, lambda: getattr(layer, name).data)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(layer: nn.Module, name: str, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a plain parameter, in the dtype in which it was sent (the CPU build widens some biases)."""
    return getattr(layer, name).data[begin:end].to(dtype)


def _lookup(layer: VocabParallelEmbedding, count: int) -> torch.Tensor:
    """The embedding of every id of this worker."""
    ids = torch.arange(count, device=layer.weight.device)
    return layer.quant_method.embedding(layer, ids)


def _product(layer: nn.Module, begin: int, end: int) -> torch.Tensor:
    """Rows [begin, end) of the matrix that a layer multiplies with: its output for the identity, transposed."""
    if isinstance(layer, VocabParallelEmbedding):
        width = layer.embedding_dim
    else:
        width = layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size
    device = next(iter(layer.parameters())).device
    columns = []
    for first in range(0, width, CHUNK):
        rows = torch.zeros(min(CHUNK, width - first), width, dtype=layer.params_dtype, device=device)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        columns.append(layer.quant_method.apply(layer, rows, None)[:, begin:end].t())
    return torch.cat(columns, dim=1).contiguous()


def shown(found: Holdings) -> Iterator[tuple[str, torch.Tensor]]:
    """Every piece as the model uses it, one at a time."""
    with torch.inference_mode():
        for name, piece in found.pieces.items():
            yield name, piece.show()
