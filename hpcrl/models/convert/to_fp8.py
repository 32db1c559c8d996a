"""A Hugging Face checkpoint with FP8 weights, made from one with wider ones.

    convert(Path("Qwen3-4B"), Path("Qwen3-4B-FP8"), Scheme("block", (128, 128)))

Matrices of linear layers become float8_e4m3fn with scales (models/files/fp8.py says how); embeddings, heads, norms,
biases and routers stay.  Layout and config.json are those of published checkpoints:

    block      weight_scale_inv; quantization_config with quant_method "fp8", as DeepSeek-V3 and Qwen3-FP8 have it
    channel    weight_scale, one for each row; "compressed-tensors", as GLM-4.5-FP8 has it
    tensor     weight_scale, one; "compressed-tensors"

Invariants: a worker reads and writes one file after the other, and memory holds one for each; the directory appears
under its name only when it is whole; the same input gives the same bytes, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hpcrl.errors import DataError, UsageError
from hpcrl.models.files.config_json import CONFIG, read_config, read_object, write_config
from hpcrl.models.files.fp8 import Scheme, Stream, quantized
from hpcrl.models.files.hf_writer import copy_assets, directory, save_files, write_index
from hpcrl.models.files.safetensors_files import DTYPES, SINGLE, Entry, listing, open_file
from hpcrl.report.progress import track
from hpcrl.utils.arguments import Parser

Progress = Callable[[Iterator[Any], int], Generator[Any, None, None]]


def convert(
    source: Path,
    output: Path,
    scheme: Scheme,
    workers: int = 1,
    force: bool = False,
    progress: Progress = lambda done, total: (job for job in done),
) -> None:
    """Write `output` from the safetensors of `source`.

    progress(done, total): wraps the files as they are finished.

    Raises:
        UsageError: if `output` is there already and `force` is not given.
        DataError: names a tensor that cannot be quantised, or a damaged file; then nothing is left behind.
    """
    config = _config(source)
    held = listing(source)
    if not held:
        raise DataError(f"{source} has no model.safetensors", "name a Hugging Face model directory with safetensors")
    taken = _taken(source, held, scheme)
    scheme = replace(scheme, chosen=taken)
    files: dict[str, set[str]] = {}
    for name, entry in held.items():
        files.setdefault(entry.file, set()).add(name)

    def read(name: str) -> Stream:
        return quantized(_tensors(source / name, files[name]), scheme)

    with directory(output, force) as staging:
        where: dict[str, str] = {}
        size = 0
        written = save_files(staging, {name: partial(read, name) for name in sorted(files)}, workers)
        with closing(progress(written, len(files))) as ready:  # the bar ends before an error is printed
            for name, sizes in ready:
                where |= dict.fromkeys(sizes, name)
                size += sum(sizes.values())
        copy_assets(source, staging)
        if set(files) != {SINGLE}:
            write_index(staging, where, size)
        config["quantization_config"] = quantization_config(scheme, left(held, taken))
        write_config(staging, config)


def _tensors(path: Path, names: Set[str]) -> Stream:
    """These tensors of a file, as they are in it; read and not mapped, so that they do not stay in memory."""
    with open_file(path, "pt", backend="pread") as file:
        for name in (name for name in file.offset_keys() if name in names):
            try:
                yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise DataError(f"{path}: {name} cannot be read: {error}") from error


def _config(source: Path) -> dict[str, Any]:
    """config.json as it is, not with its text part laid open."""
    config = read_config(source, "--model-dir")
    if found := config.get("quantization_config"):
        raise DataError(f"{source} is quantised already ({found.get('quant_method')})", "begin with the model in bf16")
    return read_object(source, CONFIG, "--model-dir") or {}


def _taken(source: Path, held: dict[str, Entry], scheme: Scheme) -> frozenset[str]:
    """The matrices that are to be quantised."""
    taken = frozenset(name for name, entry in held.items() if scheme.takes(name, entry.shape))
    if odd := [name for name, entry in held.items() if entry.dtype not in DTYPES.values()]:
        raise DataError(f"{source}: {odd[0]} has the unknown dtype {held[odd[0]].dtype}")
    for name in taken:
        if held[name].dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise DataError(f"{source}: {name} is {held[name].dtype} already", "begin with the model in bf16")
    if not taken:
        raise DataError(
            f"{source} has no matrix of a linear layer that is known by its name, such as "
            "model.layers.0.mlp.up_proj.weight"
        )
    return taken


def left(held: Mapping[str, Entry], taken: Set[str]) -> list[str]:
    """The modules that keep their matrices: what readers call modules_to_not_convert, or ignore."""
    matrices = {name for name, entry in held.items() if name.endswith(".weight") and len(entry.shape) == 2}
    modules = {name.removesuffix(".weight") for name in matrices - taken}
    return sorted(modules | {"lm_head"})  # readers make a head also where it is tied to the embedding


def quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """What config.json says to readers: the fields and values of published checkpoints, and the modules left as they
    are."""
    if scheme.strategy == "block":
        fields: dict[str, Any] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(scheme.block),
            "modules_to_not_convert": list(ignored),
        }
        return fields | ({"scale_fmt": "ue8m0"} if scheme.power_of_two else {})
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = number | {"dynamic": True, "strategy": "token" if scheme.strategy == "channel" else "tensor"}
    weights = number | {"dynamic": False, "strategy": scheme.strategy, "observer": "minmax"}
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


# ---- the command


def parser() -> Parser:
    """The flags of slime's tool of this name, and --force."""
    found = Parser(
        "convert to-fp8",
        "Quantise the linear layers of a Hugging Face checkpoint to FP8 (e4m3), for engines to sample with.",
    )
    found.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory with safetensors in bf16")
    found.add_argument("--save-dir", type=Path, required=True, help="where the FP8 checkpoint goes")
    found.add_argument(
        "--strategy", choices=("block", "channel", "tensor"), default="block", help="what shares a scale"
    )
    found.add_argument(
        "--block-size", type=int, nargs=2, default=(128, 128), metavar="N", help="rows and columns of a block"
    )
    found.add_argument("--max-workers", type=int, default=1, help="files to convert at a time; each is held in memory")
    found.add_argument(
        "--scale-fmt",
        choices=("ue8m0", "fp32"),
        help="scales of blocks: powers of two (default), as vLLM multiplies on GPUs, or fp32",
    )
    found.add_argument("--force", action="store_true", help="replace an existing --save-dir")
    return found


def main(argv: Sequence[str]) -> int:
    """`hpcrl convert to-fp8`: the exit status.

    Raises:
        UsageError, DataError: as `convert`.
    """
    args = parser().parse_args(argv)
    if min(args.block_size) < 1:
        raise UsageError(f"--block-size {args.block_size[0]} {args.block_size[1]}", "give two positive numbers")
    if args.max_workers < 1:
        raise UsageError(f"--max-workers {args.max_workers}", "give a positive number")
    if args.scale_fmt and args.strategy != "block":
        raise UsageError(
            f"--scale-fmt {args.scale_fmt} with --strategy {args.strategy}", "it goes with --strategy block"
        )
    if args.save_dir.resolve() == args.model_dir.resolve():
        raise UsageError("--save-dir is --model-dir itself", "name another directory")
    power_of_two = args.strategy == "block" and args.scale_fmt != "fp32"
    scheme = Scheme(args.strategy, tuple(args.block_size), power_of_two)
    convert(args.model_dir, args.save_dir, scheme, args.max_workers, args.force, _bar)
    return 0


def _bar(done: Iterator[Any], total: int) -> Generator[Any, None, None]:
    return track(done, total, "to FP8", "files")
