"""Held-out sets and how they are sampled."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class EvalOptions(Base):
    """evaluation"""

    eval_interval: int | None = opt(None, "evaluate every N rollouts, before the first and after the last", "slime", ge=1)
    eval_prompt_data: list[str] = opt([], "NAME PATH [NAME PATH ...]: the held-out prompt files", "slime")
    eval_input_key: str | None = opt(None, "key of the prompt there; default --input-key", "slime")
    eval_label_key: str | None = opt(None, "key of the label there; default --label-key", "slime")
    n_samples_per_eval_prompt: int = opt(1, "responses to each held-out prompt", "slime", ge=1)
    eval_temperature: float | None = opt(None, "temperature there; default --rollout-temperature", "slime", ge=0)
    eval_top_p: float | None = opt(None, "top-p there; default --rollout-top-p", "slime", gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k there; default --rollout-top-k", "slime", ge=-1)
    eval_min_new_tokens: int | None = opt(None, "tokens of a response there at least; default none", "slime", ge=0)
    eval_max_response_len: int | None = opt(None, "tokens of a response there; default --rollout-max-response-len", "slime", ge=1)
    skip_eval_before_train: bool = opt(False, "no evaluation before the first step", "slime")
