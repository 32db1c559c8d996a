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

from hpcrl.engine.params.cpu_products import replace_products
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
            raise ValueError(f"vLLM has no place for the adapter of {kinds} ({missing[0]}): give --lora-serve merged")
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
            b: TensorShard((shape[0], rank), dtype, rows, None, partial(_whole, outputs)),
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


def _whole(parts: list[SlotView]) -> torch.Tensor:
    """The rows of all slices."""
    return torch.cat([part() for part in parts])
