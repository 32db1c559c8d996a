"""What the trainer writes of every sample: the same in every layout, and what the samples and the step say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.report.sample_records import Trained, read_looks, read_tokens, trained_file
from hpcrl.trainer.step.share_exchange import ShareExchange
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


def recorded(root: Path, opts: Options, ranks: int) -> tuple[list[Trained], list[dict[str, np.ndarray]]]:
    """What `hpcrl samples` reads, of every sample."""
    import msgspec

    (root / "samples").mkdir(parents=True)
    run_ranks(ranks, train_on_rank, root, opts)
    rows = [msgspec.json.decode(line, type=Trained) for line in trained_file(root, 0).read_bytes().splitlines()]
    (root / "samples/00000000.jsonl").write_text(
        "".join(f'{{"group":{row.group},"index":{row.index}}}\n' for row in rows)
    )
    looks = list(read_looks(root, 0))
    assert [look.trained for look in looks] == rows
    columns = [read_tokens(root, 0, look.at) for look in looks]
    assert None not in columns
    return rows, columns  # type: ignore[return-value]


def test_every_layout_writes_the_same(tmp_path: Path, model: Path) -> None:
    more: dict[str, Any] = {"save_token_data": 1, "num_steps_per_rollout": 2}
    found = {
        name: recorded(tmp_path / name, options(model, n, **more, **layout), n) for name, (n, layout) in LAYOUTS.items()
    }
    rows, columns = found["one"]
    data = batch()
    bounds = data.response_offsets
    for number, (row, tokens) in enumerate(zip(rows, columns, strict=True)):
        span = slice(bounds[number], bounds[number + 1])
        mask = data.loss_mask[span] != 0
        assert (row.group, row.index, row.tokens) == (number // 4, number % 4, mask.sum())
        assert (tokens["engine"] == data.logprobs[span]).all() and (tokens["mask"] == data.loss_mask[span]).all()
        end = int(data.token_offsets[number + 1])
        assert (tokens["tokens"] == data.tokens[end - len(mask) : end]).all()
        assert np.isnan(tokens["trainer"][~mask]).all() and not np.isnan(tokens["trainer"][mask]).any()
        if not mask.any():
            assert (row.trainer, row.engine, row.differ, row.differ_max, row.advantage) == (0, 0, 0, 0, 0)
            continue
        differ = np.abs(tokens["trainer"][mask].astype(float) - tokens["engine"][mask])
        wanted = (
            tokens["trainer"][mask].mean(dtype=float),
            tokens["engine"][mask].mean(dtype=float),
            differ.mean(),
            differ.max(),
        )
        assert np.allclose((row.trainer, row.engine, row.differ, row.differ_max), wanted, rtol=1e-6)
        reward = data.rows["reward"][number // 4 * 4 : number // 4 * 4 + 4]
        advantage = (data.rows["reward"][number] - reward.mean()) / (reward.std(ddof=1) + 1e-6)
        assert np.allclose(row.advantage, advantage, rtol=1e-5) and np.allclose(
            tokens["advantage"][mask], advantage, rtol=1e-5
        )
    for name in ("dp2 cp2", "tp2 pp2"):
        for one, other in zip(rows, found[name][0], strict=True):
            assert (one.group, one.index, one.tokens) == (other.group, other.index, other.tokens)
            assert np.allclose((one.trainer, one.advantage), (other.trainer, other.advantage), rtol=1e-4, atol=1e-5), (
                name
            )
        for one, other in zip(columns, found[name][1], strict=True):
            assert all(np.allclose(one[key], other[key], rtol=1e-4, atol=1e-4, equal_nan=True) for key in one), name


def test_labels_have_no_engine_and_no_advantage(tmp_path: Path, model: Path) -> None:
    rows, columns = recorded(tmp_path, options(model, loss_type="sft_loss", save_token_data=1), 1)
    assert all(row.engine is row.differ is row.advantage is None for row in rows) and rows[0].trainer < 0
    assert np.isnan(columns[0]["advantage"]).all()
