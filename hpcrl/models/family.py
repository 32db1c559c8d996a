"""What a model family is: one file beside this one that says how a Hugging Face model becomes a Megatron model.

To add a family, add a file whose `FAMILY` is a `Family`.  Nothing here imports torch, so a command line can ask.

Invariant: the architecture is read from the model directory's config.json alone; a setting of it that the family does
not implement is an error, never ignored.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrl.errors import DataError

Config = Mapping[str, Any]
Kind = Literal["same", "row", "column", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    megatron: its name, with {layer} for the number of the layer in the whole model.
    kind: how it is cut over tensor-parallel ranks (`trainer/slicing.py` does it).
        same     every rank holds the whole          row     columns are cut (RowParallelLinear)
        column   rows are cut (ColumnParallelLinear) vocab   rows are cut, after padding to a multiple of TP
        qkv      three tensors, interleaved by key-value group, rows cut
        gate_up  two tensors, each cut by rows, stacked
    hf: names of the tensors, with {layer}.
    """

    megatron: str
    kind: Kind
    hf: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """model_type: of config.json.  transformer: fields of Megatron's TransformerConfig (activation_func by name).
    gpt: arguments of Megatron's GPTModel beyond them.  rules: see Rule; a rule that no stage holds is not used, so names
    of both the local and Transformer Engine's layers may stand here.  ignored: patterns of tensors that files may hold in
    excess.  adapt: changes a layer's spec in place, given the spec, the norm class and the TransformerConfig.
    """

    model_type: str
    transformer: Callable[[Config], dict[str, Any]]
    gpt: Callable[[Config], dict[str, Any]]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    adapt: Callable[[Any, type, Any], None] | None = None

    def tensors(self, config: Config) -> list[tuple[str, Rule]]:
        """(Megatron name, rule with names filled in) of every parameter, layer by layer in the order of the model."""
        plain = [rule for rule in self.rules if "{layer}" not in rule.megatron]
        layered = [rule for rule in self.rules if "{layer}" in rule.megatron]
        found = [(rule.megatron, rule) for rule in plain]
        for layer in range(config["num_hidden_layers"]):
            for rule in layered:
                name = rule.megatron.format(layer=layer)
                found.append((name, Rule(name, rule.kind, tuple(x.format(layer=layer) for x in rule.hf))))
        if tied(config):  # the last pipeline stage holds a copy of the embedding
            embedding = next(rule for name, rule in found if name == "embedding.word_embeddings.weight")
            found = [(n, Rule(n, "vocab", embedding.hf) if n == "output_layer.weight" else r) for n, r in found]
        return found

    def ignores(self, name: str, config: Config) -> bool:
        """Whether a file may hold tensor `name` although the model has no place for it."""
        if tied(config) and name == "lm_head.weight":
            return True
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def registry() -> dict[str, Family]:
    """Every family beside this file, by model_type."""
    package = importlib.import_module(__package__)
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "family"]
    families = [importlib.import_module(f"{__package__}.{name}").FAMILY for name in sorted(names)]
    return {family.model_type: family for family in families}


def find(config: Config, directory: str | Path) -> Family:
    """The family of a config.json.  DataError names the model type and the ones there are."""
    known, asked = registry(), config.get("model_type")
    if asked not in known:
        raise DataError(f"{directory}: model type {asked!r} is not supported", f"supported: {', '.join(sorted(known))}")
    return known[asked]


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory.  DataError if it is not there or no JSON object."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "--hf-checkpoint names a Hugging Face model directory") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no JSON object")
    return config


def tied(config: Config) -> bool:
    """Whether the output layer shares the embedding's weight (transformers' default: yes)."""
    return bool(config.get("tie_word_embeddings", True))


def rope(config: Config) -> dict[str, Any]:
    """Rotary settings, from `rope_parameters` (transformers 5) or the attributes and `rope_scaling` of older configs."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"theta": theta, "share": share, "kind": kind, "scaling": scaling}


def refuse(config: Config, wanted: Mapping[str, Sequence[Any]]) -> None:
    """DataError if a setting of the config is none of the values that the family implements (absent: fine)."""
    for name, values in wanted.items():
        if name in config and config[name] not in values:
            shown = " or ".join(repr(value) for value in values)
            raise DataError(
                f"config.json of this {config['model_type']} model has {name} = {config[name]!r}", f"only {shown} is supported"
            )


def require(config: Config, names: Sequence[str]) -> None:
    """DataError if config.json lacks one of `names`."""
    if missing := [name for name in names if config.get(name) is None]:
        raise DataError(f"config.json of this {config.get('model_type')} model lacks {', '.join(missing)}")
