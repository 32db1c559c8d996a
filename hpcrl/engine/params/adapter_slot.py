"""The adapter of an engine: the slot of vLLM's LoRA layers that an update finds, fills and compares.

vLLM keeps A and B of its slots in stacked tensors, next to a layer that may be several of the checkpoint's matrices in
one, and multiplies what was put there.  It would read an adapter's files; here its tensors come with an update and are
written where they are multiplied from, in place, while nothing is computed.

Invariants: every matrix that has an adapter has a place here, or the engine does not serve; nothing is served before
the first update, since there are no files that the adapter could be read from; B comes with its scale multiplied in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from hpcrl.engine.params.experts import TensorShard
from hpcrl.engine.params.layers import HeldMatrix, Holdings, matrices_of
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.safetensors_files import Entry
from hpcrl.models.lora.matrices import adapted, leaf, lora_name
from hpcrl.models.lora.serving import NUMBER
from hpcrl.models.lora.settings import LoraSettings
from hpcrl.weights.comparison import dtype_name

#: part of a tensor of the slot
SlotView = Callable[[], torch.Tensor]


class AdapterSlot:
    """What a worker's model multiplies with of its adapter.

    Attributes:
        runner: vLLM's model runner.
        settings: of the adapter.
    """

    def __init__(self, runner: Any, settings: LoraSettings) -> None:
        self.runner = runner
        self.settings = settings
        self._places: dict[str, list[tuple[SlotView, int, tuple[int, int]]]] = {}
        model = runner.get_model()
        self._wrapped = [
            (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], layer)
            for path, layer in model.named_modules()
            if isinstance(layer, BaseLayerWithLoRA)
        ]
        # vLLM empties its slots when an update ends, since it takes it for one of the weights under them
        runner.reset_lora_state = lambda: None
        replace_products(self._manager)

    def holdings(self, directory: str, names: Mapping[str, Entry]) -> Holdings:
        """All of the adapter's tensors, with this worker's part of each.

        Args:
            directory: of the model.
            names: the tensors of its checkpoint.

        Raises:
            ValueError: names matrices that have an adapter, and for which vLLM has no place.
        """
        config = read_config(directory)
        wanted = {
            matrix.base.hf[part]
            for matrix in adapted(find_family(config, directory).tensors(config), self.settings)
            for part in matrix.parts
        }
        packed = getattr(self.runner.get_model(), "packed_modules_mapping", None) or {}
        pieces: dict[str, TensorShard] = {}
        for path, layer in self._manager.modules.items():
            base = getattr(layer, "base_layer", None)
            if base is None or not hasattr(layer, "lora_a_stacked") or not hasattr(base, "output_partition_sizes"):
                continue
            fused = {} if f"{path}.weight" in names else packed
            for matrix in matrices_of(path, base, fused):
                if f"{matrix.name}.weight" in wanted and (slices := _slices(layer, matrix)):
                    pieces |= self._pieces(layer, slices, matrix)
        if missing := sorted(weight for weight in wanted if lora_name(weight, "B") not in pieces):
            kinds = ", ".join(dict.fromkeys(map(leaf, missing)))
            raise ValueError(f"vLLM does not support an adapter of {kinds} ({missing[0]}): give --lora-serve merged")
        return Holdings(pieces, (), {})

    def show_base(self, alone: bool) -> None:
        """Have the model be the base as it is without vLLM's LoRA layers, or with these again."""
        for owner, name, layer in self._wrapped:
            setattr(owner, name, layer.base_layer if alone else layer)

    def register(self) -> None:
        """Let requests find the adapter, of zeros until its tensors are there."""
        manager = self._manager
        if NUMBER not in manager.list_adapters():  # its own way in asks for the tensors
            manager._registered_adapters[NUMBER] = LoRAModel(NUMBER, self.settings.rank, {})
        manager.activate_adapter(NUMBER)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put this worker's parts of tensors where they are multiplied from."""
        for name, tensor in tensors:
            for slot, dimension, (start, length) in self._places[name]:
                slot().copy_(tensor.narrow(dimension, start, length))

    @property
    def _manager(self) -> Any:
        return self.runner.lora_manager._adapter_manager

    def _pieces(self, layer: Any, slices: list[int], matrix: HeldMatrix) -> dict[str, TensorShard]:
        rank = self.settings.rank
        (rows, columns), shape = matrix.cut, matrix.shape
        a, b = (lora_name(f"{matrix.name}.weight", which) for which in "AB")
        width = columns[1] if columns is not None else shape[1]
        stacked_a = [layer.lora_a_stacked[number] for number in slices]
        stacked_b = [layer.lora_b_stacked[number] for number in slices]
        inputs = [partial(_view, of, (slice(rank), slice(width))) for of in stacked_a]
        outputs = [partial(_view, of, (slice(None), slice(rank))) for of in stacked_b]
        beyond = [partial(_view, of, (slice(rank, None),)) for of in stacked_a]
        beyond += [partial(_view, of, (slice(None), slice(rank, None))) for of in stacked_b]
        self._places[a] = [(slot, 1, columns or (0, shape[1])) for slot in inputs]  # each slice has all of it
        ends = [0, *accumulate(length for _, length in rows)]
        parts = outputs
        if len(outputs) != len(rows):
            parts = [partial(_view, stacked_b[0], (slice(i, j), slice(rank))) for i, j in pairwise(ends)]
        self._places[b] = [(slot, 0, segment) for slot, segment in zip(parts, rows, strict=True)]
        dtype = dtype_name(inputs[0]())
        return {
            a: TensorShard((rank, shape[1]), dtype, ((0, rank),), columns, partial(_same, inputs, beyond)),
            b: TensorShard((shape[0], rank), dtype, rows, None, lambda: torch.cat([part() for part in outputs])),
        }


