"""The calculator's task: products of two-digit numbers that no small model knows, and a Qwen3 that can ask for them.

    python examples/tools/products.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/         tokenizer (one character, one token), config.json, random weights (about 0.3 million)
  DIR/train.jsonl    {"prompt": "47*83=", "label": "3901"}
  DIR/heldout.jsonl  the same, of products that are in no other file
  DIR/sft.jsonl      what to learn before: a third of the lines call the tool (`<call>47*83`), a third guess
                     (`\\boxed{1804}`), a third read the tool's answer and repeat it (`\\boxed{3901}`)
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELD_OUT = 256  #: products that are never trained on
SFT_LINES = 12288
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>", "\\boxed{", "<call>"]

_spec = importlib.util.spec_from_file_location("arithmetic", Path(__file__).parents[1] / "arithmetic.py")
arithmetic: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(arithmetic)

Pair = tuple[int, int]


def pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All products in random order: (for training, held out)."""
    every = list(itertools.product(range(10, 100), repeat=2))
    random.Random(seed).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def row(pair: Pair) -> dict[str, object]:
    """One prompt with its label."""
    return {"prompt": f"{pair[0]}*{pair[1]}=", "label": str(pair[0] * pair[1])}


def shown(pair: Pair, rng: random.Random) -> dict[str, object]:
    """One line to learn from: a call, a guess, or the answer after the tool's."""
    line, kind = row(pair), rng.randrange(3)
    call = f"<call>{pair[0]}*{pair[1]}"
    if kind == 0:
        return line | {"response": call}
    if kind == 1:
        return line | {"response": f"\\boxed{{{rng.randrange(100, 9802)}}}"}
    told = [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": call}]
    return line | {
        "prompt": [*told, {"role": "tool", "content": line["label"]}],
        "response": f"\\boxed{{{line['label']}}}",
    }


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl, heldout.jsonl and sft.jsonl."""
    train, held_out = pairs(seed)
    rng = random.Random(seed + 1)
    arithmetic.write_lines(directory / "train.jsonl", map(row, train))
    arithmetic.write_lines(directory / "heldout.jsonl", map(row, held_out))
    arithmetic.write_lines(directory / "sft.jsonl", (shown(train[i % len(train)], rng) for i in range(SFT_LINES)))


def write_task(doc: str | None, write: Callable[[Path, int], None], characters: str) -> None:
    """The command of a task that a small Qwen3 learns with a tool: its prompts, and a model that writes digits, these
    characters and SPECIAL."""
    args = arithmetic.given_directory(doc)
    write(args.out, args.seed)
    roles = ["<|user|>", "<|assistant|>", "<|tool|>"]
    arithmetic.make_model(
        args.out / "model", args.seed, arithmetic.make_tokenizer(SPECIAL, string.digits + characters, roles)
    )


if __name__ == "__main__":
    write_task(__doc__, write_prompts, "*=}-")
