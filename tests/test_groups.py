"""Groups before any process: a partition, and exactly Megatron-core's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import UsageError
from hpcrl.groups import layout

SIZES = st.sampled_from([1, 2, 3, 4])


@given(SIZES, SIZES, SIZES, SIZES)
def test_groups_are_a_partition(tp: int, pp: int, cp: int, dp: int) -> None:
    """Each kind is a partition into groups of its size."""
    world = tp * pp * cp * dp
    found = layout(world, tp, pp, cp)
    for kind, size in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp), ("dp-cp", cp * dp)):
        assert {len(group) for group in found[kind]} == {size}
        assert sorted(rank for group in found[kind] for rank in group) == list(range(world))
    assert all(group == list(range(group[0], group[0] + tp)) for group in found["tp"])


@pytest.mark.process  # Megatron's import takes seconds
@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "ep", "etp"),
    [
        (64, 8, 4, 2, 16, 1),
        (8, 2, 1, 2, 1, 2),
        (8, 2, 2, 1, 4, 1),
        (16, 2, 2, 2, 2, 2),
        (4, 1, 1, 1, 4, 1),
        (24, 2, 3, 2, 2, 1),
    ],
)
def test_they_are_megatrons(world: int, tp: int, pp: int, cp: int, ep: int, etp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=tp, ep=1, dp=world // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    experts = RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    found = layout(world, tp, pp, cp, ep, etp)
    wanted = {kind: dense.get_ranks(kind) for kind in ("tp", "cp", "dp", "pp", "dp-cp")}
    if ep > 1:
        wanted |= {"ep": experts.get_ranks("ep"), "etp": experts.get_ranks("tp"), "edp": experts.get_ranks("dp")}
    assert {kind: sorted(groups) for kind, groups in found.items()} == {
        kind: sorted(groups) for kind, groups in wanted.items()
    }


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="64 ranks cannot be divided.*8 x CP 3 x PP 4 = 96"):
        layout(64, tp=8, pp=4, cp=3)


def test_plan_marks_groups_across_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan command says which groups span hosts."""
    from hpcrl.cli.main import main

    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=2\n")
    (tmp_path / "r.toml").write_text(
        'hf_checkpoint = "m"\nprompt_data = "p"\nlabel_key = "l"\nrm_type = "exact"\nn_samples_per_prompt = '
        "4\nnum_rollout = 1\nactor_num_nodes = 2\nactor_num_gpus_per_node = 4\nrollout_num_gpus = "
        "2\nrollout_num_gpus_per_engine = 2\ntensor_model_parallel_size = 2\npipeline_model_parallel_size = 2\n"
    )
    assert main(["plan", str(tmp_path / "r.toml"), "--hostfile", str(tmp_path / "hosts")]) == 0
    out = capsys.readouterr().out
    assert "engine   0      c     0-1" in out
    assert "tp:    4 groups of 2, stride 1, each inside one host\n" in out
    assert "pp:    4 groups of 2, stride 4, each over 2 hosts\n" in out
    assert main(["plan", str(tmp_path / "r.toml"), "--hostfile", str(tmp_path / "hosts"), "--groups"]) == 0
    out = capsys.readouterr().out
    assert "tp     0,1  on a\n" in out and "pp     0,4  on a, b\n" in out
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=1\n")
    assert main(["plan", str(tmp_path / "r.toml"), "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "engines of --rollout-num-gpus-per-engine 2 slots do not fit" in capsys.readouterr().err
    assert "rank 0 ->" not in out, "who sends weights to whom is said once, by the estimate of an update"
