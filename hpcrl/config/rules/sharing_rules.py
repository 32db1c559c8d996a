"""What goes together where trainer and engines share GPUs: pure functions of the resolved options.

Invariant: what would be lost while a side is not on the GPUs, and what does nothing here, is refused before anything
starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.config.rules.speculation_rules import drafts_with_weights
from hpcrl.errors import UsageError


def check_sharing(o: Options) -> None:
    """UsageError for the first thing that would not outlive the others' turn."""
    if o.offloads_train and o.megatron.get("nccl_ub"):
        raise UsageError(
            "--nccl-ub keeps gradients where NCCL has registered them, and with --colocate the trainer gives its memory up",
            "leave out --nccl-ub, or give --no-offload-train",
        )
    if o.sleep_level == 2 and o.vllm.get("enable_expert_parallel"):
        raise UsageError(
            "--rollout-sleep-level 2 with --vllm-enable-expert-parallel: vLLM's map of the experts would go with the weights, and no "
            "update brings it",
            "leave one of them out",
        )
    if o.sleep_level == 2 and drafts_with_weights(o.vllm.get("speculative_config")):
        raise UsageError(
            "--rollout-sleep-level 2 with --vllm-speculative-config: the drafts' weights would go with the others, and no update "
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
