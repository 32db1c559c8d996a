"""What the policy reads of a command's end."""

from __future__ import annotations

import pytest

from hpcrl.rollout.samplers.bash_tool import LONGEST, shown
from hpcrl.sandbox import BoxResult


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (BoxResult(0, "two\n", ""), "two"),
        (BoxResult(0, "", ""), "[exit 0]"),
        (BoxResult(2, "", "no such file\n"), "no such file\n[exit 2]"),
        (BoxResult(-9, "half", "", timed_out=True), "half\n[it took too long]"),
        (BoxResult(-9, "", "", limit="over"), "[over]"),
        (BoxResult(3, "", "", limit="the disk is full"), "[the disk is full; exit 3]"),
    ],
)
def test_how_a_command_ended(done: BoxResult, text: str) -> None:
    """Where it failed by itself on a full disk, its status is told as well: a test's result may be in it."""
    assert shown(done) == text


def test_the_middle_of_much_output() -> None:
    text = shown(BoxResult(0, "a" * LONGEST + "b" * LONGEST, ""))
    assert text.startswith("a") and text.endswith("b") and "[...]" in text and len(text) < LONGEST + 10
