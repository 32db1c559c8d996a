"""An adapter in files, as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Invariants: a setting of such a file that is not implemented is an error, never ignored; names here are without PEFT's
"base_model.model." in front, which the files have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.models.files.config_json import read_object
from hpcrl.models.lora.matrices import AdaptedMatrix, leaf, lora_name
from hpcrl.models.lora.settings import LoraSettings
from hpcrl.run.rundir import write_atomic

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
AS_PEFT = "name a directory as PEFT writes it; hpcrl convert to-hf makes one of a run"
NOT_PLAIN = "only plain LoRA is supported: merge this one into its base with PEFT, and train a new one over that"
BASE = "hpcrl_base"  #: in the file's metadata: the digest of the base
PREFIX = "base_model.model."
#: settings of PEFT's that change what an adapter computes, and the values with which they do not
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
#: those that change nothing of what files hold
_HARMLESS = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "task_type", "base_model_name_or_path", "revision"),
    *("target_modules", "exclude_modules", "inference_mode", "peft_version", "auto_mapping", "megatron_config"),
    *("megatron_core", "loftq_config", "qalora_group_size", "layers_pattern", "runtime_config", "eva_config"),
    "ensure_weight_tying",
}


def read_settings(directory: Path) -> LoraSettings:
    """What adapter_config.json says: rank, alpha, dropout and scaling.

    Raises:
        DataError: names the setting that is not implemented.
    """
    found = read_object(directory, CONFIG, "--lora-adapter-path")
    if found is None:
        raise DataError(f"{directory} has no {CONFIG}", AS_PEFT)
    for name, plain in _PLAIN.items():
        if name in found and found[name] not in plain:
            raise DataError(f"{directory / CONFIG} has {name} = {found[name]!r}", NOT_PLAIN)
    if odd := sorted(
        name for name in found.keys() - _PLAIN.keys() - _HARMLESS if found[name] not in (None, False, [], {})
    ):
        raise DataError(f"{directory / CONFIG} has {odd[0]} = {found[odd[0]]!r}", NOT_PLAIN)
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise DataError(f"{directory / CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
    return LoraSettings(
        rank, alpha, float(found.get("lora_dropout") or 0.0), rank_stabilized=bool(found.get("use_rslora"))
    )


def check_settings(directory: Path, settings: LoraSettings) -> None:
    """Raise DataError for an adapter that is not of these settings: it names all that is different, and the flags."""
    said = read_settings(directory)
    every = (
        (f"--lora-rank {said.rank}", said.rank, settings.rank),
        (f"--lora-alpha {said.alpha:g}", said.alpha, settings.alpha),
        ("--use-rslora" if said.rank_stabilized else "--no-use-rslora", said.rank_stabilized, settings.rank_stabilized),
    )
    if flags := [flag for flag, its, own in every if its != own]:
        wanted = " ".join(flags)
        raise DataError(
            f"--lora-adapter-path {directory} is an adapter of {wanted}, and this run is not", f"give {wanted}"
        )


def read_adapter(directory: Path, settings: LoraSettings | None = None) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, by name.

    Args:
        settings: what it must be like.

    Raises:
        DataError: names what is different, or cannot be read.
    """
    from contextlib import ExitStack

    from hpcrl.models.files.safetensors_files import SafetensorsDirectory, read_header

    if settings is not None:
        check_settings(directory, settings)
    else:
        read_settings(directory)
    names = read_header(directory / TENSORS)
    if not names:
        raise DataError(f"{directory / TENSORS} holds no adapter")
    with ExitStack() as stack:
        files = SafetensorsDirectory(directory, stack, dict.fromkeys(names, TENSORS))
        return {name.removeprefix(PREFIX): files.slice(name)[...].clone() for name in names}


def pairs(tensors: Mapping[str, torch.Tensor], settings: LoraSettings, source: Path) -> list[str]:
    """Names of the matrices that an adapter is of, each with an A and a B of its rank and nothing else.

    Raises:
        DataError: names what is not so.
    """
    weights = sorted({name.rpartition(".lora_")[0] + ".weight" for name in tensors})
    wanted = {lora_name(weight, which) for weight in weights for which in "AB"}
    if odd := sorted(wanted ^ tensors.keys()):
        what = "holds" if odd[0] in tensors else "lacks"
        raise DataError(f"{source} {what} {odd[0]}", "only plain LoRA is supported: an A and a B for each matrix")
    for weight in weights:
        a, b = (tuple(tensors[lora_name(weight, which)].shape) for which in "AB")
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (settings.rank, settings.rank):
            raise DataError(f"{source}: A and B of {weight} are {list(a)} and {list(b)}, the rank is {settings.rank}")
    return weights


def base_digest_of(directory: Path) -> str:
    """The digest of the base that an adapter's file says it was trained over; "" if it says none."""
    from safetensors import safe_open

    with safe_open(directory / TENSORS, "pt") as file:
        return (file.metadata() or {}).get(BASE, "")


def write_adapter(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    targets: Iterable[str],
    base: str,
    digest: str = "",
) -> None:
    """Write both files into a directory.

    Args:
        targets: for PEFT's target_modules.
        base: what was trained over, a directory.
        digest: of it.
    """
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "revision": None,
    }
    metadata = {"format": "pt"} | ({BASE: digest} if digest else {})
    named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / TENSORS, metadata)
    (directory / TENSORS).chmod(0o644)  # as all that an export writes: a new file of safetensors' is its owner's alone
    write_atomic(directory / CONFIG, (json.dumps(config, indent=2) + "\n").encode(), mode=0o644)


def target_names(matrices: Collection[AdaptedMatrix], every: Collection[AdaptedMatrix]) -> set[str]:
    """The shortest names that mean these matrices and no others: last words, or whole names.

    Args:
        every: all that could have an adapter.
    """
    own = {matrix.base.hf[part] for matrix in matrices for part in matrix.parts}
    others = {leaf(name) for matrix in every for name in matrix.base.hf if name not in own}
    return {name.removesuffix(".weight") if leaf(name) in others else leaf(name) for name in own}


# ---- what tells the base of an adapter from another
# It is the same in every layout, and in a file.  Two sums of every tensor are all that it is made of, so that ranks
# which hold parts of one add theirs up.

BAND = 1 << 24  #: numbers of one step of a sum


def bit_sums(part: torch.Tensor) -> list[int]:
    """Of a tensor, or of a part of one: the sum of the patterns of all numbers as fp32, read as int32, and that of
    their squares, both modulo 2^64."""
    import torch

    sums = torch.zeros(2, dtype=torch.int64, device=part.device)
    for band in part.reshape(-1).split(BAND):  # each is copied into wider numbers
        bits = band.float().view(torch.int32).to(torch.int64)
        sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return sums.tolist()


def digest_of(sums: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Of the name and the `bit_sums` of each tensor, in the order of their names; hex."""
    lines = (f"{name} {plain} {squares}\n" for name, (plain, squares) in sums)
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
