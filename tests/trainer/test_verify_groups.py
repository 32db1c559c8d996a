"""The groups that Megatron builds are those that `hpcrl plan` prints, or the run does not begin."""

from __future__ import annotations

import pytest

from hpcrl.config.options import Options
from tests.support.ranks import RankError, run_ranks


def verified(built: dict[str, int], planned: dict[str, int]) -> str:
    from hpcrl.trainer.parallel_state import initialize, shutdown, verify_groups

    base = {"actor_num_gpus_per_node": 4, "bf16": False}
    ranks = initialize(Options(**base, **built))
    try:
        verify_groups(Options(**base, **planned), ranks.rank)
    finally:
        shutdown()
    return "the same"


@pytest.mark.process
def test_groups_that_are_not_the_plans_end_the_run() -> None:
    tp = {"tensor_model_parallel_size": 2}
    pp = {"pipeline_model_parallel_size": 2}
    for sizes in (tp, pp, tp | pp, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}):
        assert run_ranks(4, verified, sizes, sizes) == ["the same"] * 4
    with pytest.raises(RankError, match=r"rank \d is in tp group \[\d, \d\], the plan says \[\d\]"):
        run_ranks(4, verified, tp, pp)
