"""How ranks, stages, experts and batches divide the trainer's GPUs, how many engines there are and where external ones
are, and what goes together where both share GPUs: pure functions of the options of `sections/layout.py`.

Invariants: what passes makes whole numbers of everything (whether the model can be divided so is
`hpcrl/models/divisions.py`); the GPUs of engines divide into whole engines; an address that passes is HOST:PORT, and
is said once; what would be lost while a side is not on the GPUs, and what has no effect, is refused before anything
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.config.passthrough import flag
from hpcrl.errors import UsageError

ADDRS = "--rollout-external-engine-addrs"
KEYS = "--rollout-external-engine-keys"
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})\Z")


def check_ranks(o: Options) -> None:
    parts = o.tensor_model_parallel_size * o.pipeline_model_parallel_size * o.context_parallel_size
    if o.world_size % parts:
        raise UsageError(
            f"{o.world_size} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided by TP x "
            f"PP x CP = {parts}",
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size",
        )
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
            "both cut the pipeline",
            "leave one of them out",
        )
    name = "num_layers_per_virtual_pipeline_stage" if layers else "num_virtual_stages_per_pipeline_rank"
    if (layers or stages) and o.pipeline_model_parallel_size == 1:
        raise UsageError(f"{flag(name)} needs a pipeline", "give --pipeline-model-parallel-size, 2 or more")
    group = o.micro_batch_multiple
    if group < o.pipeline_model_parallel_size and group > 1:
        raise UsageError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than "
            f"--pipeline-model-parallel-size {o.pipeline_model_parallel_size}"
        )


def split_address(text: str, flag: str = ADDRS) -> tuple[str, int]:
    """(host, port) of HOST:PORT, an IPv6 address in brackets.

    Raises:
        UsageError: names the flag.
    """
    found = _ADDRESS.match(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise UsageError(f"{flag} {text}: not an address of an engine", "write HOST:PORT, such as 10.0.0.5:8100")
    return found[1] or found[2], int(found[3])


def check_engines(o: Options) -> None:
    """Raise UsageError for GPUs that make no whole engines, or none where some are needed."""
    gpus, each = o.engine_gpus, o.rollout_num_gpus_per_engine
    if gpus % each:
        raise UsageError(
            f"--rollout-num-gpus {gpus} cannot be divided by --rollout-num-gpus-per-engine {each}", "change one of them"
        )
    parts = o.engine_data_parallel_size
    if parts < 1 or each % parts:
        raise UsageError(
            f"--rollout-num-gpus-per-engine {each} cannot be divided by --vllm-data-parallel-size {parts}",
            "change one of them",
        )
    if o.needs_engines and gpus < 1 and not o.rollout_external_engine_addrs:
        why = "--eval-interval" if o.learns_labels else f"--loss-type {o.loss_type}"
        raise UsageError(f"{why} needs engines", "give --rollout-num-gpus, 1 or more")


def check_external(o: Options) -> None:
    """Raise UsageError for invalid addresses, and for engines that this run cannot share."""
    addresses = [split_address(text) for text in o.rollout_external_engine_addrs]
    if twice := next(
        (text for text in o.rollout_external_engine_addrs if addresses.count(split_address(text)) > 1), None
    ):
        raise UsageError(f"{ADDRS} {twice} is given twice", "name each engine once")
    if addresses and o.colocate:
        raise UsageError(
            f"{ADDRS} and --colocate exclude each other: engines elsewhere take no turns with this trainer"
        )
    if addresses and o.rollout_external_engine_keys is None:
        raise UsageError(f"{ADDRS} without {KEYS}", "give the directory of hpcrl engines serve --keys")
    if addresses and o.weight_transfer == "shm":
        raise UsageError(
            f"--weight-transfer shm does not reach {ADDRS}", "use auto, gloo or nccl, as they were served with"
        )


def check_sharing(o: Options) -> None:
    """Raise UsageError for the first thing that would not outlive the others' turn."""
    if o.offloads_train and o.megatron.get("nccl_ub"):
        raise UsageError(
            "--nccl-ub keeps gradients where NCCL has registered them, and with --colocate the trainer gives its "
            "memory up",
            "leave out --nccl-ub, or give --no-offload-train",
        )


def check_batches(o: Options) -> None:
    """Raise UsageError unless steps and data-parallel ranks divide the samples of a rollout."""
    samples = o.samples_per_rollout
    batch = o.global_batch_size
    steps = o.num_steps_per_rollout
    said = f"a rollout of {samples} samples (--rollout-batch-size x --n-samples-per-prompt)"
    if steps and samples % steps:
        raise UsageError(f"{said} cannot be divided into --num-steps-per-rollout {steps} steps")
    if batch and samples % batch:
        raise UsageError(f"{said} cannot be divided by --global-batch-size {batch}")
    if batch and steps and batch * steps != samples:
        raise UsageError(
            f"--global-batch-size {batch} x --num-steps-per-rollout {steps} is not {said}", "leave one of them out"
        )
    if o.step_batch_size % o.data_parallel_size:
        raise UsageError(
            f"{o.step_batch_size} samples of one optimizer step cannot be divided by {o.data_parallel_size} "
            "data-parallel ranks"
        )
    own = o.step_batch_size // o.data_parallel_size
    if own % o.micro_batch_multiple:
        raise UsageError(
            f"with virtual pipeline stages the {own} samples of a data-parallel rank in one optimizer step must be a "
            f"multiple of {o.micro_batch_multiple}",
            "change --global-batch-size, --pipeline-model-parallel-size or the number of ranks",
        )


def check_packing(o: Options) -> None:
    """Raise UsageError for micro-batches without a size."""
    if o.use_dynamic_batch_size and o.max_tokens_per_gpu is None:
        raise UsageError("--use-dynamic-batch-size needs a limit", "give --max-tokens-per-gpu")
    if o.log_probs_chunk_size == 0:
        raise UsageError("--log-probs-chunk-size 0 leaves no row", "give 1 or more, or -1 for all of a micro-batch")


def inert_in_sharing(o: Options) -> Iterator[tuple[str, str]]:
    """Options of sharing that do nothing in this combination, and why."""
    if not o.takes_turns:
        why = "there is no engine on a trainer's GPUs" if o.colocate else "--colocate is not given"
        yield "offload_train offload_rollout", why


def inert_in_external(o: Options) -> Iterator[tuple[str, str]]:
    """Options of such engines that do nothing in this combination, and why."""
    if not o.rollout_external_engine_addrs:
        yield "rollout_external_engine_keys", f"{ADDRS} is not given"


def inert_in_layout(o: Options) -> Iterator[tuple[str, str]]:
    """Options without effect in this layout, several in one string -> why."""
    if o.use_dynamic_batch_size:
        yield "micro_batch_size", "--use-dynamic-batch-size packs up to --max-tokens-per-gpu"
    else:
        yield "max_tokens_per_gpu", "--use-dynamic-batch-size is not given"
    if o.load is None:
        yield "ckpt_step", "--load is not given"
    if o.data_parallel_size == 1:
        yield "balance_data", "there is one data-parallel rank"
    if o.tensor_model_parallel_size == 1:
        yield "sequence_parallel", "--tensor-model-parallel-size is 1"
