"""Held-out sets and how they are sampled."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class EvalOptions(Base):
    """evaluation (docs/evaluation.md)"""

    eval_interval: int | None = opt(
        None, "evaluate every N rollouts, before the first and after the last", "slime", ge=1
    )
    eval_prompt_data: list[str] = opt(
        [],
        "NAME PATH [NAME PATH ...]: the held-out prompt files, as --prompt-data has them; one path alone is named by its file",
        "slime",
    )
    eval_config: str | None = opt(
        None,
        "YAML file of held-out sets, each with a reward and sampling of its own; in place of --eval-prompt-data",
        "slime",
    )
    eval_input_key: str | None = opt(None, "key of the prompt there; default --input-key", "slime")
    eval_label_key: str | None = opt(None, "key of the label there; default --label-key", "slime")
    eval_tool_key: str | None = opt(None, "key of the tool schemas there; default --tool-key", "slime")
    n_samples_per_eval_prompt: int = opt(1, "responses to each held-out prompt", "slime", ge=1)
    eval_temperature: float | None = opt(None, "temperature there; default --rollout-temperature", "slime", ge=0)
    eval_top_p: float | None = opt(None, "top-p there; default --rollout-top-p", "slime", gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k there; default --rollout-top-k", "slime", ge=-1)
    eval_min_p: float | None = opt(None, "min-p there; default --rollout-min-p", ge=0, le=1)
    eval_max_response_len: int | None = opt(
        None, "tokens of a response there; default --rollout-max-response-len", "slime", ge=1
    )
    eval_max_prompt_len: int | None = opt(
        None, "tokens of a prompt there; default --rollout-max-prompt-len", "slime", ge=1
    )
    eval_max_context_len: int | None = opt(
        None, "prompt and response together there; default --rollout-max-context-len", "slime", ge=2
    )
    eval_min_new_tokens: int | None = opt(None, "tokens of a response there at least; default 0", "slime", ge=0)
    skip_eval_before_train: bool = opt(False, "no evaluation before the first step", "slime")
    log_passrate: bool = opt(
        False, "log pass@k, k = 1, 2, 4 ..., of evaluations with several responses a prompt", "slime"
    )
