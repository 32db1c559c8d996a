"""config.json of a Hugging Face model directory and the JSON files next to it; what its quantization_config says;
whether two directories have the same vocabulary.

Invariants: one error text for a file that is missing, unreadable, damaged or not an object, with the flag that named
the directory; for vocabularies nothing but JSON is loaded, and where a directory has no tokenizer.json, only the size
of the vocabulary is compared.  Nothing here needs torch; a quantisation that passes is one that `fp8.Scheme` can do on
the fly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.utils.untrusted_files import MOST, read_given_bytes

CONFIG = "config.json"
#: matrices of linear layers by the last part of their names; everything else of FP8 weights stays: embeddings, heads,
#: norms, routers
LINEAR = re.compile(r"(?:(?:^|\.)(?!eh_proj|weights_proj)\w+_proj(?:_with_mqa)?|\.experts\.[^.]+\.w[123])\.weight$")
#: whole numbers that the size of a model is computed from -> the largest that is taken; some are lengths of lists
COUNTS = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace"), 10_000)
COUNTS |= dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"), 100_000
)
COUNTS |= dict.fromkeys(
    (
        *("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "n_group", "topk_group", "decoder_sparse_step"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "full_attention_interval", "shared_expert_intermediate_size"),
    ),
    1 << 31,
)
_HINT = "name a Hugging Face model directory"


def read_config(directory: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """config.json of `directory`, which `flag` names, with what its `text_config` says of a model of text.

    Raises:
        DataError: if it is not there or no JSON object.
    """
    found = read_object(Path(directory), CONFIG, flag)
    if found is None:
        raise DataError(f"{flag} {directory}: no {CONFIG} there", _HINT)
    found = with_text_part(found)
    for name, most in COUNTS.items():
        value = found.get(name)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            shown = str(value)[:40] if not isinstance(value, int) or abs(value) < 1 << 64 else "a longer number"
            raise DataError(
                f"{flag} {directory}: {CONFIG} has {name} {shown}, expected a whole number of at most {most}",
                "download or copy the model again",
            )
    return found


def with_text_part(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model that also sees images, with what its `text_config` says of the model of text; what it says
    itself counts, such as the model type.
    """
    text = config.get("text_config")
    return text | config if isinstance(text, dict) else config


def read_object(directory: Path, name: str, flag: str = "--hf-checkpoint") -> dict[str, Any] | None:
    """The JSON object in the file `name` of a model directory; None if there is no such file.

    Raises:
        DataError: if it cannot be read.
    """
    path = directory / name
    try:
        found = json.loads(read_given_bytes(path, MOST))  # which takes Infinity, as some published files have it
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{flag} {directory}: {name} cannot be read: {error.strerror}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{flag} {directory}: {name} is not JSON: {error}", "download or copy the model again"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{flag} {directory}: {name} holds no JSON object", _HINT)
    return found


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.json of a model directory that is being made."""
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def check_same_vocabulary(directory: Path, flag: str, own: Path) -> None:
    """Raise DataError, naming `flag` and the first difference, unless the models of both directories have the same
    tokens.

    Args:
        own: the directory of --hf-checkpoint.
    """
    theirs = read_config(directory, flag).get("vocab_size")
    ours = read_config(own).get("vocab_size")
    if theirs != ours:
        raise DataError(
            f"{flag} {directory} has a vocabulary of {theirs} tokens, --hf-checkpoint {own} of {ours}", HINT
        )
    a = _tokens(directory, flag)
    b = _tokens(own)
    if a and b and (different := sorted(id for id in a.keys() | b.keys() if a.get(id) != b.get(id))):
        first = different[0]
        said = f"token {first} is {a.get(first)!r} in {flag} {directory} and {b.get(first)!r} in --hf-checkpoint {own}"
        raise DataError(f"{said}; {len(different)} tokens differ", HINT)


HINT = "a teacher's tokens must be the student's: choose a teacher with the same tokenizer"


def _tokens(directory: Path, flag: str = "--hf-checkpoint") -> dict[int, str]:
    """Id -> token, of tokenizer.json; empty where there is none."""
    found = read_object(directory, "tokenizer.json", flag) or {}
    vocabulary: Any = (found.get("model") or {}).get("vocab")
    tokens: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        tokens = {number: token for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # a unigram model: pairs of token and score
        tokens = {number: entry[0] for number, entry in enumerate(vocabulary)}
    return tokens | {entry["id"]: entry["content"] for entry in found.get("added_tokens") or []}


def read_quantization(config: Mapping[str, Any] | None, where: str) -> dict[str, Any] | None:
    """How matrices are quantised, as fields of `fp8.Scheme`; None if they are not.

    Args:
        where: the file, for messages.

    Raises:
        DataError: for a way of quantising that we cannot do on the fly.
    """
    if not config:
        return None
    method = config.get("quant_method")
    fmt = config.get("fmt", "e4m3")
    power = config.get("scale_fmt") == "ue8m0"
    if (
        method == "fp8"
        and fmt in ("e4m3", "float8_e4m3fn")  # the latter in MiniMax-M2's files
        and config.get("activation_scheme") == "dynamic"
        and config.get("weight_block_size")
    ):
        high, wide = config["weight_block_size"]
        return {"strategy": "block", "block": (int(high), int(wide)), "power_of_two": power}
    if method == "compressed-tensors" and config.get("format") == "float-quantized":
        groups = list(config.get("config_groups", {}).values())
        weights = groups[0].get("weights", {}) if len(groups) == 1 else {}
        if (
            weights.get("num_bits") == 8
            and weights.get("strategy") in ("channel", "tensor")
            and weights.get("symmetric")
        ):
            return {"strategy": weights["strategy"], "power_of_two": power}
    raise DataError(
        f"{where} has a quantization_config ({method}) that hpcrl cannot convert updates to",
        "give a checkpoint of hpcrl convert to-fp8, or one without quantisation",
    )
