"""Tiny models whose checkpoints have a layer that predicts a further token: MiMo, and GLM-4.5 with experts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import make_family


def make_mimo(directory: str | Path, **more: Any) -> Path:
    """Save a random MiMo, and a tokenizer, in `directory`; returns it.  more: as of `make_family`."""
    return as_mimo(make_family(directory, "qwen2", **more))


def as_mimo(model: Path) -> Path:
    """Make a Qwen2 in a directory a MiMo, whose further layer is random; returns it."""
    config, tensors = _read(model)
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    head = "model.mtp_layers.0."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        tensors |= _like(tensors, last, head)
        tensors |= _own(config, head, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
    known = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    known["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"} | {
        name: f"modeling_mimo.MiMo{name.removeprefix('Auto')}" for name in ("AutoModel", "AutoModelForCausalLM")
    }
    return _write(model, config | known | {"attention_bias": True}, tensors)


def make_glm(directory: str | Path, family: str = "glm4_moe", **more: Any) -> Path:
    """Save a random GLM-4.5 with experts, or another family whose checkpoints have the layer behind the last one, as
    published ones are: with copies of embedding and output layer."""
    model = make_family(directory, family, **more)
    config, tensors = _read(model)
    layers = config["num_hidden_layers"]
    head = f"model.layers.{layers}."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(18)
        tensors |= _like(tensors, f"model.layers.{layers - 1}.", head)
        tensors |= _own(config, head, ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    tensors[f"{head}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return _write(model, config | {"num_nextn_predict_layers": 1}, tensors)


MAKERS = {"mimo": make_mimo, "glm4_moe": make_glm}
MAKERS |= {
    "deepseek_v3": partial(make_glm, family="deepseek_v3"),
    # what transformers has in the two inner norms, whatever config.json says
    "glm4_moe_lite": partial(make_glm, family="glm4_moe_lite", rms_norm_eps=1e-6),
}


def _read(model: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")


def _write(model: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model


def _like(tensors: dict[str, torch.Tensor], last: str, head: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer, drawn again."""
    found = {head + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    return {name: tensor + 0.2 * tensor.std() * torch.randn_like(tensor) for name, tensor in found.items()}


def _own(config: dict[str, Any], head: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    width = config["hidden_size"]
    norms = {f"{head}{name}.weight": torch.empty(width).uniform_(0.8, 1.2) for name in names}
    return norms | {f"{head}{names[2]}.weight": 0.1 * torch.randn(width, 2 * width)}