def _view(stacked: torch.Tensor, cut: tuple[slice, ...]) -> torch.Tensor:
    """What the slot has of one of vLLM's stacked tensors, [slots, 1, rows, columns]."""
    return stacked[(0, 0, *cut)]


def _slices(layer: Any, matrix: HeldMatrix) -> list[int]:
    """Which of a layer's stacked tensors a matrix of the checkpoint has; none if they do not divide it so."""
    found = []
    begin = 0
    for number, stacked in enumerate(layer.lora_b_stacked):
        end = begin + stacked.shape[2]
        if matrix.begin <= begin and end <= matrix.end:
            found.append(number)
        begin = end
    rows = sum(layer.lora_b_stacked[number].shape[2] for number in found)
    return found if rows == matrix.end - matrix.begin else []


def _same(slots: list[SlotView], beyond: list[SlotView]) -> torch.Tensor:
    """What all slices hold; not a number where they differ, or where there is something beyond the adapter's rank."""
    first = slots[0]()
    right = all(torch.equal(first, slot()) for slot in slots) and not any(bool(rest().any()) for rest in beyond)
    return first if right else torch.full_like(first, torch.nan)


# ---- products on CPUs
#
# What vLLM multiplies with next to a layer's matrix on CPUs: each adapter once, with all tokens that are under it.
#
# vLLM's own for CPUs copies an adapter's matrices for every token before it multiplies, which takes as long as all
# else of a small model. GPUs have kernels, and keep them.
#
#     replace_products(manager)     # vLLM's manager of adapters, once its layers are there
#
# Invariants: the sums are those of vLLM's, in the same precision, in another order; those of a token do not depend on
# the tokens that are computed with it, to the last bit (one product of all of them would: with their number another
# kernel is taken); a token under no adapter gets nothing; no class of vLLM's is changed.

#: the tokens under a slot: all of them (None), or their places
Rows = torch.Tensor | None


class AdapterProducts(PunicaWrapperCPU):
    """Made in place of another one, with its state."""

    def __init__(self, other: PunicaWrapperCPU) -> None:
        self.__dict__ |= vars(other)
        self._under: list[tuple[int, Rows]] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Know which tokens of the next pass are under which slot."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        found = slots.unique().tolist()
        if len(found) == 1:
            self._under = [(found[0], None)] if found[0] >= 0 else []
        else:
            self._under = [(slot, (slots == slot).nonzero().flatten()) for slot in found if slot >= 0]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add scale x A^T B^T of its adapter to each token's row of `y`, slice by slice of a layer.

        Args:
            y: [tokens, columns of all slices], changed in place.
            x: [tokens, inputs].
            lora_a_stacked: of each slice [slots, 1, rank, inputs].
            lora_b_stacked: of each slice [slots, 1, columns, rank].
            output_slices: the columns of each.
            buffer: not used.
        """
        for slot, rows in self._under:
            inputs = (x if rows is None else x[rows]).float().unsqueeze(1)
            begin = 0
            for a, b, columns in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                inner = scale * _row_by_row(inputs, a[slot, 0].float())
                added = _row_by_row(inner.to(y.dtype), b[slot, 0].to(y.dtype)).squeeze(1)
                part = y[:, begin : begin + columns]
                if rows is None:
                    part += added[:, :columns]
                else:
                    part.index_add_(0, rows, added[:, :columns])
                begin += columns


def _row_by_row(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The product of each row with the same matrix.

    Args:
        rows: [tokens, 1, inputs].
        matrix: [outputs, inputs].

    Returns:
        [tokens, 1, outputs].
    """
    return torch.bmm(rows, matrix.T.unsqueeze(0).expand(len(rows), -1, -1))


def replace_products(manager: Any) -> None:
    """Have the layers of vLLM's LoRAModelManager multiply so, if they are on CPUs."""
    for name, given in manager.punica_wrapper_mapping.items():
        if type(given) is PunicaWrapperCPU:
            manager.punica_wrapper_mapping[name] = own = AdapterProducts(given)
            for layer in manager.modules.values():
                if getattr(layer, "punica_wrapper", None) is given:
                    layer.set_mapping(own)
    manager._last_mapping = None  # so that the next pass sets the mapping again
