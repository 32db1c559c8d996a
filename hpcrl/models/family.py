"""What a model family is: one file next to this one that says how a Hugging Face model becomes a Megatron model.

To add a family, add a file whose `FAMILY` is a `Family` (or whose `FAMILIES` are several); files without are helpers,
and those whose name begins with an underscore may import torch.  Nothing else here imports torch, so a command line can
ask.

Invariant: the architecture is read from the model directory's config.json alone; a setting of it that the family does
not implement is an error, never ignored.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl.config.rules.sampling import layers_behind
from hpcrl.errors import DataError, UsageError
from hpcrl.utils.plugins import PluginFolder

Config = Mapping[str, Any]
SCALES = (".weight_scale", ".weight_scale_inv")  #: how the names of a quantised matrix's scales end
Kind = Literal[
    *("same", "row", "column", "column_swapped", "qkv", "gated_qkv", "gate_up", "fused_gate_up", "vocab"),
    *("delta_in", "delta_in_apart", "delta_conv", "over_heads"),
]


class LayerKind(NamedTuple):
    """What sets the layers of a model apart: with experts or dense, with linear attention or softmax attention."""

    experts: bool = False
    linear: bool = False


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter or buffer and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: its name, with {layer} for the number of the layer and {expert} for that of the expert in the whole
            model.
        kind: how it is cut over tensor-parallel ranks (`slicing.py` does it).
            same     every rank holds the whole          row     columns are cut (RowParallelLinear)
            column   rows are cut (ColumnParallelLinear) vocab   rows are cut, after padding to a multiple of TP
            qkv      three tensors, interleaved by key-value group, rows cut
            gated_qkv  as qkv, with a gate below the queries of each head
            gate_up  two tensors, each cut by rows, stacked; fused_gate_up: one that holds the two, one below the other
            column_swapped  rows are cut, and the left and the right half of the columns change places
            delta_in, delta_in_apart, delta_conv  of a gated delta net, key head by key head
            over_heads  as same, of a norm over all heads of queries or keys together
        hf: names of the tensors, with {layer} and {expert}.
        layers: those that have it: all, only the dense ones, or only those with experts.
        attention: those that have it: all, only those with softmax attention, or only those with a linear one.
        needs: a field of TransformerConfig without which no layer has it, such as qk_layernorm; behind a "!" one with
            which none has it.
        expert: the number of the expert that it belongs to, filled in by `Family.tensors`; None: to no expert.
    """

    megatron: str
    kind: Kind
    hf: tuple[str, ...]
    layers: Literal["all", "dense", "experts"] = "all"
    needs: str = ""
    expert: int | None = None
    attention: Literal["all", "full", "linear"] = "all"

    def on(self, layer: LayerKind) -> bool:
        """Whether a layer of this kind has it."""
        return self.layers in ("all", "experts" if layer.experts else "dense") and self.attention in (
            "all",
            "linear" if layer.linear else "full",
        )

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether layers of a model with these fields of TransformerConfig may have it."""
        name = self.needs.removeprefix("!")
        return not name or bool(fields.get(name)) != self.needs.startswith("!")

    def filled(self, layer: int, expert: int | None = None) -> Rule:
        """The rule with {layer} and {expert} replaced by numbers (a large model has 60,000 of them: no str.format)."""

        def fill(name: str) -> str:
            return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        hf = tuple(map(fill, self.hf))
        return Rule(fill(self.megatron), self.kind, hf, self.layers, self.needs, expert, self.attention)


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        model_type: of config.json.
        transformer: fields of Megatron's TransformerConfig (activation_func by name; with num_moe_experts also
            moe_layer_freq, a list of 0 and 1).
        gpt: arguments of Megatron's GPTModel beyond them.
        rules: see Rule; a rule that no stage holds is not used, so names of both the local and Transformer Engine's
            layers may be here.
        heads: rules of the layers behind the last one (`mtp.py`), with {layer} for the number among those.
        heads_before_norm: these take the hidden states as they are before the model's last norm, not behind it.
        copies: tensors that a checkpoint has for each of those once more -> the model's own of which they are copies.
        stacked: its files have one tensor for all experts of a layer (`models/files/stacked_experts.py`); the rules
            name single ones.
        engine_class: vLLM's class for the part that is trained, where config.json names one for more than that.
        ignored: patterns of tensors that files may hold in excess.
        adapt: changes a layer's spec in place, given the spec, the norm class and the TransformerConfig.
        facts: what Megatron's own flags may say of the model beyond these fields (`model_args.py` compares them).
        specs: words of slime's --spec that stand for the family.
        knows: fields of config.json beyond those of `launch/model_directory.py`.
    """

    model_type: str
    transformer: Callable[[Config], dict[str, Any]]
    gpt: Callable[[Config], dict[str, Any]]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    adapt: Callable[[Any, type, Any], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    specs: tuple[tuple[str, ...], ...] = ()
    heads: tuple[Rule, ...] = ()
    heads_before_norm: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    stacked: bool = False
    engine_class: str = ""
    knows: tuple[str, ...] = ()

    def tensors(self, config: Config, heads: int = 0) -> list[tuple[str, Rule]]:
        """(Megatron name, rule with names filled in) of every parameter, layer by layer in the order of the model.

        Args:
            heads: layers behind the last one that the model is made with.
        """
        fields = self.transformer(config)
        rules = [rule for rule in self.rules if rule.fits(fields)]
        found = [(rule.megatron, rule) for rule in rules if "{layer}" not in rule.megatron]
        experts = fields.get("num_moe_experts") or 0
        for layer, kind in enumerate(layer_kinds(fields)):
            for rule in rules:
                if "{layer}" in rule.megatron and rule.on(kind):
                    found += [(filled.megatron, filled) for filled in _every(rule, layer, experts)]
        if tied(config):  # the last pipeline stage holds a copy of the embedding
            embedding = next(rule for name, rule in found if name == "embedding.word_embeddings.weight")
            found = [(n, Rule(n, "vocab", embedding.hf) if n == "output_layer.weight" else r) for n, r in found]
        return found + [(rule.megatron, rule) for rule in self._of_heads(fields, heads)]

    def copied(self, config: Config, heads: int) -> dict[str, str]:
        """`copies` of so many layers, by their own names."""
        once = {"lm_head.weight": "model.embed_tokens.weight"} if tied(config) else {}
        layers = config["num_hidden_layers"]
        return {
            name.replace("{behind}", str(layers + layer)): once.get(original, original)
            for layer in range(heads)
            for name, original in self.copies.items()
        }

    def _of_heads(self, fields: Mapping[str, Any], heads: int) -> Iterator[Rule]:
        for layer in range(heads):
            behind = str(fields["num_layers"] + layer)
            for rule in self.heads:
                if rule.fits(fields):
                    for filled in _every(rule, layer, fields.get("num_moe_experts") or 0):
                        yield replace(filled, hf=tuple(name.replace("{behind}", behind) for name in filled.hf))

    def not_trained(self, names: Iterable[str], config: Config) -> set[str]:
        """Of the tensors of a checkpoint those that trainers neither hold nor make (scales of their matrices), and that
        are for the model nevertheless, such as scales of a cache."""
        held = {name for _, rule in self.tensors(config) for name in rule.hf}
        scales = {f"{name.removesuffix('.weight')}{suffix}" for name in held for suffix in SCALES}
        return {name for name in names if name not in held | scales and not self.ignores(name, config)}

    def ignores(self, name: str, config: Config) -> bool:
        """Whether a file may hold tensor `name` although the model has no place for it.

        So may the layers behind the last one, which predict further tokens: they take no part in the model's own
        prediction.
        """
        if tied(config) and name == "lm_head.weight":
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and 0 <= int(layer[1]) - config["num_hidden_layers"] < layers_behind(config):
            return True
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def layer_kinds(fields: Mapping[str, Any]) -> list[LayerKind]:
    """The kind of every layer.

    Args:
        fields: `Family.transformer` of config.json.
    """
    none = [0] * fields["num_layers"]
    sparse = fields["moe_layer_freq"] if fields.get("num_moe_experts") else none
    linear = fields.get("linear_attention_freq") or none
    return [LayerKind(bool(has), bool(is_linear)) for has, is_linear in zip(sparse, linear, strict=True)]


def _every(rule: Rule, layer: int, experts: int) -> Iterator[Rule]:
    """The rule for one layer: once, or for each expert."""
    if "{expert}" not in rule.megatron:
        yield rule.filled(layer)
    else:
        yield from (rule.filled(layer, expert) for expert in range(experts))


def registry() -> dict[str, Family]:
    """Every family next to this file, by model_type."""
    folders = map(Path, importlib.import_module(__package__).__path__)
    names = sorted(name for folder in folders for name in PluginFolder(folder).names())
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    families += [family for module in modules for family in getattr(module, "FAMILIES", ())]
    return {family.model_type: family for family in families}


def find_family(config: Config, directory: str | Path) -> Family:
    """The family of a config.json.

    Raises:
        DataError: names the model type and the ones there are; of files whose architecture is a family's under another
            model type (early ones of MiniMax-M2 say minimax) what to write there.
    """
    known = registry()
    asked = config.get("model_type")
    if asked not in known:
        names = config.get("architectures")
        built = [str(name).lower().removesuffix("forcausallm") for name in names] if isinstance(names, list) else []
        if found := next((name for name in known if name.replace("_", "") in built), None):
            raise DataError(
                f"{directory}: model type {asked!r} is not supported, its architecture is that of {found}",
                f'set model_type to "{found}" in config.json',
            )
        raise DataError(f"{directory}: model type {asked!r} is not supported", f"supported: {', '.join(sorted(known))}")
    return known[asked]


def named_by_spec(words: Sequence[str]) -> list[str]:
    """The model_types that the words of --spec stand for; none if no family is known by them."""
    return [family.model_type for family in registry().values() if tuple(words) in family.specs]


def check_spec(words: Sequence[str], config: Config) -> None:
    """Raise UsageError unless --spec, if it is given, names the family of this config.json."""
    if not words:
        return
    named = named_by_spec(words)
    shown = f"--spec {' '.join(words)}"
    if not named:
        known = sorted(" ".join(spec) for family in registry().values() for spec in family.specs)
        raise UsageError(f"{shown} names no model family", f"known: {'; '.join(known)}; or leave the flag out")
    if config.get("model_type") not in named:
        raise UsageError(
            f"{shown} is a {' or '.join(named)} model, config.json says {config.get('model_type')!r}",
            "leave the flag out",
        )


def tied(config: Config) -> bool:
    """Whether the output layer shares the embedding's weight (the default of all these families in transformers:
    no)."""
    return bool(config.get("tie_word_embeddings", False))


def rope(config: Config, share: float = 1.0) -> dict[str, Any]:
    """Rotary settings, from `rope_parameters` (transformers 5) or the attributes and `rope_scaling` of older configs.

    Args:
        share: of a head's columns that are rotated, where the config does not say.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or share)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"theta": theta, "share": share, "kind": kind, "scaling": scaling}


def refuse(config: Config, wanted: Mapping[str, Sequence[Any]]) -> None:
    """Raise DataError if a setting of the config has a value that the family does not implement (absent: fine)."""
    for name, values in wanted.items():
        if name in config and config[name] not in values:
            shown = " or ".join(repr(value) for value in values)
            raise DataError(
                f"config.json of this {config['model_type']} model has {name} = {config[name]!r}",
                f"only {shown} is supported",
            )


def require(config: Config, names: Sequence[str]) -> None:
    """Raise DataError if config.json lacks one of `names`."""
    if missing := [name for name in names if config.get(name) is None]:
        raise DataError(f"config.json of this {config.get('model_type')} model lacks {', '.join(missing)}")
