"""Tasks of a terminal, in Harbor's folders: a number lies in a file, and is to be written into another.

    python examples/tasks/terminal.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/      tokenizer, config.json, random weights (about 0.3 million)
  DIR/train/      512 task folders; instruction.md is `f47>a`: write what is in f47 into a
  DIR/heldout/    64 more, other numbers in other files
  DIR/sft.jsonl   what to learn before: of the first turns half look (`cat f47`), half guess (`echo 1804 >a`); after a
                  look its number is written, after that the work is done
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("folders", Path(__file__).parent / "folders.py")
folders: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(folders)


def numbers(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """(the file that is asked for, its number, all files)."""
    asked, other = rng.sample(range(10, 100), 2)
    right = str(rng.randrange(100, 10000))
    return f"f{asked}", right, {f"f{asked}": f"{right}\n", f"f{other}": f"{rng.randrange(100, 10000)}\n"}


def shown(rng: random.Random) -> dict[str, Any]:
    """One line to learn from."""
    name, right, _ = numbers(rng)
    look, guess = f"cat {name}", f"echo {rng.randrange(100, 10000)} >a"
    looked = [folders.CALL + look + folders.END, right]
    wrote = folders.CALL + f"echo {right} >a" + folders.END
    guessed = folders.CALL + guess + folders.END
    said, response = [
        ([], looked[0]),
        ([], guessed),
        (looked, wrote),
        (rng.choice([[*looked, wrote, folders.RAN], [guessed, folders.RAN]]), folders.DONE),
    ][rng.randrange(4)]
    return {"prompt": folders.turns(f"{name}>a", *said), "response": response}


def write(directory: Path, seed: int) -> None:
    """train/, heldout/ and sft.jsonl."""
    rng = random.Random(seed)
    for part, count in (("train", folders.TRAINED), ("heldout", folders.HELD_OUT)):
        for number in range(count):
            name, right, files = numbers(rng)
            folder = directory / part / f"copy-{number:03d}"
            folders.write_task(folder, f"{name}>a", files, "cat a", right, f"cp {name} a")
    folders.arithmetic.write_lines(directory / "sft.jsonl", (shown(rng) for _ in range(folders.SFT_LINES)))


if __name__ == "__main__":
    folders.main(__doc__, write, "acehotf >")
