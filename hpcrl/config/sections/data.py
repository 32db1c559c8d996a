"""Options of prompts and their grading: prompt files, rewards, and held-out sets."""

from __future__ import annotations

from typing import Any

from hpcrl.config.sections import Base, opt


class DataOptions(Base):
    """data (docs/data.md)"""

    prompt_data: str | list[str] | None = opt(
        None,
        "prompt file, .jsonl or .parquet, or a folder of task folders (docs/agents.md); PATH@[START:STOP] takes a "
        "slice of its rows; several are joined, or mixed if each is PATH=WEIGHT",
        "slime",
    )
    input_key: str = opt("input", "key of the prompt: a string or a list of chat messages", "slime")
    label_key: str | None = opt(
        None,
        "key of the label, to compare with or to learn; sft_loss without it learns the assistant's turns of the "
        "prompt's messages",
        "slime",
    )
    rejected_key: str | None = opt(
        None, "key of the worse response (dpo_loss); --label-key names the better one; nothing is sampled"
    )
    metadata_key: str = opt("metadata", "key of an object to keep with the sample", "slime")
    tool_key: str = opt("tools", "key of a list of tool schemas for the chat template", "slime")
    apply_chat_template: bool = opt(False, "render the prompt with the tokenizer's chat template", "slime")
    apply_chat_template_kwargs: dict[str, Any] = opt(
        {}, "further arguments of the chat template, such as enable_thinking", "slime"
    )
    rollout_shuffle: bool = opt(False, "shuffle the prompts in each epoch", "slime")
    rollout_seed: int = opt(42, "seed of the shuffle and of every sample", "slime")


# ---- rewards


class RewardOptions(Base):
    """rewards (docs/data.md)"""

    rm_type: str | list[str] | None = opt(
        None,
        "reward: a file of hpcrl/rollout/rewards/ such as math, boxed_NAME for the boxed part of the response, or "
        "module.function; several with weights are added: math:1.0 my.brief:0.1; a prompt's metadata may name another",
        "slime",
    )
    custom_rm_path: str | None = opt(
        None,
        "module.function of a custom reward: (options, sample, **kwargs) -> number or object, plain or async",
        "slime",
    )
    group_rm: bool = opt(False, "--custom-rm-path takes the list of a group's samples and returns a list", "slime")
    rm_url: str | None = opt(None, "address to which --rm-type remote_rm posts prompt, response and label", "slime")
    reward_key: str | None = opt(None, "key of the reward in a reward that is an object", "slime")
    eval_reward_key: str | None = opt(None, "the same in evaluations; default --reward-key", "slime")
    reward_cpu_limit: float = opt(5.0, "CPU seconds for one grading; a usual one takes a thousandth", gt=0)
    reward_timeout: float = opt(120.0, "wall-clock seconds for one grading", gt=0)
    reward_max_failed: float = opt(
        0.1,
        "stop the run if a larger share of a rollout's gradings, or calls of --custom-generate-function-path, fails; "
        "failed samples train nothing",
        ge=0,
        le=1,
    )


# ---- evaluation


class EvalOptions(Base):
    """evaluation (docs/data.md)"""

    eval_interval: int | None = opt(
        None, "evaluate every N rollouts, before the first and after the last", "slime", ge=1
    )
    eval_prompt_data: list[str] = opt(
        [],
        "NAME PATH [NAME PATH ...]: held-out prompt files, as for --prompt-data; one path alone is named after its "
        "file",
        "slime",
    )
    eval_config: str | None = opt(
        None,
        "YAML file of held-out sets, each with its own reward and sampling; replaces --eval-prompt-data",
        "slime",
    )
    eval_input_key: str | None = opt(None, "prompt key in evaluations; default --input-key", "slime")
    eval_label_key: str | None = opt(None, "label key in evaluations; default --label-key", "slime")
    eval_tool_key: str | None = opt(None, "tool schema key in evaluations; default --tool-key", "slime")
    n_samples_per_eval_prompt: int = opt(1, "responses to each held-out prompt", "slime", ge=1)
    eval_temperature: float | None = opt(
        None, "temperature in evaluations; default --rollout-temperature", "slime", ge=0
    )
    eval_top_p: float | None = opt(None, "top-p in evaluations; default --rollout-top-p", "slime", gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k in evaluations; default --rollout-top-k", "slime", ge=-1)
    eval_max_response_len: int | None = opt(
        None, "maximum response tokens in evaluations; default --rollout-max-response-len", "slime", ge=1
    )
    eval_max_prompt_len: int | None = opt(
        None, "maximum prompt tokens in evaluations; default: no limit", "slime", ge=1
    )
    eval_max_context_len: int | None = opt(
        None, "maximum prompt and response tokens in evaluations; default --rollout-max-context-len", "slime", ge=2
    )
    eval_min_new_tokens: int | None = opt(None, "minimum response tokens in evaluations; default 0", "slime", ge=0)
    skip_eval_before_train: bool = opt(False, "skip the evaluation before the first step", "slime")
    log_passrate: bool = opt(
        False, "log pass@k, k = 1, 2, 4 ..., of evaluations with several responses a prompt", "slime"
    )
