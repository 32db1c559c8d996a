r"""The rewards math, deepscaler, dapo and f1 next to slime's own functions: equal for answers as models write them, and
where not.

recorded/rewards.json has slime's for each answer and label (`SLIME_CHECKOUT=DIR python -m
tests.config.slime.test_reward_numbers` writes it; it needs sympy and pylatexenc); where SLIME_CHECKOUT names a checkout and
both are installed, its functions are run here.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.rollout.rewards import dapo, deepscaler, f1, math
from tests.config.slime.slime_functions import functions

FILE = Path(__file__).parent / "recorded" / "rewards.json"
CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
REWARDS = "slime/rollout/rm_hub"
SOURCES = {
    f"{REWARDS}/math_utils.py": "grade_answer_verl, 5046addb",
    f"{REWARDS}/deepscaler.py": "get_deepscaler_rule_based_reward, 2944cca5",
    f"{REWARDS}/math_dapo_utils.py": "compute_score, 9ed8b38e",
    f"{REWARDS}/f1.py": "f1_score, as stored in a copy at e0be9a07",
}
#: (content of a box, label)
BOXES = [
    ("5", "5"), ("6", "5"), ("-5", "5"), ("5", 5), ("5.0", "5"), ("0.5", r"\frac{1}{2}"), ("1/2", "0.5"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"), (r"\frac34", r"\frac{3}{4}"), ("3/4", r"\frac{3}{4}"), (".5", "0.5"),
    (r"\frac{1}{3}", r"\frac{1}{2}"), ("1,000", "1000"), ("1000", "1,000"), (r"12\%", "12"), ("12%", "12"),
    (r"\$12", "12"), (r"90^\circ", "90"), (r"90^{\circ}", "90"), (r"12\text{ cm}", "12"), ("12 cm", "12"),
    (r"\text{yes}", "yes"), ("Yes", "yes"), ("no", "yes"), (r"\text{(B)}", r"\text{(B)}"), ("x=5", "5"), ("x = 5", "6"),
    (r"\sqrt{2}", r"\sqrt2"), (r"2\sqrt{3}", r"\sqrt{12}"), (r"\sqrt{3}", r"\sqrt{2}"), ("(1,2)", "(1,2)"),
    ("(1, 2)", "(1,2)"), ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"), ("(1,2,3)", "(1,2)"), (r"\left(1,2\right)", "(1,2)"),
    ("x+1", "1+x"), ("2x+2", "2(x+1)"), ("x+2", "x+1"), (r"\pi", "3.14"), (r"2\pi", r"2\pi"), (r"\pi/2", r"\frac{\pi}{2}"),
    ("3,4", "3,4"), ("17 ", "17"), (r"\boxed{3}", "3"), ("3", r"\boxed{3}"), ("", "5"), ("5", ""), (r"1\frac{1}{2}", "3/2"),
    ("-3/4", r"-\frac{3}{4}"), (r"-\frac{3}{4}", r"\frac{-3}{4}"), ("0", "0"), ("00", "0"), ("7!", "5040"), ("2^3", "8"),
    (r"2^{10}", "2^{10}"), ("a", "A"), (r"\infty", r"\infty"), ("12 miles", "12"), ("3 million", "3000000"),
    (r"\frac{10}{2}", "5"), (r"\{2,1\}", r"\{1,2\}"), ("12 cm", "12 meters"), ("y=5", "x=5"), ("1e3", "1000"), ("2516_9", "2516_8"),
]  # fmt: skip
#: where (box, label) is judged otherwise -> (ours, slime's) by math; docs/data.md says why
OTHERWISE: dict[tuple[str, Any], tuple[float, float]] = {
    ("7!", "5040"): (1.0, 0.0),
    ("2^3", "8"): (1.0, 0.0),
    ("3 million", "3000000"): (1.0, 0.0),
    (r"\frac{10}{2}", "5"): (1.0, 0.0),
    (r"\{2,1\}", r"\{1,2\}"): (1.0, 0.0),
    ("y=5", "x=5"): (0.0, 1.0),
    ("12 cm", "12 meters"): (0.0, 1.0),
}
#: responses around a box
AROUND = ["So it is \\boxed{{{}}}.", "<think>\\boxed{{99}} or</think> Thus $\\boxed{{{}}}$"]
DEEP = ["<think>hm</think>\\boxed{{{}}}", "\\boxed{{{}}}", "a ###Response b \\boxed{{{}}}"]
#: (what comes last, label) of dapo, whose labels are whole numbers
SAID = [
    ("Answer: 34", "34"), ("Answer: 35", "34"), ("answer : 34", 34), ("Answer: $34$", "34"), ("Answer: \\boxed{34}", "34"),
    ("Answer: 34.", "34"), ("Answer: 34.0", "34"), ("Answer: 1,234", "1234"), ("Answer: 3\n\nAnswer: 4", "4"),
    ("Answer: 3\n\nAnswer: 4", "3"), ("34", "34"), ("\\boxed{34}", "34"), ("Answer: x=34", "34"), ("Answer: 34 dollars", "34"),
    ("Answer: 34<|im_end|>", "34"), ("Answer: \\text{34}", "34"), ("Answer: -7", "-7"), ("Answer: 7", "-7"), ("Answer:", "0"),
    ("Answer: 34" + " and so on" * 40, "34"), ("Answer: 34 cm", "34"), ("Answer: 17*2", "34"), ("Answer: \\frac{68}{2}", "34"),
    ("**Answer:** 34", "34"), ("Answer: **34**", "34"),
]  # fmt: skip
SAID_OTHERWISE = dict.fromkeys(
    [
        (said, "34")
        for said in (
            "Answer: 34.",
            "Answer: 34.0",
            "Answer: 17*2",
            "Answer: \\frac{68}{2}",
            "**Answer:** 34",
            "Answer: **34**",
        )
    ],
    (1.0, -1.0),
)
WORDS = [
    ("The Eiffel Tower", "eiffel tower"), ("Tower", "Eiffel Tower"), ("yes", "no"), ("yes", "yes"), ("yes it is", "yes"),
    ("a", "the"), ("", "x"), ("one two two", "two two three"), ("New York, N.Y.", "new york ny"), ("Paris", "London"),
    ("no answer", "noanswer"), ("an apple a day", "apple day"), ("x" * 3 + " y", "y"),
]  # fmt: skip


def sample(response: str, label: Any) -> Any:
    return SimpleNamespace(response=response, label=label, metadata={})


def cases() -> dict[str, list[tuple[str, Any]]]:
    """Reward -> (response, label) of each."""
    return {
        "math": [(form.format(box), label) for box, label in BOXES for form in AROUND],
        "deepscaler": [(form.format(box), label) for box, label in BOXES[:30] for form in DEEP],
        "dapo": [(f"We see.\n{said}", label) for said, label in SAID],
        "f1": list(WORDS),
    }


def ours(reward: str, response: str, label: Any) -> float:
    given = sample(response, label)
    if reward == "dapo":
        return float(dapo.reward(Options(), given)["score"])
    return float({"math": math, "deepscaler": deepscaler, "f1": f1}[reward].reward(Options(), given))


def slimes(checkout: Path) -> dict[str, Callable[[str, Any], float]]:
    """slime's rewards by name, called as its async_rm calls them."""
    of_sympy = {
        "re": re,
        "sympy": importlib.import_module("sympy"),
        "sympy_parser": importlib.import_module("sympy.parsing.sympy_parser"),
        "latex2text": importlib.import_module("pylatexenc.latex2text"),
        "Optional": Any,
    }
    files = {
        name: functions(checkout, f"{REWARDS}/{name}.py", shared)
        for name, shared in {
            "math_utils": of_sympy,
            "math_dapo_utils": {"re": re},
            "f1": {name: importlib.import_module(name) for name in ("re", "string")}
            | {"Counter": importlib.import_module("collections").Counter},
        }.items()
    }
    deep = functions(checkout, f"{REWARDS}/deepscaler.py", files["math_utils"])
    score = files["math_dapo_utils"]["compute_score"]
    return {
        "math": lambda response, label: float(bool(files["math_utils"]["grade_answer_verl"](response, label))),
        "deepscaler": lambda response, label: float(deep["get_deepscaler_rule_based_reward"](response, label)),
        "dapo": lambda response, label: float(score(response, label)["score"]),
        "f1": lambda response, label: float(files["f1"]["f1_score"](response, label)[0]),
    }


