"""A whole run that trains the layer its engines draft with: every update brings it, and what was accepted is logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.report.page.panels import own_metrics
from tests.support.mtp_models import make_mimo
from tests.support.runs import NO_AGENT, POLICY, Run, recipe, rows

pytestmark = pytest.mark.vllm


def test_a_run_that_trains_what_drafts(tmp_path: Path, task: Path) -> None:
    """Two tensor-parallel ranks send their own pieces, whole and then what has changed; each update is compared."""
    drafts = '{ method = "mtp", num_speculative_tokens = 1 }'
    more = {
        "num_rollout": 3,
        "actor_num_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "weight_update": "delta",
        "weight_update_check_interval": 1,
        "mtp_num_layers": 1,
        "enable_mtp_training": True,
    }
    path = recipe(tmp_path, task, **(POLICY | NO_AGENT | more | {"run_dir": str(tmp_path / "run")}))
    path.write_text(path.read_text() + f"[vllm]\nspeculative_config = {drafts}\n")
    run = Run(path, "--hf-checkpoint", make_mimo(tmp_path / "model"), root=tmp_path / "run")
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert "no weight update brings" not in out
    found = [row for row in rows(run.root) if "train/loss" in row]
    assert len(found) == 3
    for row in found:
        assert 0 <= row["rollout/spec_accept_rate"] <= 1 <= row["rollout/spec_accept_length"] <= 2
        assert row["train/mtp_loss"] > 0 and row["perf/update_weights_bytes"] > 0
        assert not own_metrics([name for name in row if name.startswith("rollout/spec")])
