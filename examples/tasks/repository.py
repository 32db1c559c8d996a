"""Tasks of a repository, in Harbor's folders: its test fails, and the policy is to edit the module that it tests.

    python examples/tasks/repository.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/      tokenizer, config.json, random weights (about 0.3 million)
  DIR/train/      512 task folders; a repository has m.py, whose `answer()` returns a wrong number, and t.py, which says
                  what it should be; the verifier has a test of its own, so t.py may be edited in vain
  DIR/heldout/    64 more, with other numbers
  DIR/sft.jsonl   what to learn before: of the first turns half run the test (`python3 t.py`), half edit at random
                  (`sed -i s/12/80/ m.py`); after the test its numbers are edited, after that the work is done
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

MODULE = "def answer():\n    return {wrong}\n"
TEST = 'from m import answer\n\nif answer() != {right}:\n    raise SystemExit(f"{{answer()}}!={right}")\n'
PROMPT = "t.py fails"

_spec = importlib.util.spec_from_file_location("folders", Path(__file__).parent / "folders.py")
folders: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(folders)


def numbers(rng: random.Random) -> tuple[int, int]:
    """(what m.py returns, what it should)."""
    wrong, right = rng.sample(range(10, 100), 2)
    return wrong, right


def edit(wrong: int, right: int) -> str:
    return f"sed -i s/{wrong}/{right}/ m.py"


def shown(rng: random.Random) -> dict[str, Any]:
    """One line to learn from."""
    wrong, right = numbers(rng)
    tested = [folders.CALL + "python3 t.py" + folders.END, f"{wrong}!={right}\n[exit 1]"]
    fixed, guessed = (folders.CALL + edit(*pair) + folders.END for pair in ((wrong, right), numbers(rng)))
    said, response = [
        ([], tested[0]),
        ([], guessed),
        (tested, fixed),
        (rng.choice([[*tested, fixed, folders.RAN], [guessed, folders.RAN]]), folders.DONE),
    ][rng.randrange(4)]
    return {"prompt": folders.turns(PROMPT, *said), "response": response}


def write(directory: Path, seed: int) -> None:
    """train/, heldout/ and sft.jsonl."""
    rng = random.Random(seed)
    look = "python3 -c 'from m import answer; print(answer())'"
    for part, count in (("train", folders.TRAINED), ("heldout", folders.HELD_OUT)):
        for number in range(count):
            wrong, right = numbers(rng)
            files = {"m.py": MODULE.format(wrong=wrong), "t.py": TEST.format(right=right)}
            folder = directory / part / f"fix-{number:03d}"
            folders.write_task(folder, PROMPT, files, look, str(right), edit(wrong, right))
    folders.arithmetic.write_lines(directory / "sft.jsonl", (shown(rng) for _ in range(folders.SFT_LINES)))


if __name__ == "__main__":
    folders.main(__doc__, write, "adefhilmnopsty.!=\n/- ")
