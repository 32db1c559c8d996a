"""Engines that start without reading the model: their weights come with the first update, before their first request.

vLLM keeps a table of loaders by --load-format; `register_empty_start` adds this one, which `server_settings.flags`
names for the engines of a run that trains.

Invariants: what an update brings is what the model's family says that trainers hold, with the scales of it, and the
receiver refuses an update that leaves a parameter out (weight_loading.py); everything else that the checkpoint has for
the model is read from it here; the same numbers are there on every start and on every GPU that has a part, and nothing
that a layer has computed by itself is overwritten.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from hpcrl.engine.loading.disk_weights import tensors
from hpcrl.engine.server_settings import EMPTY, FILL
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.safetensors_files import listing
from hpcrl.models.files.stacked_experts import single
from hpcrl.run.role import say

CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale")  #: of the cache; a layer without them has its own
DRAWN = ("embed_tokens.weight", ".gate.weight")  #: of embeddings and routers
FILLS = {"zero": 0.0, "nan": float("nan")}


class EmptyStart(DefaultModelLoader):
    """Zeros in place of all that an update brings (NaN, where updates are compared: what is not brought then shows)."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self.fill = FILLS[extra.pop(FILL, "zero")]
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        directory = Path(model_config.model)
        names = listing(directory)
        if not names or _has_online_quant(model):
            say("the model's weights are read from its files: an empty start needs safetensors")
            super().load_weights(model, model_config)
            return
        config = read_config(directory)
        family = find_family(config, str(directory))
        left = family.not_trained(single(names) if family.stacked else names, config)
        empty(model, self.fill)
        if left:
            files = sorted({directory / names[name].file for name in left})
            model.load_weights((name, tensor) for name, tensor in tensors(files) if name in left)
        say(f"starts with empty weights, which the trainers send; {len(left)} tensors are read from {directory}")


@torch.no_grad()
def empty(model: nn.Module, fill: float) -> None:
    """Fill every parameter; scales with 1, so that no kernel divides by 0 in a first pass.

    A first pass of noughts would send every token to the same experts, and so leave most GPUs of an engine without any:
    kernels would be tuned for that, and with DeepEP vLLM would wait for ever. So routers and what they see are random.
    """
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in CACHE or parameter.is_meta:
            continue
        value = 1.0 if "scale" in leaf else fill
        if fill == 0.0 and name.endswith(DRAWN):
            seeded = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=seeded)
            continue
        if fill == 0.0 and name.endswith("norm.weight"):
            value = 1.0
        if not parameter.is_floating_point():
            parameter.data.zero_()
        elif parameter.dtype.itemsize == 1:  # a type of 8 bits may lack NaN, and fill_
            parameter.data.copy_(torch.full((), 0.0 if value != value else value, device=parameter.device))
        else:
            parameter.data.fill_(value)


def register_empty_start() -> None:
    """Make the loader known to vLLM in this process; a second call does nothing."""
    if EMPTY not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(EMPTY)(EmptyStart)
