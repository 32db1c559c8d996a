"""What the task sets of this directory share: a task folder in Harbor's form, and a small Qwen3 that can call a shell.

The model's tokenizer has one token for what begins a call of `bash` in Hermes' form and one for what ends it, so that a
model of 0.3 million weights has to choose the command alone.
"""

from __future__ import annotations

import importlib.util
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALL, END = '<tool_call>{"name": "bash", "arguments": {"command": "', '"}}</tool_call>'
DONE = "."  #: a turn without a call, which ends the work
RAN = "[exit 0]"  #: what the policy reads of a command that printed nothing
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>", CALL, END]
TRAINED, HELD_OUT = 512, 64
SFT_LINES = 12288
TOML = """schema_version = "1.4"

[agent]
timeout_sec = 20.0

[verifier]
timeout_sec = 20.0

[environment]
cpus = 1
memory_mb = 256
storage_mb = 64
docker_image = "debian:12"
env = {PYTHONDONTWRITEBYTECODE = "1"}
"""
VERIFIER = """#!/bin/sh
found=$({look})
if [ "$found" = "{right}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

_spec = importlib.util.spec_from_file_location("arithmetic", Path(__file__).parents[1] / "arithmetic.py")
arithmetic: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(arithmetic)


def write_task(folder: Path, instruction: str, files: dict[str, str], look: str, right: str, solution: str) -> None:
    """Write one task folder.

    Args:
        files: of the image's /app, by name.
        look: a command, in /app, whose output is the verdict's.
        right: what it must print.
        solution: a command that makes it so.
    """
    written = {
        "task.toml": TOML,
        "instruction.md": instruction,
        "tests/test.sh": VERIFIER.format(look=look, right=right),
        "solution/solve.sh": f"{solution}\n",
    } | {f"environment/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def turns(prompt: str, *said: str) -> list[dict[str, str]]:
    """A chat: the prompt, then commands of the policy and what the shell printed, one after another."""
    roles = ("assistant", "tool")
    return [
        {"role": "user", "content": prompt},
        *({"role": roles[number % 2], "content": text} for number, text in enumerate(said)),
    ]


def main(doc: str | None, write: Callable[[Path, int], None], characters: str) -> None:
    """The command of a task set: DIR/train/, DIR/heldout/ and DIR/sft.jsonl by `write`, and DIR/model.

    Args:
        characters: that the model writes, in addition to digits.
    """
    args = arithmetic.given_directory(doc)
    write(args.out, args.seed)
    for name in ("train", "heldout"):
        (args.out / name / "images.toml").write_text('"debian:12" = "system"  # the programs of the node\n')
    tokenizer = arithmetic.make_tokenizer(
        SPECIAL,
        "".join(sorted(set(string.digits + characters + RAN + DONE))),
        ["<|user|>", "<|assistant|>", "<|tool|>"],
        f"{re.escape(CALL)}|{re.escape(END)}",
    )
    arithmetic.make_model(args.out / "model", args.seed, tokenizer)
