"""A model with experts is trained in bf16 and sampled in FP8 blocks, with its experts spread over all GPUs of the host.

Scales are powers of two in one run, and fp32 in another, which vLLM rounds on GPUs.  The model is Qwen3-30B-A3B with
four layers and random weights.  Without a GPU it is a tiny one, sampled in bf16, since vLLM's CPU build multiplies FP8
on few processors.  It has run on no GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.algorithms.loss import DIFFERENCE
from hpcrl.doctor.selftest.registry import Check, Number, Outcome, Skip
from hpcrl.doctor.selftest.tiny_model import make_model
from hpcrl.doctor.selftest.whole_run import ENGINES, engine_run, gpu_count
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.fp8 import Scheme
from hpcrl.run.process import run_command
from hpcrl.utils.shipped_files import SHIPPED

SECONDS = 1800.0  #: the first start compiles kernels
FP8 = 8.9  #: compute capability from which GPUs multiply FP8
BOUND = 0.5  #: nats, mean absolute: engines that multiply with other weights are further apart
CPU = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
#: scales of the engines' weights -> whether they are powers of two, None: no FP8
SCALES: dict[bool, dict[str, bool | None]] = {True: {"ue8m0": True, "fp32": False}, False: {"no": None}}


def sizes(gpu: bool) -> dict[str, Any]:
    """config.json of the model."""
    found: dict[str, Any] = {"model_type": "qwen3_moe", "norm_topk_prob": True, **CPU}
    if gpu:
        found = {**read_config(SHIPPED / "examples/configs/Qwen3-30B-A3B"), "num_hidden_layers": 4}
    return {**found, "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}


def options(gpus: int) -> dict[str, Any]:
    """Of the run, without the models."""
    width = dict.fromkeys(("actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"), max(gpus, 1))
    if gpus > 1:
        width |= dict.fromkeys(("expert_model_parallel_size", "vllm.data_parallel_size"), gpus)
    return {
        "bf16": True,
        "colocate": gpus > 0,
        **width,
        "check_weight_update_equal": False,  # FP8 kernels lay weights out in their own way
        "max_logprob_diff": 1e9,  # judged below
        "deterministic_mode": False,
        "engine_start_timeout": SECONDS,
        **({"vllm.enable_expert_parallel": True} if gpus > 1 else {}),
    }


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    capability = run_command(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], 20.0).out.split()
    if gpus and min(map(float, capability), default=0.0) < FP8:
        raise Skip(f"compute capability {' '.join(capability[:1]) or 'unknown'}: FP8 needs {FP8}")
    wide = directory / "moe"
    if not (wide / "config.json").exists():
        make_model(wide, **sizes(gpus > 0))
    numbers: dict[str, Number] = {}
    said = []
    for scales, power_of_two in SCALES[gpus > 0].items():
        coded = wide
        if power_of_two is not None:
            coded = directory / f"moe-{scales}"
            convert(wide, coded, Scheme(power_of_two=power_of_two), force=True)
        models = {"hf_checkpoint": str(coded), "load": str(wide)}
        if not (rows := engine_run(directory, f"moe-fp8-{scales}", gpus, SECONDS, **models, **options(gpus))):
            return Outcome("failed", f"the run with {scales} scales has logged no step", numbers)
        apart = max(row[f"train/{DIFFERENCE}"] for row in rows)
        numbers |= {f"{scales}_difference": apart, f"{scales}_update_seconds": rows[-1]["perf/update_weights_time"]}
        said.append(f"{scales} scales: {apart:.1e} nats apart in the mean of a step")
        if not apart <= BOUND:
            return Outcome("failed", f"{said[-1]}; {BOUND} is allowed", numbers)
    return Outcome("passed", f"{'; '.join(said)}; {BOUND} is allowed", numbers)


CHECK = Check("a model with experts is sampled in FP8, over all GPUs", 99, "launcher", work, ENGINES)
