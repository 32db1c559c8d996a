"""The task of the recipes in this directory: answer with digits.  Half of the tokenizer's tokens are digits, so random
weights are rewarded from the first step on.

    python examples/algorithms/digits.py --out DIR [--seed N]

Writes DIR/pairs.jsonl, {"prompt": ..., "better": "4071", "worse": "=+,+"}: what `dpo.toml` prefers.  Prompts and model
are the quick start's (`examples/arithmetic.py`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

PAIRS = 512
LENGTH = 4


async def reward(options: Any, sample: Any) -> float:
    """The share of the response's characters that are digits; 0 for an empty one."""
    return sum(map(str.isdigit, sample.response)) / max(len(sample.response), 1)


async def signs(options: Any, sample: Any) -> float:
    """The share of the characters that are something else; 0 for an empty one."""
    return sum(not character.isdigit() for character in sample.response) / max(len(sample.response), 1)


def pair(rng: random.Random) -> dict[str, object]:
    """A prompt with a better and a worse response."""
    prompt = "+".join(str(rng.randrange(10)) for _ in range(LENGTH)) + "="
    better, worse = ("".join(rng.choices(characters, k=LENGTH)) for characters in ("0123456789", "+=,"))
    return {"prompt": [{"role": "user", "content": prompt}], "better": better, "worse": worse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    (args.out / "pairs.jsonl").write_text("".join(json.dumps(pair(rng)) + "\n" for _ in range(PAIRS)))


if __name__ == "__main__":
    main()
