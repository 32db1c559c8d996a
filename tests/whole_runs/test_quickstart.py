"""The README's main job, as it stands: GRPO alone lifts held-out accuracy by at least 25 points."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hpcrl.report.closing_line import held_out
from tests.support.quick_start import QuickStart
from tests.support.runs import REPO, all_gone, metrics

pytestmark = pytest.mark.vllm


def test_the_quick_start_learns(quick_start: QuickStart) -> None:
    root = quick_start.root
    logs = "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(root.glob("*/logs/*/*.log")))
    assert quick_start.status == 0, quick_start.out + logs
    last = quick_start.out.splitlines()[-1]
    before, after = (float(x) for x in re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)  .*run", last).groups())
    assert 0.2 <= before <= 0.5, "supervised warm-up leaves the model middling"
    assert after >= before + 0.25
    assert held_out(root / "grpo")["heldout"][0][0] == -1
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in metrics(root / "grpo").values()) <= 1e-5
    words = [sys.executable, "examples/arithmetic.py", "--answers", str(root / "grpo")]
    table = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    shares = [float(line.split()[1]) for line in table[1:]]
    assert 0.2 <= shares[0] <= 0.5 < shares[-1], "what GRPO has changed most is how many answers are worked out"
    assert (root / "grpo" / "curves.svg").exists() and (root / "sft" / "curves.svg").exists()
    assert all_gone(root, [])
