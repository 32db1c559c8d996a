"""The reward gpqa next to slime's own compute_gpqa_reward: equal for answers as models write them, and where not.

recorded/gpqa.json has slime's for each pair of SAID and LABELS (`SLIME_CHECKOUT=DIR python -m tests.config.slime.test_gpqa`
writes it); where SLIME_CHECKOUT names a checkout, its function is run here.
"""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.rollout.rewards import gpqa
from tests.config.slime.slime_functions import functions

FILE = Path(__file__).parent / "recorded" / "gpqa.json"
SOURCE = "slime/rollout/rm_hub/gpqa.py"
CHOICES = ["red shift", "blue shift", "no shift", "a shift of 3 nm"]
SAID = [
    "Answer: {}",
    "The answer is {}.",
    "<think>maybe A, or the answer is D</think>So the correct option: {}",
    "We compute the energy.\n\nFinal answer: {}",
    "{} is correct",
    "{}",
    "I choose {}",
    "choice {}",
    "It is the third, hence ({}).",
]
#: label, and metadata with it
LABELS: list[tuple[Any, dict[str, Any]]] = [
    ("C", {}),
    (2, {}),
    (2, {"choices": CHOICES}),
    ("no shift", {"choices": CHOICES}),
    ("anything", {"correct_letter": "c", "choices": CHOICES}),
]
#: responses that are judged otherwise, with the label C -> (ours, slime's); docs/data.md says why
OTHERWISE = {
    "At first the answer is A. On reflection, the answer is C.": (1.0, 0.0),
    "The answer is \\boxed{C}, not A": (1.0, 0.0),
}


def ours(response: str, label: Any, metadata: dict[str, Any]) -> float:
    sample = SimpleNamespace(label=label, metadata=dict(metadata), response=response)
    return gpqa.reward(Options(), sample)  # type: ignore[arg-type]


def slimes(checkout: Path, response: str, label: Any, metadata: dict[str, Any]) -> float:
    shared = {"re": re, "string": string, "DEFAULT_VALID_LETTERS": list(string.ascii_uppercase[:10])}
    return float(functions(checkout, SOURCE, shared)["compute_gpqa_reward"](response, label, dict(metadata)))


def pairs() -> list[tuple[str, Any, dict[str, Any]]]:
    return [(said.format(letter), *label) for said in SAID for letter in "ACD" for label in LABELS]


@pytest.mark.parametrize("number", range(len(SAID)))
def test_it_is_the_recorded_one(number: int) -> None:
    recorded = json.loads(FILE.read_text())["rewards"]
    assert len(recorded) == len(pairs())
    each = len(pairs()) // len(SAID)
    part = slice(number * each, (number + 1) * each)
    for pair, wanted in zip(pairs()[part], recorded[part], strict=True):
        assert ours(*pair) == wanted, pair


@pytest.mark.skipif(not os.environ.get("SLIME_CHECKOUT"), reason="SLIME_CHECKOUT names no checkout of slime's")
def test_it_is_slimes() -> None:
    for pair in pairs():
        assert ours(*pair) == slimes(Path(os.environ["SLIME_CHECKOUT"]), *pair), pair
    for response, (_, theirs) in OTHERWISE.items():
        assert slimes(Path(os.environ["SLIME_CHECKOUT"]), response, "C", {}) == theirs


@pytest.mark.parametrize("response", OTHERWISE)
def test_where_it_is_not(response: str) -> None:
    assert ours(response, "C", {}) == OTHERWISE[response][0]


def main() -> None:
    """Record slime's rewards."""
    rewards = [slimes(Path(os.environ["SLIME_CHECKOUT"]), *pair) for pair in pairs()]
    FILE.write_text(json.dumps({"function": f"{SOURCE}: compute_gpqa_reward, 643f912f", "rewards": rewards}) + "\n")


if __name__ == "__main__":
    main()
