"""Tests of the reward and of the rows: python test_reward.py, or pytest."""

import json
from pathlib import Path
from types import SimpleNamespace

from reward import reward


def graded(response, label):
    return reward(None, SimpleNamespace(response=response, label=label))


def rows(name):
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


def test_only_the_label_earns():
    assert graded("abc<|end|>", "abc") == graded(" abc", "abc") == 1.0
    assert graded("acb<|end|>", "abc") == graded("", "abc") == graded("abcc", "abc") == 0.0


def test_no_held_out_prompt_is_trained_on():
    assert not {row["prompt"] for row in rows("train.jsonl")} & {row["prompt"] for row in rows("heldout.jsonl")}


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
