"""Prompt files and what is read from them."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class DataOptions(Base):
    """data"""

    prompt_data: str | None = opt(None, "prompt file, .jsonl", "slime")
    input_key: str = opt("input", "key of the prompt: a string or a list of chat messages", "slime")
    label_key: str | None = opt(None, "key of the label that the reward compares with", "slime")
    rejected_key: str | None = opt(
        None, "key of the worse response (dpo_loss); --label-key is the better one's, and nothing is sampled"
    )
    metadata_key: str = opt("metadata", "key of an object that is kept with the sample", "slime")
    apply_chat_template: bool = opt(False, "render the prompt with the tokenizer's chat template", "slime")
    rollout_shuffle: bool = opt(False, "shuffle the prompts in each epoch", "slime")
    rollout_seed: int = opt(42, "seed of the shuffle and of every sample", "slime")
