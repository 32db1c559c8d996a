"""Configurations of model types that vLLM has a model for and transformers does not know.

Published files of theirs bring Python code along instead, which an engine runs only with --vllm-trust-remote-code.

Invariant: a type that transformers knows is left to it.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config


class MiMoConfig(Qwen2Config):
    """MiMo-7B: Qwen2's, and how many layers predict further tokens, which is read as any other name is."""

    model_type = "mimo"


def register_model_types() -> None:
    """Make them known to transformers in this process; a second call does nothing."""
    if MiMoConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
