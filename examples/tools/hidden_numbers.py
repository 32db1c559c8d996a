"""The shell's task: numbers that lie in files of a sandbox, and a Qwen3 that can look.

    python examples/tools/hidden_numbers.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/         tokenizer (one character, one token), config.json, random weights (about 0.3 million)
  DIR/train.jsonl    {"prompt": "f47?", "label": "3901", "metadata": {"files": {"f47": "3901\\n", "f12": "88\\n"}}}
  DIR/heldout.jsonl  the same, other numbers in other files
  DIR/sft.jsonl      what to learn before: a third of the lines look (`<call>cat f47`), a third guess
                     (`\\boxed{1804}`), a third read what the shell said and repeat it (`\\boxed{3901}`)
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

TRAINED, HELD_OUT = 4096, 256
SFT_LINES = 12288

_spec = importlib.util.spec_from_file_location("products", Path(__file__).parent / "products.py")
products: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(products)


def task(rng: random.Random) -> dict[str, Any]:
    """One prompt with its label, and what lies in the sandbox: the file that is asked for, and another."""
    asked, other = rng.sample(range(10, 100), 2)
    label = str(rng.randrange(100, 10000))
    files = {f"f{asked}": f"{label}\n", f"f{other}": f"{rng.randrange(100, 10000)}\n"}
    return {"prompt": f"f{asked}?", "label": label, "metadata": {"files": files}}


def shown(rng: random.Random) -> dict[str, Any]:
    """One line to learn from: a look, a guess, or the answer after what the shell said."""
    line, kind = task(rng), rng.randrange(3)
    call = f"<call>cat {line['prompt'][:-1]}"
    if kind == 0:
        return line | {"response": call}
    if kind == 1:
        return line | {"response": f"\\boxed{{{rng.randrange(100, 10000)}}}"}
    told = [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": call}]
    return line | {
        "prompt": [*told, {"role": "tool", "content": line["label"]}],
        "response": f"\\boxed{{{line['label']}}}",
    }


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl, heldout.jsonl and sft.jsonl."""
    rng = random.Random(seed)
    products.arithmetic.write_lines(directory / "train.jsonl", (task(rng) for _ in range(TRAINED)))
    products.arithmetic.write_lines(directory / "heldout.jsonl", (task(rng) for _ in range(HELD_OUT)))
    products.arithmetic.write_lines(directory / "sft.jsonl", (shown(rng) for _ in range(SFT_LINES)))


if __name__ == "__main__":
    products.write_task(__doc__, write_prompts, "acft? }-")
