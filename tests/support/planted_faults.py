"""Faults that a recipe can have, and what an error says that finds them: of small runs that are right without.

`words(fault, directory)` are the words after `hpcrl plan` and `hpcrl rehearse`; only config.json of a model is written,
with the shapes of a published one and few layers.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.cli.main import main
from tests.support.published_models import MODELS


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        run: of RUNS, to which it is done.
        flags: that do it.
        said: what the error names.
    """

    run: str
    flags: str
    said: str


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
EXPERTS = SMALL | {"first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_routed_experts": 16}
SFT = "loss_type = 'sft_loss'\nrollout_num_gpus = 0\n"
GRPO = "rm_type = 'math'\nn_samples_per_prompt = 2\nrollout_num_gpus = 1\n"
#: name -> model, its fields, its recipe
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("Qwen3-0.6B", SMALL, f"actor_num_gpus_per_node = 4\n{SFT}"),
    "pipeline": ("Qwen3-0.6B", SMALL, f"actor_num_gpus_per_node = 8\npipeline_model_parallel_size = 2\n{SFT}"),
    "experts": (
        "GLM-4.5",
        EXPERTS,
        f"actor_num_gpus_per_node = 8\nexpert_model_parallel_size = 4\nexpert_tensor_parallel_size = 1\n{SFT}",
    ),
    "engine": ("Qwen3-0.6B", SMALL, f"actor_num_gpus_per_node = 4\n{GRPO}"),
}
ALL = """\
prompt_data = "x.jsonl"
label_key = "label"
num_rollout = 1
bf16 = true
tensor_model_parallel_size = 2
sequence_parallel = true
use_dynamic_batch_size = true
max_tokens_per_gpu = 512
rollout_max_response_len = 256
"""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LOSS = "--loss-type custom_loss --custom-loss-function-path tests.support.wrong_losses"

BY_PLAN = {
    # layout
    "tp does not divide the heads": Fault(
        "dense", "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3", "heads"
    ),
    "cp does not divide the ranks": Fault("dense", "--context-parallel-size 3", "context-parallel"),
    "pp does not divide the layers": Fault(
        "dense", "--pipeline-model-parallel-size 3 --actor-num-gpus-per-node 6", "layers"
    ),
    "stages with the embedding do not divide": Fault(
        "pipeline", "--account-for-embedding-in-pipeline-split --pipeline-model-parallel-size 4", "layers"
    ),
    "experts of a dense model": Fault("dense", "--expert-model-parallel-size 2", "xpert"),
    "ep does not divide the experts": Fault(
        "experts", "--expert-model-parallel-size 3 --actor-num-gpus-per-node 6 --rollout-batch-size 36", "xpert"
    ),
    # flags
    "another model's layers": Fault("dense", "--num-layers 5", "--num-layers"),
    "more experts a token than there are": Fault("experts", "--moe-router-topk 100", "--moe-router-topk"),
    "a window that the model has not": Fault("dense", "--window-size 128", "--window-size"),
    "a dispatcher that there is not": Fault("experts", "--moe-token-dispatcher-type pigeon", "dispatcher"),
    "an optimizer that there is not": Fault("dense", "--optimizer adagrad", "--optimizer"),
    "buffers that are not set up": Fault("dense", "--tp-comm-overlap", "--tp-comm-overlap"),
    # memory
    "a card too small for the state": Fault("dense", "--gpu-memory 0.02", "GiB"),
}
BY_REHEARSAL = {
    # layout
    "without loss": Fault("pipeline", "--pipeline-model-parallel-layout Ett|tt", "loss"),
    "rows saved apart twice": Fault(
        "dense", f"{FULL} 1 --distribute-saved-activations", "distribute_saved_activations"
    ),
    "parts that do not divide the layers": Fault("dense", f"{FULL} 3", "out of range"),
    # flags
    "recomputed: attic": Fault(
        "dense", "--recompute-granularity selective --recompute-modules attic", "recompute_modules"
    ),
    "capacity with sinkhorn": Fault(
        "experts", "--moe-expert-capacity-factor 1.0 --moe-router-load-balancing-type sinkhorn", "capacity_factor"
    ),
    "padding to no capacity": Fault("experts", "--moe-pad-expert-input-to-capacity", "capacity_factor"),
    "overlap of shared experts": Fault(
        "experts", "--moe-shared-expert-overlap --moe-token-dispatcher-type allgather", "alltoall"
    ),
    "offloading of more layers than there are": Fault(
        "dense", "--cpu-offloading --cpu-offloading-num-layers 9", "ffloading"
    ),
    "offloading and recomputation": Fault(
        "dense", f"--cpu-offloading --cpu-offloading-num-layers 2 {FULL} 1", "recomputation"
    ),
    "offloading and stages": Fault("pipeline", "--cpu-offloading --cpu-offloading-num-layers 2", "ipeline"),
    "fp8 with layers in bf16": Fault(
        "dense", "--fp8 e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 1", "BF16"
    ),
    "gradients in fp16": Fault("dense", "--main-grads-dtype fp16", "main_grads_dtype"),
    "moments in fp8 alone": Fault("dense", "--exp-avg-dtype fp8", "exp_avg_dtype"),
    "attention that packs nothing": Fault("dense", "--attention-backend local", "attention"),
    # engines
    "more sequences than tokens": Fault(
        "engine", "--vllm-max-num-batched-tokens 16 --vllm-max-num-seqs 64", "max_num_"
    ),
    "an unknown quantization": Fault("engine", "--vllm-quantization nonsense", "uantization"),
    "a cache for less than one request": Fault("engine", "--vllm-gpu-memory-utilization 0.0001", "KV cache"),
    # order
    "a sum that one rank asks for": Fault("engine", f"{LOSS}.one_rank_asks", "collective"),
    "another order": Fault("engine", f"{LOSS}.another_order", "collective"),
}


def words(fault: Fault, directory: Path) -> list[str]:
    """The recipe, which is written to `directory`, and the flags."""
    model, fields, text = RUNS[fault.run]
    (directory / "config.json").write_text(json.dumps(MODELS[model][1] | fields))
    recipe = directory / "recipe.toml"
    recipe.write_text(f'hf_checkpoint = "{directory}"\n{text}{ALL}')
    return [str(recipe), *shlex.split(fault.flags)]


def only_in_rehearsal(fault: Fault, directory: Path) -> str:
    """What `hpcrl rehearse` says of it, which `hpcrl plan` does not refuse."""
    given = words(fault, directory)
    before, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(before):
        assert main(["plan", *given]) == 0, before.getvalue()
    with contextlib.redirect_stderr(said):
        assert main(["rehearse", *given]) != 0
    assert "rehearsal itself" not in said.getvalue() and "process died" not in said.getvalue(), said.getvalue()
    return said.getvalue()
