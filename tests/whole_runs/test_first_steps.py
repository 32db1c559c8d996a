"""The first hour of a user, with the installed `hpcrl`: a folder of `hpcrl init`, its test, the run in it.

tests/soak/test_first_steps.py does the same with the tasks that take longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_steps import begun, typed_in
from tests.support.runs import all_gone, rows

pytestmark = pytest.mark.process


def test_a_folder_trains_at_once(tmp_path: Path) -> None:
    """`hpcrl init`, its test and `hpcrl run`, as printed: fine-tuning begins in seconds, learns, and leaves nothing."""
    root = begun(tmp_path, "sft")
    losses = [row["train/loss"] for row in rows(root) if "train/loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2
    assert all_gone(root, [])
    status = typed_in(tmp_path / "sft", f"hpcrl status runs/{root.name}")
    assert "finished" in status
