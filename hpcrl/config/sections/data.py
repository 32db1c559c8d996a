"""Options of prompts and their grading: prompt files, rewards, and held-out sets."""

from __future__ import annotations

from typing import Any

from hpcrl.config.sections import Base, opt


class DataOptions(Base):
    """data (docs/data.md)"""

    prompt_data: str | list[str] | None = opt(
        None,
        "prompt file, .jsonl or .parquet, or a folder of task folders (docs/agents.md); PATH@[START:STOP] takes a "
        "slice of its rows; several are one set, or with PATH=WEIGHT each a mixture",
        "slime",
    )
    input_key: str = opt("input", "key of the prompt: a string or a list of chat messages", "slime")
    label_key: str | None = opt(
        None,
        "key of the label that the reward compares with, or that is learned; sft_loss without it learns the "
        "assistant's turns of the prompt's messages",
        "slime",
    )
    rejected_key: str | None = opt(
        None, "key of the worse response (dpo_loss); --label-key is the better one's, and nothing is sampled"
    )
    metadata_key: str = opt("metadata", "key of an object that is kept with the sample", "slime")
    tool_key: str = opt("tools", "key of a list of tool schemas for the chat template", "slime")
    apply_chat_template: bool = opt(False, "render the prompt with the tokenizer's chat template", "slime")
    apply_chat_template_kwargs: dict[str, Any] = opt(
        {}, "what the chat template is given besides the messages, such as enable_thinking", "slime"
    )
    rollout_shuffle: bool = opt(False, "shuffle the prompts in each epoch", "slime")
    rollout_seed: int = opt(42, "seed of the shuffle and of every sample", "slime")


# ---- rewards


class RewardOptions(Base):
    """rewards (docs/data.md)"""

    rm_type: str | list[str] | None = opt(
        None,
        "reward: a file of hpcrl/rollout/rewards/ such as math, boxed_NAME for the boxed part of the response, or "
        "module.function; "
        "several with weights are added up: math:1.0 my.brief:0.1; a prompt's metadata may name another",
        "slime",
    )
    custom_rm_path: str | None = opt(
        None,
        "module.function of a custom reward: (options, sample, **kwargs) -> number or object, plain or async",
        "slime",
    )
    group_rm: bool = opt(False, "--custom-rm-path takes the list of a group's samples and returns a list", "slime")
    rm_url: str | None = opt(None, "where --rm-type remote_rm posts prompt, response and label", "slime")
    reward_key: str | None = opt(None, "key of the reward where a reward is an object", "slime")
    eval_reward_key: str | None = opt(None, "the same in evaluations; default --reward-key", "slime")
    reward_cpu_limit: float = opt(
        5.0, "CPU seconds that one grading may use; reading and comparing takes a thousandth", gt=0
    )
    reward_timeout: float = opt(120.0, "seconds of wall-clock time that one grading may take", gt=0)
    reward_max_failed: float = opt(
        0.1,
        "stop the run when more than this share of a rollout's gradings, or calls of --custom-generate-function-path, "
        "fails; they train nothing",
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
        "NAME PATH [NAME PATH ...]: the held-out prompt files, as --prompt-data has them; one path alone is named by "
        "its file",
        "slime",
    )
    eval_config: str | None = opt(
        None,
        "YAML file of held-out sets, each with its own reward and sampling; in place of --eval-prompt-data",
        "slime",
    )
    eval_input_key: str | None = opt(None, "key of the prompt there; default --input-key", "slime")
    eval_label_key: str | None = opt(None, "key of the label there; default --label-key", "slime")
    eval_tool_key: str | None = opt(None, "key of the tool schemas there; default --tool-key", "slime")
    n_samples_per_eval_prompt: int = opt(1, "responses to each held-out prompt", "slime", ge=1)
    eval_temperature: float | None = opt(None, "temperature there; default --rollout-temperature", "slime", ge=0)
    eval_top_p: float | None = opt(None, "top-p there; default --rollout-top-p", "slime", gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k there; default --rollout-top-k", "slime", ge=-1)
    eval_max_response_len: int | None = opt(
        None, "tokens of a response there; default --rollout-max-response-len", "slime", ge=1
    )
    eval_max_prompt_len: int | None = opt(None, "tokens of a prompt there; default: any number", "slime", ge=1)
    eval_max_context_len: int | None = opt(
        None, "prompt and response together there; default --rollout-max-context-len", "slime", ge=2
    )
    eval_min_new_tokens: int | None = opt(None, "tokens of a response there at least; default 0", "slime", ge=0)
    skip_eval_before_train: bool = opt(False, "no evaluation before the first step", "slime")
    log_passrate: bool = opt(
        False, "log pass@k, k = 1, 2, 4 ..., of evaluations with several responses a prompt", "slime"
    )
