"""Layers behind a model's last one that predict further tokens (multi-token prediction, MTP): names and rules.

Such a layer takes the model's last hidden states at token t and the embedding of token t + 1, joins them by one matrix,
and sends the result through a layer like the model's own; the model's output layer then predicts token t + 2
(DeepSeek-V3, arXiv:2412.19437, section 2.2).  It takes no part in the model's own prediction.

Invariant: the rules of such a layer are those of the family's own layers under other names, and four more; a model is
made with them only where --mtp-num-layers asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hpcrl.config.options import Options
from hpcrl.config.rules.sampling import layers_behind
from hpcrl.errors import UsageError
from hpcrl.models.family import Config, Family, Kind, Rule, registry
from hpcrl.models.shared.dense import H, M

HEADS = "mtp.layers.{layer}."  #: what Megatron's names begin with
#: of a checkpoint that has such a layer among the model's own, behind the last one: how its names begin, those of its
#: own four parts, and its copies of the model's tensors
BEHIND = "model.layers.{behind}."
OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
COPIES = {
    BEHIND + "embed_tokens.weight": "model.embed_tokens.weight",
    BEHIND + "shared_head.head.weight": "lm_head.weight",
}
_NEWER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")
MOST = 1  #: layers that the families' checkpoints have, and that vLLM's models draft with


def heads(
    rules: Sequence[Rule],
    which: Literal["dense", "experts"],
    hf: str,
    own: tuple[str, str, str, str],
    joined: Kind = "column",
) -> tuple[Rule, ...]:
    """The rules of one such layer.

    Args:
        rules: of the family's own layers.
        which: of them it is like.
        hf: what its names begin with in a checkpoint; {layer} counts these layers alone, {behind} all of the model's.
        own: names of the embedding's norm, the hidden states' norm, the matrix that joins them, and the last norm.
        joined: how that matrix is laid out: Megatron's has the embedding's columns before the hidden states'.
    """
    inner = [rule for rule in rules if rule.megatron.startswith(M) and rule.layers in ("all", which)]
    moved = (
        replace(
            rule,
            megatron=rule.megatron.replace(M, f"{HEADS}transformer_layer."),
            hf=tuple(name.replace(H, hf) for name in rule.hf),
        )
        for rule in inner
    )
    kinds: tuple[Kind, ...] = ("same", "same", joined, "same")
    names = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    return (
        *(
            Rule(f"{HEADS}{name}.weight", kind, (f"{hf}{theirs}.weight",))
            for name, kind, theirs in zip(names, kinds, own, strict=True)
        ),
        *moved,
    )


def check_heads(o: Options, family: Family, config: Config) -> None:
    """Raise UsageError if --mtp-num-layers asks for layers that the model has not."""
    if not (asked := o.mtp_num_layers):
        return
    shown = f"--mtp-num-layers {asked}"
    if not (known := layers_behind(config)):
        raise UsageError(
            f"{shown}: the model has no layers that predict further tokens (num_nextn_predict_layers of config.json)",
            "leave it out",
        )
    if not family.heads:
        having = ", ".join(sorted(name for name, other in registry().items() if other.heads))
        raise UsageError(
            f"{shown}: hpcrl does not train the layers of a {family.model_type} model that predict further tokens",
            f"leave it out: it trains those of {having}",
        )
    if asked > min(known, MOST):
        raise UsageError(f"{shown}: {min(known, MOST)} is the most for this model", "give that many")
    if o.refreshes_drafts and asked != known:
        raise UsageError(
            f"{shown} and --vllm-speculative-config: engines draft with {known} layers, updates bring {asked}",
            "leave one of them out",
        )
    if o.refreshes_drafts and (quantised := _quantised(o, config)):
        raise UsageError(
            f"{shown} and --vllm-speculative-config: updates do not bring quantised layers to draft with ({quantised})",
            "give an --hf-checkpoint in BF16 and nothing that quantises it, or leave one of them out",
        )


def _quantised(o: Options, config: Config) -> str:
    """What asks engines for quantised layers to draft with; "" if nothing does."""
    if config.get("quantization_config"):
        return "quantization_config of the --hf-checkpoint's config.json"
    if o.vllm.get("quantization"):
        return f"--vllm-quantization {o.vllm['quantization']}"
    own = (o.vllm.get("speculative_config") or {}).get("quantization")
    return f'"quantization": "{own}" of --vllm-speculative-config' if own else ""


def is_head(megatron: str) -> bool:
    """Whether a parameter of this name is of such a layer."""
    return megatron.startswith(HEADS.partition("{")[0])


def mtp_name(parameter: str) -> str:
    """A parameter's name as rules and checkpoints have it: the model of Megatron-core 0.19 has `mtp_model_layer` where
    that of 0.16 has `transformer_layer`."""
    return _NEWER.sub(r"\1transformer_layer.", parameter)
