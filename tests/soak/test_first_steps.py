"""Every task of `hpcrl init` with an engine, and DPO: a run in its folder, as printed, learns what it is rewarded for."""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

import pytest

from tests.support.first_steps import begun, typed_in
from tests.support.runs import rows

pytestmark = [pytest.mark.soak, pytest.mark.vllm]


@pytest.mark.parametrize("task", ["math", "tools", "agents"])
def test_the_reward_rises(tmp_path: Path, task: str) -> None:
    """A first curve of one's own: the last quarter of the steps earns more than the first."""
    found = [row["rollout/reward"] for row in rows(begun(tmp_path, task)) if "train/loss" in row]
    quarter = len(found) // 4
    assert sum(found[-quarter:]) > 1.3 * sum(found[:quarter]), found


def test_preferences_are_learned(tmp_path: Path) -> None:
    found = [row["train/loss"] for row in rows(begun(tmp_path, "dpo")) if "train/loss" in row]
    assert found[-1] < found[0] / 2, found


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("letters", ["abcdefghij", string.digits], ids=["letters", "digits"])
def test_a_naive_task_is_learned(tmp_path: Path, letters: str, seed: int) -> None:
    """A newcomer's rows in the folder of `sft-grpo`: three letters or digits to sort, a reward of right or wrong. GRPO adds
    to what SFT has taught, on rows that are never trained on, within ten minutes on a CPU."""
    typed_in(tmp_path, "hpcrl init mine --task sft-grpo")
    words = ["".join(word) for word in itertools.product(letters, repeat=3)]
    random.Random(seed).shuffle(words)
    for name, part in (("train", words[:500]), ("heldout", words[500:564])):
        lines = (json.dumps({"prompt": f"put in order: {word}", "label": "".join(sorted(word))}) for word in part)
        (tmp_path / "mine" / f"{name}.jsonl").write_text("\n".join(lines))
    typed_in(tmp_path / "mine", f"hpcrl run --seed {seed}", seconds=600)
    (root,) = (tmp_path / "mine" / "runs").glob("mine-*")
    accuracy = "eval/heldout/accuracy"
    found = [row[accuracy] for row in rows(root / "grpo") if accuracy in row]
    assert found[-1] > 0.8 and 1 - found[-1] < 0.6 * (1 - found[0]), found
