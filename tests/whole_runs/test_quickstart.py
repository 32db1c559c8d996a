"""The README's main job, as it stands: GRPO alone lifts held-out accuracy by at least 25 points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.report.closing_line import held_out
from tests.support.runs import REPO, Run, all_gone, metrics

pytestmark = pytest.mark.vllm


def test_the_quick_start_learns(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(REPO / "examples" / "quickstart.toml", "--run-dir", root, root=root)
    status, out = run.end(900)
    assert status == 0, out + run.logs()
    before, after = (float(x) for x in re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)  run", out.splitlines()[-1]).groups())
    assert 0.2 <= before <= 0.5, "supervised warm-up leaves the model middling"
    assert after >= before + 0.25
    assert held_out(root / "grpo")[0][0] == -1
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in metrics(root / "grpo").values()) <= 1e-5
    assert (root / "grpo" / "curves.png").exists() and (root / "sft" / "curves.png").exists()
    assert all_gone(root, [])
