"""A model of several GB goes to an engine over each transport that these GPUs have: in pieces from every rank, and as
whole tensors by vLLM's own transfer.

Over NCCL where trainer and engine have GPUs of their own, over CUDA IPC where they share them.  With four GPUs or more
an engine has two, each with a part of the tensors.  Without a GPU the model is small and goes over sockets.  It has run
on no GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.doctor.selftest.registry import Check, Number, Outcome
from hpcrl.doctor.selftest.tiny_model import make_model
from hpcrl.doctor.selftest.whole_run import ENGINES, engine_run, gpu_count

GPU = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CPU = {"hidden_size": 256, "intermediate_size": 512}


def transports(gpus: int) -> dict[str, dict[str, Any]]:
    """Name -> options of a run over it."""
    if not gpus:
        return {"gloo": {"weight_transfer": "gloo"}}
    width = 2 if gpus > 3 else 1
    sizes = ("actor_num_gpus_per_node", "tensor_model_parallel_size", "rollout_num_gpus", "rollout_num_gpus_per_engine")
    each: dict[str, Any] = dict.fromkeys(sizes, width)
    apart = {name: each | {"weight_transfer": name} for name in ("nccl", "vllm")} if gpus > 1 else {}
    shared = {"ipc": "ipc", "vllm-ipc": "vllm"}
    return apart | {name: each | {"weight_transfer": way, "colocate": True} for name, way in shared.items()}


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    model = directory / "large-model"
    if not (model / "config.json").exists():
        make_model(model, **(GPU if gpus else CPU))
    numbers: dict[str, Number] = {}
    said = []
    for name, options in transports(gpus).items():
        if not (rows := engine_run(directory, f"large-{name}", gpus, hf_checkpoint=str(model), **options)):
            return Outcome("failed", f"the run over {name} has logged no step", numbers)
        seconds, moved = (rows[-1][f"perf/update_weights_{what}"] for what in ("time", "bytes"))
        pause = rows[-1]["perf/update_weights_pause_time"]
        numbers |= {f"{name}_seconds": seconds, f"{name}_pause_seconds": pause, f"{name}_bytes": moved}
        said.append(f"{name}: {moved / 1e9:.3g} GB in {seconds:.2f} s, {pause:.2f} s of them paused")
    return Outcome("passed", f"every tensor compared; {'; '.join(said)}", numbers)


CHECK = Check("weight updates of a large model arrive bit for bit", 85, "launcher", work, ENGINES)
