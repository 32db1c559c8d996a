"""How a rollout is sampled."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class RolloutOptions(Base):
    """rollout: sampling"""

    rollout_batch_size: int = opt(32, "prompts (groups) of one rollout", "slime", ge=1)
    n_samples_per_prompt: int = opt(
        1, "responses to each prompt; grpo compares them, and needs 2 at least", "slime", ge=1
    )
    rollout_max_response_len: int = opt(1024, "tokens of a response at most", "slime", ge=1)
    rollout_max_prompt_len: int | None = opt(
        None, "longer prompts are dropped, or an error: --overlong-prompts", "slime", ge=1
    )
    rollout_max_context_len: int | None = opt(
        None, "prompt and response together at most; sets the engine's context", "slime", ge=2
    )
    rollout_temperature: float = opt(
        1.0, "sampling temperature; the trainer divides its logits by the same", "slime", gt=0
    )
    rollout_top_p: float = opt(
        1.0, "sample from the likeliest tokens that together have this probability", "slime", gt=0, le=1
    )
    rollout_top_k: int = opt(-1, "sample from this many likeliest tokens; -1: from all", "slime", ge=-1)
    rollout_min_p: float = opt(
        0.0, "sample from tokens with at least this share of the likeliest one's probability", ge=0, le=1
    )
    rollout_stop: list[str] = opt([], "strings that end a response", "slime")
    rollout_stop_token_ids: list[int] = opt([], "token ids that end a response", "slime")
    rollout_skip_special_tokens: bool = opt(
        False,
        "leave special tokens out of the text in which stop strings are looked for, and that rewards read",
        "slime",
    )
    over_sampling_batch_size: int | None = opt(
        None,
        "groups that are issued at a time while the batch is not full; it is full with the first --rollout-batch-size that the "
        "filter keeps, and the rest is ended; default --rollout-batch-size",
        "slime",
        ge=1,
    )
    dynamic_sampling_filter_path: str | None = opt(
        None,
        "which finished groups are kept: check_reward_nonzero_std, check_reward_nonzero_std_with_fallback, or module.function of an "
        "own one: (options, samples) -> bool",
        "slime",
    )
    partial_rollout: bool = opt(
        False,
        "keep what a full batch leaves over: unfinished responses go on later from their tokens, finished groups wait",
        "slime",
    )
    mask_offpolicy_in_partial_rollout: bool = opt(
        False, "loss mask 0 for tokens that an older policy sampled, in responses that were gone on with", "slime"
    )
    buffer_filter_path: str | None = opt(
        None,
        "which groups that were left over are gone on with: pop_first, the oldest (default), or module.function of an own one: "
        "(options, rollout_id, buffer, count) -> groups",
        "slime",
    )
    max_staleness: int | None = opt(
        None,
        "policy versions that a token may lag behind the trainer; default: any with --partial-rollout, as slime has it; else as many as "
        "the loop makes: 0 in sync, those of --update-weights-interval rollouts in async, twice as many in fully-async",
        ge=0,
    )
    stale_samples: Literal["wait", "drop", "train"] = opt(
        "wait",
        "fully-async: an unfinished group that the step after the next could no longer train on is waited for; or ended and dropped; or "
        "trained on whenever it comes, with a correction",
    )
    rollout_server_concurrency: int = opt(
        512, "samples in flight per engine at most (slime: --sglang-server-concurrency)", ge=1
    )
