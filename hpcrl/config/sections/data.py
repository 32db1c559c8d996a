"""Prompt files and what is read from them."""

from __future__ import annotations

from typing import Any, Literal

from hpcrl.config.option_fields import Base, opt


class DataOptions(Base):
    """data (docs/data.md)"""

    prompt_data: str | list[str] | None = opt(
        None,
        "prompt file, .jsonl or .parquet; PATH@[START:STOP] takes a slice of its rows; several are one set, or with PATH=WEIGHT each "
        "a mixture",
        "slime",
    )
    input_key: str = opt("input", "key of the prompt: a string or a list of chat messages", "slime")
    label_key: str | None = opt(
        None,
        "key of the label that the reward compares with, or that is learned; sft_loss without it learns the assistant's turns of the "
        "prompt's messages",
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
    overlong_prompts: Literal["drop", "error"] = opt(
        "drop",
        "a prompt over --rollout-max-prompt-len or the model's context is dropped and counted, or an error that names it",
    )
    rollout_shuffle: bool = opt(False, "shuffle the prompts in each epoch", "slime")
    rollout_seed: int = opt(42, "seed of the shuffle and of every sample", "slime")