def otherwise(reward: str, number: int) -> tuple[float, float] | None:
    """(ours, slime's) of a case that is judged otherwise."""
    if reward == "dapo":
        return SAID_OTHERWISE.get(SAID[number])
    return OTHERWISE.get(BOXES[number // len(AROUND)]) if reward == "math" else None


def compare(theirs: dict[str, list[float]]) -> None:
    wrong = []
    for reward, given in cases().items():
        for number, ((response, label), their) in enumerate(zip(given, theirs[reward], strict=True)):
            mine, known = ours(reward, response, label), otherwise(reward, number)
            if abs(mine - their) > 1e-9 and known != (mine, their):
                wrong.append((reward, response, label, mine, their))
            assert known is None or known == (mine, their), (response, label)
    assert not wrong, "\n".join(map(str, wrong))


def test_rewards_are_the_recorded_ones() -> None:
    recorded = json.loads(FILE.read_text())
    assert recorded["functions"] == SOURCES
    compare(recorded["rewards"])


@pytest.mark.skipif(
    not CHECKOUT or importlib.util.find_spec("pylatexenc") is None,
    reason="SLIME_CHECKOUT names no checkout of slime's, or pylatexenc is not installed",
)
def test_rewards_are_slimes() -> None:
    """Its own functions, run here."""
    found = slimes(Path(CHECKOUT))
    compare({reward: [found[reward](*pair) for pair in given] for reward, given in cases().items()})


def main() -> None:
    """Record slime's rewards."""
    found = slimes(Path(CHECKOUT))
    rewards = {reward: [found[reward](*pair) for pair in given] for reward, given in cases().items()}
    FILE.write_text(json.dumps({"functions": SOURCES, "rewards": rewards}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
