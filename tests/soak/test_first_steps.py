"""Every task of `hpcrl init` with an engine, and DPO: a run in its folder, as printed, learns what it is rewarded for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_steps import begun
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
