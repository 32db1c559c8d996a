"""Ranks of small runs take their step on the device that knows shapes alone, fit together, and fault what is planted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.collectives import PHASES, differing
from hpcrl.planning.rehearsal.ranks import same_rows, stages
from hpcrl.planning.rehearsal.reports import RankReport
from tests.support import families
from tests.support.mtp_models import MAKERS
from tests.support.ranks import on_fake_gpu

pytestmark = pytest.mark.process

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
#: name -> family, ranks, options
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 pp2": ("qwen3", 4, TP2 | {"pipeline_model_parallel_size": 2}),
    "tp2 pp2 further token": (
        "mimo",
        4,
        TP2 | {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1, "enable_mtp_training": True},
    ),
    "cp2 dp2": (
        "glm4",
        4,
        {"context_parallel_size": 2, "use_kl_loss": True, "kl_loss_coef": 0.1, "megatron": {"nccl_ub": True}},
    ),
    "cp2 latent attention": ("deepseek_v3", 2, {"context_parallel_size": 2}),
    "tp2 ep2": ("glm4_moe", 2, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


def options(path: Path, kind: str, n: int, fields: dict[str, Any]) -> Options:
    make = MAKERS[kind] if "mtp_num_layers" in fields else partial(families.make, model_type=kind)
    made = make(path, vocab_size=256, num_hidden_layers=2)
    base = {"bf16": True, "lr": 1e-6, "rollout_max_response_len": 64, "n_samples_per_prompt": 2}
    base |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 128, "rollout_num_gpus": 1}
    return Options(hf_checkpoint=str(made), actor_num_gpus_per_node=n, **base, **fields)


def rehearsed(opts: Options, rank: int, skipped: str = "") -> RankReport:
    """A rank's report; skipped: a collective of torch that this rank forgets the first of."""
    import torch.distributed as dist

    from hpcrl.planning.rehearsal.one_rank import rehearse

    if not skipped:
        return rehearse(opts, rank)
    stock, left = getattr(dist, skipped), [1]

    def forgetful(*args: Any, **named: Any) -> Any:
        group = named.get("group", next((each for each in args if isinstance(each, dist.ProcessGroup)), None))
        if left and dist.get_world_size(group) > 1:  # in a group of its own it waits for none
            left.pop()
            return None
        return stock(*args, **named)

    with mock.patch.object(dist, skipped, forgetful):
        return rehearse(opts, rank)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_rank_takes_its_step_and_fits(tmp_path: Path, case: str) -> None:
    """Every rank of a layout passes every phase, its calls fit those of the others, and a forgotten one is found."""
    kind, n, fields = LAYOUTS[case]
    opts = options(tmp_path, kind, n, fields)
    reports = [on_fake_gpu(rehearsed, opts, rank) for rank in range(n)]
    assert all(set(report.peaks) == set(PHASES) for report in reports)
    assert all(report.calls and max(report.peaks.values()) > min(report.peaks.values()) > 0 for report in reports)
    calls = {report.rank: report.calls for report in reports}
    assert differing(calls, stages(opts), same_rows(opts)) == ""
    calls[n - 1] = on_fake_gpu(rehearsed, opts, n - 1, "all_reduce").calls
    assert f"rank {n - 1}" in differing(calls, stages(opts), same_rows(opts))
