"""A run's adapter -> a directory as PEFT writes it; and an adapter added into its base.

    hpcrl convert to-hf RUN             # of a run with --lora-rank: adapter_config.json, adapter_model.safetensors
    hpcrl convert merge-lora --adapter-dir RUN/hf --base-dir MODEL --output-dir OUT

Invariants: what is merged is summed in fp32 and rounded once; an adapter whose tensors are not all of the base's
matrices is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpcrl.errors import DataError
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.hf_writer import TensorHeader, copy_assets, directory, save_shards, split
from hpcrl.models.files.safetensors_files import Entry, SafetensorsDirectory, listing
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.models.lora import peft
from hpcrl.models.lora.matrices import ALL, adapted, lora_name
from hpcrl.models.lora.settings import RECORD, LoraSettings
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.utils.arguments import Parser
from hpcrl.utils.untrusted_files import Damaged, read_json

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def convert_adapter(source: Path, output: Path, origin: Path, force: bool = False) -> None:
    """Write the adapter of a checkpoint (iter_*) as `output`.

    Raises:
        DataError: names a tensor that is missing, or the record that cannot be read.
    """
    try:
        record = read_json(source / RECORD, dict[str, Any])
        settings = LoraSettings.of_plain(record)
    except (OSError, Damaged, KeyError, TypeError) as error:
        raise DataError(f"{source / RECORD} cannot be read: {error}") from error
    config = read_config(origin, "--origin-hf-dir")
    tensors = find_family(config, origin).tensors(config)
    stored = TorchDist(source)
    shapes = Shapes.from_config(find_family(config, origin).transformer(config), config["vocab_size"], 1)
    matrices = [matrix for matrix in adapted(tensors, settings) if f"{matrix.prefix}lora_B" in stored.all]
    found: dict[str, torch.Tensor] = {}
    for matrix in matrices:
        for rule in matrix.rules:
            if rule.megatron not in stored.all:
                raise DataError(f"{source} has no {rule.megatron}")
            parts = CUTS[rule.kind].join([stored.read(rule.megatron)], shapes)
            found |= {name: part for name, part in zip(rule.hf, parts, strict=True) if name not in matrix.absent}
        found |= {copy: found[name].clone() for copy, name in matrix.copies.items()}
    if extra := set(stored.tensors) - {rule.megatron for matrix in matrices for rule in matrix.rules}:
        raise DataError(f"{source} holds {min(extra)}, which no adapter of --origin-hf-dir's model has")
    targets = peft.target_names(matrices, adapted(tensors, replace(settings, targets=(ALL,), excluded=())))
    with directory(output, force) as staging:
        peft.write_adapter(staging, found, settings, targets, str(record.get("over") or origin), record["base"])


def merge(adapter: Path, base: Path, output: Path, chunk_size: int = 5 * 1024**3, force: bool = False) -> None:
    """Write `base` with the adapter added in as `output`.

    Raises:
        DataError: names a matrix that the base does not have so.
    """
    settings = peft.read_settings(adapter)
    tensors = peft.read_adapter(adapter)
    names = listing(base)
    inputs = set(peft.pairs(tensors, settings, adapter))
    for weight in sorted(inputs):
        wanted = (len(tensors[lora_name(weight, "B")]), tensors[lora_name(weight, "A")].shape[1])
        entry = names.get(weight)
        if entry is None or tuple(entry.shape) != wanted or getattr(torch, entry.dtype) not in FLOATS:
            found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise DataError(
                f"{base} has no matrix {weight} of {list(wanted)} in bf16 or fp32 ({found})",
                "is it the base of this adapter, and not in FP8?",
            )
    _check_base(base, names, peft.base_digest_of(adapter))
    plan = [[TensorHeader(name, getattr(torch, entry.dtype), tuple(entry.shape))] for name, entry in names.items()]
    with ExitStack() as stack, directory(output, force) as staging:
        files = SafetensorsDirectory(base, stack)

        def read(file: Sequence[TensorHeader]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in (tensor.name for tensor in file):
                value = files.slice(name)[...]
                if name in inputs:
                    a, b = (tensors[lora_name(name, which)].float() for which in "AB")
                    value = (value.float() + settings.scale * (b @ a)).to(value.dtype)
                yield name, value

        save_shards(staging, split(plan, chunk_size), read)
        copy_assets(base, staging)


def _check_base(base: Path, names: Mapping[str, Entry], wanted: str) -> None:
    """Raise DataError if an adapter says that it was trained over other numbers (in bf16 or as they are)."""
    if not wanted:
        return
    config = read_config(base, "--base-dir")
    known = sorted({name for _, rule in find_family(config, base).tensors(config) for name in rule.hf} & names.keys())
    plain, rounded = [], []
    with ExitStack() as stack:
        files = SafetensorsDirectory(base, stack)
        for name in known:
            value = files.slice(name)[...]
            plain.append((name, peft.bit_sums(value)))
            rounded.append((name, peft.bit_sums(value.bfloat16())))
    if wanted not in (peft.digest_of(plain), peft.digest_of(rounded)):
        raise DataError(f"{base} is not the base that the adapter was trained over", "name that one by --base-dir")


def main(argv: Sequence[str]) -> int:
    """`hpcrl convert merge-lora`: the exit status."""
    parser = Parser("convert merge-lora", "Add an adapter into its base: a Hugging Face directory like the base's.")
    parser.add_argument("--adapter-dir", type=Path, required=True, help="a directory as PEFT writes it")
    parser.add_argument(
        "--base-dir", type=Path, required=True, help="the Hugging Face directory that it was trained over"
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="where to")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir")
    args = parser.parse_args(argv)
    merge(args.adapter_dir, args.base_dir, args.output_dir, force=args.force)
    print(f"wrote {args.output_dir}")
    return 0
