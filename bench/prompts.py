"""Prompt files of many lines: seconds until they are indexed and checked, MiB held, time of a draw.

    python bench/prompts.py [--lines 2000000] [--quick]

Work: a .jsonl file of short sums as chat messages with labels, a tokenizer of one character a token.  What grows with
the file, its index and the order of an epoch, is measured on all lines; the check of every line, in constant memory, on
a hundredth of them.  Beside it, in a process of its own too, what slime's loader does with those: every row a Python
object, rendered by the same tokenizer, its token count compared with the limit.  MiB are the growth of the resident
set.  Writes bench/results/prompts.md; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

DRAWS = 512  #: prompts of one rollout


def rss() -> float:
    """MiB of this process."""
    import psutil

    return psutil.Process().memory_info().rss / 2**20


def tokenizer_in(directory: Path):
    from hpcrl.rollout.prompts.tokenizer import Tokenizer

    return Tokenizer(directory)


def index(directory: Path, path: str) -> dict[str, float]:
    from hpcrl.prompt_files.rows import JsonlRows
    from hpcrl.rollout.prompts.prompt_source import epoch_order

    before, begun = rss(), time.monotonic()
    rows = JsonlRows(Path(path))
    opened = time.monotonic() - begun
    order = epoch_order(len(rows), (), 42, 0, True)
    return {
        "open s": opened,
        "shuffle s": time.monotonic() - begun - opened,
        "MiB": rss() - before,
        "lines": len(order),
    }


def ours(directory: Path, path: str) -> dict[str, float]:
    from hpcrl.config.options import Options
    from hpcrl.rollout.prompts.prompt_files import read_training
    from hpcrl.rollout.prompts.prompt_source import PromptSource

    tokenizer = tokenizer_in(directory)
    options = Options(
        prompt_data=path,
        input_key="prompt",
        label_key="label",
        rm_type="math",
        apply_chat_template=True,
        rollout_max_prompt_len=64,
    )
    before, begun = rss(), time.monotonic()
    file = read_training(options, tokenizer)
    opened = time.monotonic() - begun
    source = PromptSource(file, 42, True)
    held = rss() - before
    begun = time.monotonic()
    source.take(DRAWS)
    return {"open s": opened, "MiB": held, "draw ms": (time.monotonic() - begun) * 1000, "lines": len(file)}


def objects(directory: Path, path: str) -> dict[str, float]:
    tokenizer = tokenizer_in(directory)
    before, begun = rss(), time.monotonic()
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = tokenizer.render(row["prompt"], generation=True)
            if len(tokenizer.encode([text])[0]) <= 64:
                rows.append((text, row["label"], row))
    opened = time.monotonic() - begun
    return {"open s": opened, "MiB": rss() - before, "lines": len(rows)}


def measure(kind: str, directory: Path, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, str(directory), str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 lines; nothing is written to results/")
    parser.add_argument("--child", nargs=3)
    args = parser.parse_args()
    if args.child:
        kind, directory, path = args.child
        print(json.dumps({"index": index, "ours": ours, "objects": objects}[kind](Path(directory), path)))
        return
    lines = 100_000 if args.quick else args.lines
    few = lines // 100  # every row as an object takes too long, and too much, for all of them
    from tests.support.tiny import make_tokenizer

    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        make_tokenizer().save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps({"vocab_size": 128, "max_position_embeddings": 4096}))
        for name, count in (("all.jsonl", lines), ("few.jsonl", few)):
            with (directory / name).open("w") as file:
                for i in range(count):
                    file.write(
                        json.dumps(
                            {"prompt": [{"role": "user", "content": f"{i}+{i % 977}="}], "label": str(i + i % 977)}
                        )
                        + "\n"
                    )
        size = (directory / "all.jsonl").stat().st_size / 2**20
        indexed = measure("index", directory, directory / "all.jsonl")
        mine, theirs = (measure(kind, directory, directory / "few.jsonl") for kind in ("ours", "objects"))

    def line(what: str, row: dict[str, float]) -> str:
        n = row["lines"]
        return (
            f"| {what} | {n:,} | {row['open s']:.1f} | {row['open s'] / n * 1e6:.1f} | {row['MiB']:.0f} | "
            f"{row['MiB'] * 2**20 / n:.0f} |"
        )

    text = f"""Prompt files of short chat messages; the larger one is {size:.0f} MiB.

| | lines | seconds | us a line | MiB held | bytes a line |
|---|---|---|---|---|---|
{line("**hpcrl**: index, SHA-256, and the order of an epoch", indexed)}
{line("**hpcrl**: every line checked, rendered, measured in tokens where in doubt", mine)}
{line("every row a Python object, rendered, measured in tokens", theirs)}

Shuffling an epoch of the larger file takes {indexed["shuffle s"]:.1f} s more. A draw of {DRAWS} prompts takes {mine["draw ms"]:.0f} ms.
What a check holds is of its own size (caches, a thousand rows): it does not grow with the file.
The machine has {os.cpu_count()} CPUs, and its load was {os.getloadavg()[0]:.0f}.
"""
    print(text)
    if not args.quick:
        (REPO / "bench" / "results" / "prompts.md").write_text(text)
    memory = (theirs["MiB"] / theirs["lines"]) / (indexed["MiB"] / indexed["lines"])
    print(json.dumps({"memory": round(memory, 1), "time": round(theirs["open s"] / mine["open s"], 2)}))


if __name__ == "__main__":
    main()
