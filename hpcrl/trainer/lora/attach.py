"""A model with adapters: frozen weights, and adapters next to its linear layers.

    attach(module, family, config.json, settings, ranks)     # before DDP, which then knows of trained parameters alone

Invariants: a parameter that is not an adapter's has no gradient, no optimizer state and no place in DDP's buffers; the
first layer's input asks for a gradient, or activations that are computed again would give none to the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from hpcrl.models.family import Config, Family
from hpcrl.models.lora.matrices import AdaptedMatrix, adapted
from hpcrl.models.lora.settings import LoraSettings
from hpcrl.models.slicing import Shapes
from hpcrl.trainer.global_names import in_whole_model
from hpcrl.trainer.lora.layer import SUFFIX, Adapter, GroupedAdapter, add_to
from hpcrl.trainer.parallel_state import Ranks


@dataclass
class BaseIdentity:
    """Which weights adapters belong to: filled in once they are read (`saved.py`)."""

    digest: str = ""
    path: str = ""


def attach(
    module: GPTModel,
    family: Family,
    hf_config: Config,
    settings: LoraSettings,
    ranks: Ranks,
    trained_too: Sequence[str],
) -> None:
    """Freeze a chunk's parameters and give its linear layers adapters, without values yet.

    Args:
        trained_too: how names of parameters begin that are trained as they are.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name.startswith(tuple(trained_too)) if trained_too else False
    matrices = {matrix.layer: matrix for matrix in adapted(family.tensors(hf_config), settings)}
    for name, layer in list(module.named_modules()):
        whole = in_whole_model(module, f"{name}.weight", ranks).removesuffix(".weight")
        if whole in matrices:
            _set(module, name, _adapter(layer.weight, matrices[whole], settings, module, ranks), layer)
        elif grouped := list(_grouped(module, name, layer, matrices, ranks)):
            adapters = [_adapter(weight, matrix, settings, module, ranks) for weight, matrix in grouped]
            _set(module, name, GroupedAdapter(adapters), layer)
    if module.pre_process:
        module.embedding.register_forward_hook(_asks_for_gradient)


def _grouped(
    module: GPTModel, name: str, layer: torch.nn.Module, matrices: dict[str, AdaptedMatrix], ranks: Ranks
) -> Iterator[tuple[torch.Tensor, AdaptedMatrix]]:
    """The matrices of the experts of one layer that holds several, in its order."""
    for own, weight in layer.named_parameters(recurse=False):
        number = own.removeprefix("weight")
        if not own.startswith("weight") or not number.isdigit():
            return
        whole = in_whole_model(module, f"{name}.{own}", ranks)
        found = matrices.get(whole.replace(".weight", "."))
        if found is None:
            return
        yield weight, found


def _adapter(
    weight: torch.Tensor, matrix: AdaptedMatrix, settings: LoraSettings, module: GPTModel, ranks: Ranks
) -> Adapter:
    expert = matrix.base.expert is not None
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    shapes = Shapes.from_config(vars(module.config), 0, ranks.etp_size if expert else ranks.tp_size)
    return Adapter(matrix, settings, module.config, weight, group, shapes)


def _set(module: GPTModel, name: str, adapter: Adapter | GroupedAdapter, layer: torch.nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner).add_module(f"{own}{SUFFIX}", adapter)
    add_to(layer, adapter)


def _asks_for_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
