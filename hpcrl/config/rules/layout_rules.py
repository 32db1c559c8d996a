"""How ranks, stages and experts divide the trainer's GPUs, and what goes together where engines share them: pure
functions of the options.

Invariants: what passes makes whole numbers of everything (whether the model can be divided so is
`hpcrl/models/divisions.py`); what would be lost while a side is not on the GPUs, and what has no effect, is refused
before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.config.passthrough import dashed
from hpcrl.errors import UsageError


def check_ranks(o: Options) -> None:
    parts = o.tensor_model_parallel_size * o.pipeline_model_parallel_size * o.context_parallel_size
    if o.world_size % parts:
        raise UsageError(
            f"{o.world_size} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided by TP x "
            f"PP x CP = {parts}",
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size",
        )
    expert_layout(o)


def expert_layout(o: Options) -> None:
    """UsageError if the layout of the experts does not divide the ranks."""
    etp = o.expert_tensor_size
    ep = o.expert_model_parallel_size
    pp = o.pipeline_model_parallel_size
    if o.world_size % (etp * ep * pp):
        raise UsageError(
            f"{o.world_size} trainer ranks cannot be divided into --expert-tensor-parallel-size {etp} x"
            f" --expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp}",
            "without --expert-tensor-parallel-size it is --tensor-model-parallel-size",
        )


def check_virtual_stages(o: Options) -> None:
    layers = o.num_layers_per_virtual_pipeline_stage
    stages = o.num_virtual_stages_per_pipeline_rank
    if layers and stages:
        raise UsageError(
            f"--num-layers-per-virtual-pipeline-stage {layers} and --num-virtual-stages-per-pipeline-rank {stages} "
            "both cut the "
            "pipeline",
            "leave one of them out",
        )
    name = "num_layers_per_virtual_pipeline_stage" if layers else "num_virtual_stages_per_pipeline_rank"
    if (layers or stages) and o.pipeline_model_parallel_size == 1:
        raise UsageError(f"--{dashed(name)} needs a pipeline", "give --pipeline-model-parallel-size, 2 or more")
    group = o.micro_batch_multiple
    if group < o.pipeline_model_parallel_size and group > 1:
        raise UsageError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than "
            f"--pipeline-model-parallel-size {o.pipeline_model_parallel_size}"
        )


# ---- sharing rules


def check_sharing(o: Options) -> None:
    """UsageError for the first thing that would not outlive the others' turn."""
    if o.offloads_train and o.megatron.get("nccl_ub"):
        raise UsageError(
            "--nccl-ub keeps gradients where NCCL has registered them, and with --colocate the trainer gives its "
            "memory up",
            "leave out --nccl-ub, or give --no-offload-train",
        )
    if o.sleep_level == 2 and o.vllm.get("enable_expert_parallel"):
        raise UsageError(
            "--rollout-sleep-level 2 with --vllm-enable-expert-parallel: vLLM's map of the experts would go with the "
            "weights, and no "
            "update brings it",
            "leave one of them out",
        )
    if o.sleep_level == 2 and o.drafts_with_weights:
        raise UsageError(
            "--rollout-sleep-level 2 with --vllm-speculative-config: the drafts' weights would go with the others, and "
            "no update "
            "brings them",
            "leave one of them out",
        )


def inert_in_sharing(o: Options) -> Iterator[tuple[str, str]]:
    """Options of sharing that do nothing in this combination, and why."""
    if not o.takes_turns:
        why = "there is no engine beside a trainer" if o.colocate else "--colocate is not given"
        yield "offload_train offload_rollout rollout_sleep_level", why
    elif not o.sleep_level:
        yield "rollout_sleep_level", "--no-offload-rollout keeps the engines in memory"
