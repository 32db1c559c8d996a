"""What a custom generate function is called with, in tests of single functions."""

from __future__ import annotations

from typing import Any

from hpcrl.config.options import Options
from hpcrl.rollout.slime_names.arguments import Arguments, ResponseTools
from hpcrl.sample import Sample


def args_of(options: Options, engine: Any, prompt: str = "", version: int = 0) -> Arguments:
    """The `args` of a response to a prompt of two tokens; engine: also in the place of the tokenizer."""
    messages = [{"role": "user", "content": prompt}]
    tools = ResponseTools(engine, engine, "http://x:1/v1", "key", False, version, messages, [2, 3])
    return Arguments(options).of_response(tools)


def asked_sample(prompt: str = "", **fields: Any) -> Sample:
    """Its sample, which has no response yet."""
    return Sample(prompt=prompt, **fields)
