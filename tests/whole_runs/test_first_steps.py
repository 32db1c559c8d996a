"""The first hour of a user, with the installed `hpcrl`: a folder of `hpcrl init`, its test, the run in it.

tests/soak/test_first_steps.py does the same with the tasks that take longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_steps import begun, code_of, typed_in
from tests.support.runs import REPO, all_gone, rows

pytestmark = pytest.mark.process


def test_a_folder_trains_at_once(tmp_path: Path) -> None:
    """`hpcrl init`, its test and `hpcrl run`, as printed: fine-tuning begins in seconds, learns, and leaves nothing."""
    root = begun(tmp_path, "sft")
    losses = [row["train/loss"] for row in rows(root) if "train/loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2
    assert all_gone(root, [])
    status = typed_in(tmp_path / "sft", f"hpcrl status runs/{root.name}")
    assert "finished" in status


def test_the_notebook_runs(tmp_path: Path) -> None:
    """examples/first_run.ipynb, cell by cell: a folder, a run, its status, losses and checkpoints from Python."""
    (tmp_path / "cells.py").write_text(code_of(REPO / "examples" / "first_run.ipynb"))
    said = typed_in(tmp_path, "python cells.py")
    (root,) = (tmp_path / "runs").glob("mine-*")
    assert f"hpcrl: run directory: {root}" in said and all_gone(root, [])
