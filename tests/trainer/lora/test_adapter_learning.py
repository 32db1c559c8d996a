"""The quick start with an adapter in GRPO in the place of all weights: it learns as well, and updates bring the adapter
alone.  SEED names the seeds, with commas between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.report.closing_line import held_out
from tests.support.runs import REPO, Run, rows

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,7,1234").split(",")]
ADAPTER = ("--grpo.lora-rank", "8", "--grpo.lora-alpha", "16", "--grpo.lr", "3e-3")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns_with_an_adapter(seed: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(REPO / "examples/quickstart.toml", "--run-dir", root, "--seed", str(seed), *ADAPTER, root=root)
    status, out = run.end(900)
    assert status == 0, out + run.logs()
    found = [value for _, value in held_out(root / "grpo")["heldout"]]
    print(f"seed {seed}: " + " -> ".join(f"{value:.3f}" for value in found), flush=True)
    assert 0.2 <= found[0] <= 0.5 and found[-1] >= 0.75
    sent = {row["perf/update_weights_bytes"] for row in rows(root / "grpo") if "perf/update_weights_bytes" in row}
    assert len(sent) == 1 and sent.pop() < 400_000
