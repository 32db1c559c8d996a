"""What the trainer writes of every sample: the same in every layout, and what the samples and the step say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.report.sample_records import Trained, read_looks, trained_file
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import run_ranks
from tests.trainer.step.test_invariance import batch, model, options, shares, start

pytestmark = pytest.mark.process
__all__ = ["model"]

LAYOUTS = {
    "one": (1, {}),
    "dp2 cp2": (4, {"context_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def train_on_rank(root: Path, opts: Options) -> None:
    from hpcrl.trainer.step import train_batch
    from hpcrl.trainer.step.sums import record_samples

    policy = start(opts)
    mine = ShareExchange(policy.ranks).exchange(shares(opts)[policy.ranks.dp_rank])
    train_batch.train(policy, policy.ranks, opts, mine, record=partial(record_samples, root, opts, policy.ranks))


def recorded(root: Path, opts: Options, ranks: int) -> list[Trained]:
    """What `hpcrl samples` reads, of every sample."""
    import msgspec

    (root / "samples").mkdir(parents=True)
    run_ranks(ranks, train_on_rank, root, opts)
    rows = [msgspec.json.decode(line, type=Trained) for line in trained_file(root, 0).read_bytes().splitlines()]
    (root / "samples/00000000.jsonl").write_text(
        "".join(f'{{"group":{row.group},"index":{row.index}}}\n' for row in rows)
    )
    assert [look.trained for look in read_looks(root, 0)] == rows
    return rows


def test_every_layout_writes_the_same(tmp_path: Path, model: Path) -> None:
    found = {
        name: recorded(tmp_path / name, options(model, n, num_steps_per_rollout=2, **layout), n)
        for name, (n, layout) in LAYOUTS.items()
    }
    data = batch()
    bounds = data.response_offsets
    for number, row in enumerate(found["one"]):
        span = slice(bounds[number], bounds[number + 1])
        mask = data.loss_mask[span] != 0
        assert (row.group, row.index, row.tokens) == (number // 4, number % 4, mask.sum())
        if not mask.any():
            assert (row.trainer, row.engine, row.differ, row.differ_max, row.advantage) == (0, 0, 0, 0, 0)
            continue
        assert np.isclose(row.engine, data.rollout_log_probs[span][mask].mean(dtype=float), rtol=1e-6)
        assert row.trainer < 0 and abs(row.trainer - row.engine) <= row.differ + 1e-6 <= row.differ_max + 2e-6
        reward = data.rows["reward"][number // 4 * 4 : number // 4 * 4 + 4]
        advantage = (data.rows["reward"][number] - reward.mean()) / (reward.std(ddof=1) + 1e-6)
        assert np.allclose(row.advantage, advantage, rtol=1e-5)
    for name in ("dp2 cp2", "tp2 pp2"):
        for one, other in zip(found["one"], found[name], strict=True):
            assert (one.group, one.index, one.tokens) == (other.group, other.index, other.tokens)
            for field in ("trainer", "engine", "differ", "differ_max", "advantage"):
                assert np.isclose(getattr(one, field), getattr(other, field), rtol=1e-4, atol=1e-5), (name, field)


def test_labels_have_no_engine_and_no_advantage(tmp_path: Path, model: Path) -> None:
    rows = recorded(tmp_path, options(model, loss_type="sft_loss"), 1)
    assert all(row.engine is row.differ is row.advantage is None for row in rows) and rows[0].trainer < 0
