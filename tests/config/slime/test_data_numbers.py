"""Prompts, labels, metadata and their order next to slime's own data set: which rows are taken of a file or of a slice,
what the model reads of each, and the order of each epoch.

recorded/data.json has slime's (`SLIME_CHECKOUT=DIR python -m tests.config.slime.test_data_numbers` writes it); where
SLIME_CHECKOUT names a checkout, its functions are run here.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import read_words
from hpcrl.config.slime.arguments import translate
from hpcrl.rollout.prompts.prompt_files import read_prompts
from hpcrl.rollout.prompts.prompt_source import PromptSource
from hpcrl.rollout.prompts.row_checks import Keys
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.config.slime.slime_functions import functions, method
from tests.support.tiny import make_tokenizer

FILE = Path(__file__).parent / "recorded" / "data.json"
CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
SOURCE = "slime/utils/data.py"
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "label": "1", "metadata": {"a": 1}},
    {"prompt": [{"role": "user", "content": "two"}], "label": "2"},
    {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "three"}], "label": 3},
    {"prompt": "a\nline", "label": "x", "metadata": {"b": [1, {"c": None}]}, "tools": [{"name": "add"}]},
    {"prompt": [{"role": "user", "content": "long " * 30}], "label": "4"},
    *({"prompt": [{"role": "user", "content": f"and {n}"}], "label": str(n), "metadata": {}} for n in range(5, 12)),
]
TEXTS = [{"prompt": f"text {n} " * (n % 4 + 1), "label": str(n)} for n in range(9)]
EPOCHS = 3
#: name -> (rows, what follows the path, flags)
CASES: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "chat": (ROWS, "", "--apply-chat-template --rollout-shuffle"),
    "short": (ROWS, "", "--apply-chat-template --rollout-shuffle --rollout-max-prompt-len 60 --rollout-seed 7"),
    "slice": (ROWS, "@[2:8]", "--apply-chat-template"),
    "text": (TEXTS, "", "--rollout-shuffle --rollout-seed 1234 --rollout-max-prompt-len 24"),
    "start": (TEXTS, "@[:4]", "--rollout-shuffle"),
}


def flags_of(case: str) -> list[str]:
    return ["--input-key", "prompt", "--label-key", "label", "--rm-type", "math", *CASES[case][2].split()]


def ours(case: str, folder: Path) -> list[list[Any]]:
    """Of each prompt of EPOCHS epochs what the model reads, label and metadata."""
    rows, part, _ = CASES[case]
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, "max_position_embeddings": 2048}))
    found = translate([*flags_of(case), "--prompt-data", f"{folder / 'p.jsonl'}{part}"])
    assert not found.wrong, found.wrong
    options = Options(**{name: value for name, value in found.values.items() if name in Options.model_fields})
    tokenizer = Tokenizer(folder)
    [word] = read_words(options.prompt_data, "--prompt-data")
    file = read_prompts(word, Keys.from_options(options), tokenizer)
    source = PromptSource(file, options.rollout_seed, options.rollout_shuffle)
    taken = [group.prompt for group in source.next_groups(EPOCHS * len(file))]
    return [[tokenizer.decode(prompt.tokens), prompt.label, prompt.metadata] for prompt in taken]


def slimes(checkout: Path, case: str, folder: Path) -> list[list[Any]]:
    """As `ours`, of slime's Dataset, walked as its data source walks it."""
    rows, part, flags = CASES[case]
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shared: dict[str, Any] = {"itertools": itertools, "json": json, "np": np, "os": os, "random": random, "re": re}
    shared |= {"Sample": SimpleNamespace, "logger": logging.getLogger("slime")}
    shared |= functions(checkout, SOURCE, shared)
    words = flags.split()
    limit, seed = (
        int(words[words.index(flag) + 1]) if flag in words else default
        for flag, default in (("--rollout-max-prompt-len", None), ("--rollout-seed", 42))
    )
    data = SimpleNamespace()
    method(checkout, SOURCE, "Dataset", "__init__", shared)(
        data,
        f"{folder / 'p.jsonl'}{part}",
        make_tokenizer(),
        None,
        limit,
        prompt_key="prompt",
        label_key="label",
        tool_key="tools",
        seed=seed,
        apply_chat_template="--apply-chat-template" in words,
    )
    shuffle = method(checkout, SOURCE, "Dataset", "shuffle", shared)
    found = []
    for epoch in range(EPOCHS):
        if "--rollout-shuffle" in words:
            shuffle(data, epoch)
        found += [[sample.prompt, sample.label, dict(sample.metadata)] for sample in data.samples]
    return found


def without_tools(prompts: list[list[Any]]) -> list[list[Any]]:
    """slime repeats a row's tools in its metadata; docs/from-slime.md says that hpcrl does not."""
    return [[text, label, {k: v for k, v in metadata.items() if k != "tools"}] for text, label, metadata in prompts]


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_the_recorded_ones(case: str, tmp_path: Path) -> None:
    recorded = json.loads(FILE.read_text())
    assert set(recorded["prompts"]) == set(CASES)
    assert ours(case, tmp_path) == without_tools(recorded["prompts"][case])


@pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime's")
@pytest.mark.parametrize("case", CASES)
def test_prompts_are_slimes(case: str, tmp_path: Path) -> None:
    """Its own data set, read here."""
    assert ours(case, tmp_path) == without_tools(slimes(Path(CHECKOUT), case, tmp_path))


def main() -> None:
    """Record slime's prompts."""
    with tempfile.TemporaryDirectory() as folder:
        found = {case: slimes(Path(CHECKOUT), case, Path(folder)) for case in CASES}
    FILE.write_text(
        json.dumps({"functions": f"{SOURCE}: Dataset, read_file, filter_long_prompt, 3c9aa092", "prompts": found})
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
