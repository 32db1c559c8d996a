"""A torch_dist checkpoint -> a Hugging Face directory: one process, no GPU, no process groups, a file at a time.

    hpcrl convert to-hf RUN [DIR]                         # a run's last checkpoint -> DIR (RUN/hf)
    hpcrl convert to-hf --input-dir RUN/checkpoints --origin-hf-dir MODEL --output-dir OUT
    python tools/convert_torch_dist_to_hf.py ...          # the same, under slime's name

Reads what hpcrl, slime and Megatron-LM save, in whatever parallel layout they saved it: the files describe tensors of
the whole model.  Invariant: every tensor that the origin's config.json asks for is written once, bit for bit as the
checkpoint holds it; one that is missing, in excess or of another shape is an error before anything is written.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from hpcrl.errors import DataError, UsageError
from hpcrl.models.convert.adapter import convert_adapter
from hpcrl.models.family import Config, Family, Rule, find_family, tied
from hpcrl.models.files import torch_dist
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.hf_writer import DTYPES, TensorHeader, copy_assets, directory, save_shards, split
from hpcrl.models.files.safetensors_files import SafetensorsDirectory
from hpcrl.models.files.stacked_experts import put, stacks
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.models.lora.settings import RECORD
from hpcrl.models.slicing import CUTS, Shapes
from hpcrl.report.progress import Meter
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir
from hpcrl.run.started_runs import is_run
from hpcrl.utils.arguments import Parser


def run_places(root: Path) -> tuple[Path, Path | None, Path]:
    """(checkpoints, --hf-checkpoint, where the result goes) of a run: those of its last stage that has
    saved.

    Raises:
        UsageError: if it is not a run, or has not saved yet.
    """
    if not is_run(root):
        raise UsageError(f"{root} is not a run directory", "give --input-dir, --origin-hf-dir and --output-dir instead")
    started = [*root.glob("options.json"), *root.glob("*/options.json")]
    for stage in (path.parent for path in sorted(started, key=lambda path: path.stat().st_mtime, reverse=True)):
        options = read_options(RunDir.latest(stage))
        saved = Path(options.save) if options.save else RunDir(stage).checkpoints
        if (saved / TRACKER).is_file():
            return saved, Path(options.hf_checkpoint) if options.hf_checkpoint else None, root / "hf"
    raise UsageError(f"{root} holds no checkpoint yet", "hpcrl status says how far it is")


_LAYER = re.compile(r"(decoder\.layers)\.(\d+)(\..*)")
_HEAD = re.compile(r"mtp\.layers\.(\d+)\.")
#: an expert's weight by the name of the layer that holds each expert as a module, or of the one that groups them
_EXPERT = re.compile(
    r"(.*\.experts)\.(?:local_experts\.(\d+)\.(linear_fc[12])\.(\w+?)|(linear_fc[12])\.(weight|bias)(\d+))"
)


@dataclass(frozen=True)
class Conversion:
    """One stored tensor, or a part of it with leading indices, and the Hugging Face tensors that it becomes.

    Attributes:
        rule: how; None for a tensor that is copied from the origin's files instead.
        parts: those of single experts, whose tensors become one.
    """

    key: str
    at: tuple[int, ...]
    rule: Rule | None
    tensors: tuple[TensorHeader, ...]
    parts: tuple[Conversion, ...] = ()


def convert(
    source: Path,
    output: Path,
    origin: Path,
    *,
    add_missing: bool = False,
    chunk_size: int = 5 * 1024**3,
    force: bool = False,
    workers: int = 1,
) -> None:
    """Write checkpoint `source` (an iter_* or release directory, or the one above) as `output`, with `origin`'s config.

    Args:
        add_missing: tensors of the origin that the checkpoint has none for are copied.
        workers: threads that read and write; each holds the tensors of one file.

    Raises:
        DataError, UsageError: see above.
    """
    config = read_config(origin, "--origin-hf-dir")
    family = find_family(config, origin)
    stored = TorchDist(torch_dist.find_checkpoint(source, None, "--input-dir"))
    jobs = plan(stored, family, config)
    with ExitStack() as stack:
        files = SafetensorsDirectory(origin, stack) if add_missing else None
        jobs += _missing(files, jobs, config) if files else []
        files_plan = split([job.tensors for job in jobs], chunk_size)
        with directory(output, force) as staging:
            _write(stored, files, _shapes(config, family), jobs, staging, files_plan, workers)
            copy_assets(origin, staging, drop=("quantization_config",))


def read_tensors(
    job: Conversion, stored: TorchDist, files: SafetensorsDirectory | None, shapes: Shapes, lock: Lock
) -> list[torch.Tensor]:
    """The tensors of a job.

    Raises:
        DataError: see `TorchDist.read`.
    """
    if job.parts:
        (stack,) = job.tensors
        whole = torch.empty(stack.shape, dtype=stack.dtype)
        for part in job.parts:  # of which one is held at a time
            for tensor, found in zip(part.tensors, read_tensors(part, stored, files, shapes, lock), strict=True):
                put(whole, tensor.name, found)
        return [whole]
    if job.rule is None:
        assert files is not None
        with lock:
            return [files.slice(job.key)[...]]
    return CUTS[job.rule.kind].join([stored.read(job.key, job.at)], shapes)


def _write(
    stored: TorchDist,
    files: SafetensorsDirectory | None,
    shapes: Shapes,
    jobs: list[Conversion],
    staging: Path,
    plan: list[list[TensorHeader]],
    workers: int,
) -> None:
    by_name = {job.tensors[0].name: job for job in jobs}
    lock = Lock()  #: around the meter and the origin's files

    def read(file: Sequence[TensorHeader]) -> Iterator[tuple[str, torch.Tensor]]:
        own = copy.copy(stored)  # it keeps the last tensor that it has read
        for job in (by_name[tensor.name] for tensor in file if tensor.name in by_name):
            for tensor, part in zip(job.tensors, read_tensors(job, own, files, shapes, lock), strict=True):
                yield tensor.name, part
                with lock:
                    meter.add(tensor.size)

    total = sum(tensor.size for file in plan for tensor in file)
    with Meter("to Hugging Face", total, "B", size=True) as meter:
        save_shards(staging, plan, read, workers)


# ---- what becomes what


def plan(stored: TorchDist, family: Family, config: Config) -> list[Conversion]:
    """What to read and what it becomes, in the order of the model.

    Raises:
        DataError: names tensors that do not fit.
    """
    shapes = _shapes(config, family)
    jobs = []
    used = set()
    written = set()
    heads = len({found[1] for key in stored.tensors if (found := _HEAD.match(key))})
    rules = family.tensors(config, heads)
    for name, rule in rules:
        place = _place(stored, name)
        if place is None or written.issuperset(rule.hf):  # a name of the other kind of layer, or a tied copy
            used |= {place[0]} if place else set()
            continue
        key, at = place
        found = stored.tensors[key]
        full = CUTS[rule.kind].full(found.shape[len(at) :], shapes)
        jobs.append(
            Conversion(
                key, at, rule, tuple(TensorHeader(n, found.dtype, s) for n, s in zip(rule.hf, full, strict=True))
            )
        )
        _check_rows(stored, key, rule, found.shape[len(at) :], shapes)
        used.add(key)
        written.update(rule.hf)
    wanted = {n for _, rule in rules for n in rule.hf}
    if missing := sorted(wanted - written):
        raise DataError(f"{stored.path} has no {_some(missing)}", "is it a checkpoint of --origin-hf-dir's model?")
    if extra := sorted(stored.tensors.keys() - used):
        raise DataError(
            f"{stored.path} holds {_some(extra)}, which {family.model_type} does not have",
            "is it a checkpoint of --origin-hf-dir's model?",
        )
    _check_counts(stored, config)
    jobs += _copies(jobs, family.copied(config, heads))
    return _stacked(jobs) if family.stacked else jobs


def _stacked(jobs: Sequence[Conversion]) -> list[Conversion]:
    """The same with one job for all experts of a layer."""
    owner = {tensor.name: (job, tensor) for job in jobs for tensor in job.tensors}
    found: dict[Conversion, None] = {}  # in order, each once
    for stack, names in stacks(list(owner)):
        first, tensor = owner[names[0]]
        if names == [stack]:
            found[first] = None
            continue
        parts = tuple(dict.fromkeys(owner[name][0] for name in names))
        rows = len(names) // len(parts) * tensor.shape[0]
        whole = TensorHeader(stack, tensor.dtype, (len(parts), rows, tensor.shape[1]))
        found[Conversion(stack, (), None, (whole,), parts)] = None
    return list(found)


def _copies(jobs: Sequence[Conversion], copied: Mapping[str, str]) -> list[Conversion]:
    """What a checkpoint holds twice."""
    alone = {job.tensors[0].name: job for job in jobs if len(job.tensors) == 1}
    pairs = [(name, alone[original]) for name, original in copied.items()]
    return [replace(job, tensors=(replace(job.tensors[0], name=name),)) for name, job in pairs]


def _place(stored: TorchDist, name: str) -> tuple[str, tuple[int, ...]] | None:
    """(key, leading indices) under which a parameter of the whole model is stored, or None.

    Layers of equal shape are one tensor with the layer in front; so are the experts of a layer.
    """
    at: tuple[int, ...] = ()
    for ours, theirs in torch_dist.SANDWICH.items():
        name = name.replace(ours, theirs)
    if expert := _EXPERT.fullmatch(name):
        head = expert[1]
        number = expert[2] or expert[7]
        module = expert[3] or expert[5]
        what = expert[4] or expert[6]
        name = f"{head}.experts.{module}.{what}"
        at = (int(number),)
    if name in stored.tensors:
        return name, at
    if (layer := _LAYER.fullmatch(name)) and (key := layer[1] + layer[3]) in stored.tensors:
        return key, (int(layer[2]), *at)
    return None


def _check_rows(stored: TorchDist, key: str, rule: Rule, shape: tuple[int, ...], s: Shapes) -> None:
    if rule.kind == "vocab" and shape[0] < s.vocab:
        raise DataError(f"{stored.path}: {key} has {shape[0]} rows, config.json asks for vocab_size {s.vocab}")
    if rule.kind == "qkv" and shape[0] != (rows := (s.heads + 2 * s.groups) * s.head_size):
        raise DataError(f"{stored.path}: {key} has {shape[0]} rows, config.json asks for {rows}")


def _check_counts(stored: TorchDist, config: Config) -> None:
    """Raise DataError unless every layer has its place, and none more."""
    layers = config["num_hidden_layers"]
    for key, tensor in stored.tensors.items():
        if key.startswith("decoder.layers.") and not _LAYER.fullmatch(key) and tensor.shape[0] != layers:
            raise DataError(f"{stored.path}: {key} has {tensor.shape[0]} layers, config.json says {layers}")


def _shapes(config: Config, family: Family) -> Shapes:
    """As of one tensor-parallel rank: what is stored describes the whole model."""
    return Shapes.from_config(family.transformer(config), config["vocab_size"], 1)


def _missing(files: SafetensorsDirectory, jobs: list[Conversion], config: Config) -> list[Conversion]:
    """Tensors of the origin to copy: all that the checkpoint does not give, except scales of FP8 weights that it
    does."""
    made = {tensor.name for job in jobs for tensor in job.tensors}
    found = []
    for name in sorted(files.where.keys() - made):
        base = re.sub(r"_scale(_inv)?$", "", name)
        if base in made or (tied(config) and name == "lm_head.weight"):
            continue
        part = files.slice(name)
        found.append(
            Conversion(name, (), None, (TensorHeader(name, DTYPES[part.get_dtype()], tuple(part.get_shape())),))
        )
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---- the command

FILE = 5 * 1024**3  #: bytes of one file


def main(argv: Sequence[str]) -> int:
    """The command line; errors are HpcrlErrors."""
    parser = Parser("convert to-hf", "A torch_dist checkpoint -> a Hugging Face directory.")
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="a run directory: says the three that follow")
    parser.add_argument("output", metavar="DIR", type=Path, nargs="?", help="where to, with RUN; RUN/hf")
    parser.add_argument(
        "--input-dir", type=Path, help="iter_* or release directory, or the one above; RUN's checkpoints"
    )
    parser.add_argument("--output-dir", type=Path, help="where to; RUN/hf")
    parser.add_argument(
        "--origin-hf-dir",
        type=Path,
        help="Hugging Face directory: config.json, tokenizer, missing tensors; RUN's --hf-checkpoint",
    )
    parser.add_argument("--model-name", help="checked against the origin's model type; may be left out")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir")
    parser.add_argument(
        "-a", "--add-missing-from-origin-hf", action="store_true", help="copy tensors that were not trained"
    )
    parser.add_argument("--chunk-size", type=int, default=FILE, help="bytes of one file (default 5 GiB)")
    parser.add_argument(
        "--save-max-workers", type=int, help="files to convert at a time, each with its tensors in memory (default 1)"
    )
    parser.add_argument("--load-max-workers", type=int, help="the same, where --save-max-workers is not given")
    parser.add_argument("--vocab-size", type=int, help="rows without padding; must be config.json's")
    args = parser.parse_args(argv)
    if args.run is not None:
        if args.output is not None and args.output_dir is not None:
            raise UsageError("DIR and --output-dir are given", "one of them says where the result goes")
        args.output_dir = args.output or args.output_dir
        of_run = run_places(args.run)
        for name, place in zip(("input_dir", "origin_hf_dir", "output_dir"), of_run, strict=True):
            setattr(args, name, getattr(args, name) or place)
    for name in ("input_dir", "output_dir"):
        if getattr(args, name) is None:
            raise UsageError(f"--{name.replace('_', '-')} is not given", "or name the run: hpcrl convert to-hf RUN")
    _check_given(args)
    _check_flags(args, read_config(args.origin_hf_dir, "--origin-hf-dir"))
    found = torch_dist.find_checkpoint(args.input_dir, None, "--input-dir")
    if (found / RECORD).is_file():
        _refuse_for_adapter(args)
        convert_adapter(found, args.output_dir, args.origin_hf_dir, args.force)
        print(f"wrote {args.output_dir}, an adapter: hpcrl convert merge-lora adds it into its base")
        return 0
    with torch.no_grad():
        convert(
            args.input_dir,
            args.output_dir,
            args.origin_hf_dir,
            add_missing=args.add_missing_from_origin_hf,
            chunk_size=args.chunk_size,
            force=args.force,
            workers=args.save_max_workers or args.load_max_workers or 1,
        )
    print(f"wrote {args.output_dir}")
    return 0


def _check_given(args: Any) -> None:
    if args.origin_hf_dir is None:
        raise UsageError("--origin-hf-dir is not given", "names and shapes come from its config.json")
    if args.chunk_size < 1:
        raise UsageError(f"--chunk-size {args.chunk_size}: expected a number of bytes")
    for flag in ("load", "save"):
        if (count := getattr(args, f"{flag}_max_workers")) is not None and count < 1:
            raise UsageError(f"--{flag}-max-workers {count}", "give a positive number")


def _refuse_for_adapter(args: Any) -> None:
    """Raise UsageError for what has no effect on an adapter, whose one file is small."""
    usual = {
        "add_missing_from_origin_hf": False,
        "chunk_size": FILE,
        "save_max_workers": None,
        "load_max_workers": None,
    }
    for name, value in usual.items():
        if getattr(args, name) != value:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} has no effect on an adapter: {args.input_dir} holds one", "leave it out")


def _check_flags(args: Any, config: Config) -> None:
    if args.vocab_size not in (None, config.get("vocab_size")):
        raise UsageError(
            f"--vocab-size {args.vocab_size}: config.json says {config.get('vocab_size')}", "leave the flag out"
        )
    asked, found = (
        re.sub(r"[^a-z0-9]|config$", "", str(x).lower()) for x in (args.model_name, config.get("model_type"))
    )
    if args.model_name is not None and asked != found:
        raise UsageError(
            f"--model-name {args.model_name}: config.json says {config.get('model_type')}", "leave the flag out"
        )
