"""Counted memory against what torch's allocator gives out in the same step with real tensors, phase by phase.

python -m tests.planning.rehearsal.test_real_memory        # a table of both
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.collectives import PHASES
from tests.support import families, real_memory
from tests.support.ranks import on_fake_device, run_ranks

pytestmark = pytest.mark.process

SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_hidden_layers": 4}
SIZES |= {"moe_intermediate_size": 192, "vocab_size": 2048}
FULL = {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
#: name -> family, ranks, options
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "TP2, recomputed": ("qwen3", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True} | FULL),
    "DP2, experts": ("glm4_moe", 2, {}),
}
NEAR = 0.05  #: relative


def options(path: Path, case: str) -> Options:
    kind, n, fields = CASES[case]
    made = families.make(path, kind, odd=False, **SIZES)
    base = {"bf16": True, "lr": 1e-6, "rollout_max_response_len": 512, "n_samples_per_prompt": 2, "rollout_num_gpus": 1}
    base |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024, "max_logprob_diff": 1e9}
    base |= {"update_weight_buffer_size": 8 << 20}
    return Options(hf_checkpoint=str(made), actor_num_gpus_per_node=n, **base, **fields)


def both(path: Path, case: str) -> list[tuple[str, int, int]]:
    """(phase, counted, allocated) of rank 0."""
    opts = options(path, case)
    counted = on_fake_device(real_memory.count, opts, 0)
    allocated = run_ranks(CASES[case][1], real_memory.allocate, opts, timeout=120)[0]
    return [(phase, counted[phase], allocated[phase]) for phase in PHASES]


@pytest.mark.parametrize("case", CASES)
def test_counted_is_what_is_allocated(tmp_path: Path, case: str) -> None:
    """Within 5 % in every phase, by torch's own record of its allocator."""
    for phase, counted, allocated in both(tmp_path, case):
        assert counted == pytest.approx(allocated, rel=NEAR), phase


def table() -> str:
    """Markdown."""
    lines = ["| | phase | counted, MiB | allocated, MiB | ratio |", "|---|---|---|---|---|"]
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            for phase, counted, allocated in both(Path(directory), case):
                mib = counted / 2**20, allocated / 2**20
                lines.append(f"| {case} | {phase} | {mib[0]:.1f} | {mib[1]:.1f} | {counted / allocated:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
