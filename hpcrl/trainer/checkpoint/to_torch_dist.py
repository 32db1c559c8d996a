"""A Hugging Face directory -> a torch_dist checkpoint that hpcrl, slime and Megatron-LM load: DIR/release and its
tracker.

    hpcrl convert to-torch-dist --hf-checkpoint MODEL --save DIR
    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save DIR    # also over nodes

Runs on the CPU, also where GPUs are.  Each rank holds its shard of the weights and at most one tensor more.  The layout
says only who converts what: the checkpoint loads into any other.  Invariants: tensors keep the dtype of the files, so
the way back is bit for bit the same; the tracker is written last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.run.rundir import TRACKER

HELP = """\
usage: hpcrl convert to-torch-dist --hf-checkpoint MODEL --save DIR [Megatron's flags]
       torchrun ... tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save DIR [Megatron's flags]

  --hf-checkpoint MODEL                       Hugging Face directory: config.json and safetensors
  --save DIR                                  DIR/release is made, and named by DIR/latest_checkpointed_iteration.txt
  --tensor-model-parallel-size N              and --pipeline-model-, --expert-model-, --expert-tensor-parallel-size:
                                              which rank converts what, under torchrun; without any of them each rank
                                              is a pipeline stage
Flags that describe the model are checked against config.json and may be left out."""
#: flags of slime's tool that mean nothing here
UNUSED = ("allgather-cp", "use-gated-attention", "use-cpu-initialization", "bf16")
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
BY_NAME = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def main(argv: Sequence[str]) -> int:
    """The command line, on one rank; errors are HpcrlErrors."""
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: conversion needs no GPU, and must not fill one
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = read_options(argv, world)
    store = alone() if "RANK" not in os.environ else None
    from hpcrl.trainer.megatron import replaced

    replaced.install()
    from hpcrl.trainer import parallel_state

    ranks = parallel_state.initialize(options, store)
    try:
        path = convert(options, ranks)
    finally:
        parallel_state.shutdown()
    if ranks.rank == 0:
        print(f"wrote {path}")
    return 0


# ---- the layout


def read_options(argv: Sequence[str], world: int) -> Options:
    """Options for `world` ranks.

    Raises:
        UsageError: for what does not belong here.
    """
    from hpcrl.config.flags import parse_flags
    from hpcrl.config.value_types import Kind
    from hpcrl.models.files.config_json import read_config

    own = {name: Kind("bool") for name in UNUSED} | {
        "padded-vocab-size": Kind("int"),
        "custom-model-provider-path": Kind("str"),
    }
    values, extra, words = parse_flags(argv, own)
    if words:
        raise UsageError(f"{words[0]}: a value without a flag", "see hpcrl convert to-torch-dist --help")
    if extra.get("custom-model-provider-path"):
        raise UsageError(
            "--custom-model-provider-path is not supported", "a model is a family, one file in hpcrl/models"
        )
    for name in ("hf_checkpoint", "save"):
        if name not in values:
            raise UsageError(f"--{name.replace('_', '-')} is not given", "see hpcrl convert to-torch-dist --help")
    config = read_config(values["hf_checkpoint"])
    rows = extra.get("padded-vocab-size")
    if rows is not None and rows < config.get("vocab_size", 0):
        raise UsageError(f"--padded-vocab-size {rows} is less than config.json's vocab_size {config['vocab_size']}")
    megatron = values.setdefault("megatron", {})
    if world > 1 and not any(name in values or name in megatron for name in LAYOUT):
        stages, last = stages_for(config.get("num_hidden_layers", 1), world)
        values["pipeline_model_parallel_size"] = stages
        if last:
            megatron["num_layers_in_last_pipeline_stage"] = last
    if values.get("tensor_model_parallel_size", 1) > 1:
        values.setdefault("sequence_parallel", True)  # Megatron wants it where there are experts; weights are the same
    dtype = _commonest(Path(values["hf_checkpoint"]))
    return Options(**values | {"actor_num_nodes": 1, "actor_num_gpus_per_node": world, "bf16": dtype == "BF16"})


def stages_for(layers: int, world: int) -> tuple[int, int | None]:
    """(pipeline stages, layers of the last where it has fewer): every rank a stage, or half of them, a quarter ...

    slime's rule.

    Raises:
        UsageError: if no number of stages does.
    """
    stages = world
    while stages > 1:
        each = -(-layers // stages)
        last = layers - each * (stages - 1)
        if last > 0:
            return stages, None if last == each else last
        if stages % 2:
            break
        stages //= 2
    raise UsageError(f"{world} ranks for {layers} layers leave pipeline stages without any", "start fewer ranks")


def _commonest(directory: Path) -> str:
    """The dtype, by safetensors' name, that most tensors have; FP8 matrices are read as bf16.

    Raises:
        DataError: for one that cannot be trained.
    """
    from hpcrl.models.files.fp8 import scheme_of
    from hpcrl.models.files.safetensors_files import SafetensorsDirectory

    scheme = scheme_of(directory)
    with ExitStack() as stack:
        files = SafetensorsDirectory(directory, stack)
        dtypes = {name: files.slice(name).get_dtype() for name in files.where}
    codes = [name for name, dtype in dtypes.items() if scheme and dtype == "F8_E4M3"]
    for name in codes:
        dtypes[name] = "BF16"
        dtypes.pop(scheme.scale_name(name), None)
    found = list(dtypes.values())
    if other := sorted(set(found) - BY_NAME.keys()):
        raise DataError(f"{directory} holds {', '.join(other)}", "convert the BF16 model that it was made from")
    return max(BY_NAME, key=found.count)


def alone() -> Any:
    """Be a world of one: torchrun's variables, and a store that no other process can see."""
    from torch.distributed import HashStore

    store = HashStore()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return store


# ---- the work


def convert(options: Options, ranks: Any) -> Path:
    """Convert on all ranks of groups that exist; collective.

    Returns:
        DIR/release.

    Raises:
        UsageError: if DIR holds a checkpoint.
        DataError: for a model directory that does not fit its config.json.
    """
    from hpcrl.models.files.fp8 import scheme_of
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.collectives import agree
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.megatron.hf_weights import load_hf

    root = Path(str(options.save))
    final = root / "release"
    staging = root / ".partial-release"
    source = Path(str(options.hf_checkpoint))
    scheme = scheme_of(source)
    if scheme:
        agree(lambda: refuse_stacks(source), ranks.rank == 0)
    agree(lambda: _prepare(root, final, staging), ranks.rank == 0)
    policy = model.build(options, ranks, trainable=False)
    _take_dtypes(policy, source, scheme)
    load_hf(policy, source, progress=_bar if ranks.rank == 0 else iter, scheme=scheme)
    state = save_load.weights(policy)
    del policy  # from here on the state alone holds the weights
    save_load.write(state, staging)
    agree(lambda: save_load.settle(staging, final, "release"), ranks.rank == 0)
    return final


def refuse_stacks(source: Path) -> None:
    """Raise DataError if FP8 files hold experts of a layer in one tensor, as no scheme has them; layers for further
    tokens (mtp.) are not read."""
    from hpcrl.models.files.safetensors_files import listing
    from hpcrl.models.files.stacked_experts import is_stack

    if found := next((name for name in listing(source) if is_stack(name) and not name.startswith("mtp.")), None):
        raise DataError(
            f"{source} holds FP8 weights, and experts of a layer in one tensor ({found})", "convert the BF16 model"
        )


def _prepare(root: Path, final: Path, staging: Path) -> None:
    from hpcrl.trainer.checkpoint.save_load import writable

    if final.exists() or (root / TRACKER).exists():
        raise UsageError(f"--save {root} holds a checkpoint already", "remove it or choose another directory")
    writable(root)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()


def _bar(rules: Iterable[Any]) -> Iterable[Any]:
    from hpcrl.report.progress import track

    rules = list(rules)
    return track(rules, len(rules), "to torch_dist", "tensors")


def _take_dtypes(policy: Any, directory: Path, scheme: Any) -> None:
    """Give every parameter the dtype that the files have for it; of FP8 matrices bf16."""
    import torch

    from hpcrl.models.files.from_fp8 import widened
    from hpcrl.models.files.safetensors_files import listing
    from hpcrl.models.files.stacked_experts import single
    from hpcrl.trainer.megatron.parameter_shards import own_parameters

    names = listing(directory)
    names = single(names) if policy.family.stacked else names
    names = widened(names, scheme, directory) if scheme else names
    for rule, parameter in own_parameters(policy).values():
        if set(rule.hf) <= names.keys():  # load_hf says what is missing
            dtype = getattr(torch, names[rule.hf[0]].dtype)
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
