"""Rollouts in files: they come back bit for bit, and a damaged file is one named error."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.rollout.batch_assembly import Rollout, make_shares
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest
from hpcrl.rollout.saved_rollouts import SavedRollouts, read_rollout, write_rollout
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED

GROUPS, EACH = 3, 2


def samples(rollout_id: int = 0, version: int = 0, **more: Any) -> list[Sample]:
    rng = np.random.default_rng(rollout_id)
    found = []
    for group in range(rollout_id * GROUPS, rollout_id * GROUPS + GROUPS):
        for index in range(EACH):
            size = int(rng.integers(0, 6)) if group else 4
            found.append(
                Sample(
                    group_index=group,
                    response_index=index,
                    tokens=rng.integers(0, 1000, 3 + size).astype(np.int32),
                    response_length=size,
                    loss_mask=(rng.random(size) < 0.8).astype(np.uint8),
                    rollout_log_probs=rng.normal(-2, 1, size).astype(np.float32),
                    versions=np.full(size, version, np.int32),
                    reward=float(rng.normal()),
                    status=TRUNCATED if index else COMPLETED,
                    prompt=[{"role": "user", "content": "1+1=\u202e"}],
                    response="2" * size,
                    label={"a": [1, None, 2.5]},
                    metadata={"key": "value"},
                    rewards={"math": 0.1},
                    grading="error" if index else "",
                    grading_error="why" if index else "",
                    **more,
                )
            )
    return found


def same(one: Sample, other: Sample) -> None:
    assert vars(one).keys() == vars(other).keys()
    for name, value in vars(one).items():
        there = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == there.dtype and value.tobytes() == there.tobytes(), name
        else:
            assert value == there or (isinstance(value, float) and math.isnan(value) and math.isnan(there)), name


def options(directory: Path, **more: Any) -> Options:
    values = {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": EACH,
        "num_rollout": 2,
        "actor_num_gpus_per_node": 2,
    }
    return Options(**values, load_debug_rollout_data=str(directory / "r-{rollout_id}"), **more)


def write(directory: Path, count: int = 2, **more: Any) -> None:
    for number in range(count):
        write_rollout(directory / f"r-{number}", number, 5 + number, samples(number, 5 + number, **more))


def replay(saved: SavedRollouts, opts: Options, rollout_id: int, version: int) -> Rollout:
    rollout = Rollout(rollout_id, version, saved.next_groups(GROUPS), EACH)

    async def fill() -> None:
        for group in rollout.groups:
            for index in range(EACH):
                rollout.add(await saved.make(ResponseRequest(group, index, rollout_id, version)))

    asyncio.run(fill())
    return rollout


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_rollout(path, 7, 3, samples(7, 3))
    found = read_rollout(path)
    assert found[0] == 3
    for one, other in zip(samples(7, 3), found[1], strict=True):
        same(one, other)


def test_a_run_gets_the_same_shares(tmp_path: Path) -> None:
    """Under whatever policy version it stands: how old a token is counts."""
    write(tmp_path)
    opts = options(tmp_path)
    saved = SavedRollouts(opts)
    for number in range(2):
        rollout = replay(saved, opts, number, number)
        original = Rollout(number, number, rollout.groups, EACH)
        for sample in samples(number, number):
            original.add([sample])
        for mine, other in zip(make_shares(rollout, opts, {}), make_shares(original, opts, {}), strict=True):
            assert mine.micro_batches == other.micro_batches and mine.step_tokens == other.step_tokens
            assert mine.table.tobytes() == other.table.tobytes()
            for name in ("tokens", "loss_mask", "rollout_log_probs", "versions"):
                assert getattr(mine.batch, name).tobytes() == getattr(other.batch, name).tobytes(), name
    state = saved.state() | {"rollout_id": 1}
    with pytest.raises(DataError, match="--load-debug-rollout-data .*/r-2: No such file"):
        saved.next_groups(GROUPS)
    again = SavedRollouts(opts)
    again.restore({"epoch": 0, "offset": 6, "rollout_id": 0})  # of a run that sampled
    assert [group.number for group in again.next_groups(GROUPS)] == [3, 4, 5] and again.state() | {
        "rollout_id": 1
    } == state


def test_the_greedy_reward_is_kept(tmp_path: Path) -> None:
    write(tmp_path, baseline=0.25)
    saved = SavedRollouts(options(tmp_path))
    group = saved.next_groups(GROUPS)[1]
    (found,) = asyncio.run(saved.make(ResponseRequest(group, GREEDY, 0, 0)))
    assert found.reward == 0.25
    write(tmp_path)
    saved = SavedRollouts(options(tmp_path))
    with pytest.raises(DataError, match="group 1 has no greedy response"):
        asyncio.run(saved.make(ResponseRequest(saved.next_groups(GROUPS)[1], GREEDY, 0, 0)))


@pytest.mark.parametrize("more", [{"rollout_batch_size": 4}, {"n_samples_per_prompt": 3}])
def test_other_sizes_are_refused_at_the_start(tmp_path: Path, more: dict[str, int]) -> None:
    write(tmp_path)
    values = options(tmp_path).model_dump() | more
    with pytest.raises(DataError, match="holds 3 groups of 2, the options ask for . of .; give --rollout-batch-size"):
        SavedRollouts(Options(**values))


@given(st.data())
def test_a_damaged_file_is_an_error_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    write_rollout(path, 1, 1, samples(1, 1))
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "junk"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        damaged = whole[:at]
    elif kind == "flip":
        junk = data.draw(st.binary(min_size=1, max_size=9))
        damaged = whole[:at] + junk + whole[at + len(junk) :]
    elif kind == "insert":
        damaged = whole[:at] + data.draw(st.binary(min_size=1, max_size=9)) + whole[at:]
    else:
        damaged = data.draw(st.binary(max_size=200))
    path.write_bytes(damaged)
    try:
        _, found = read_rollout(path)
    except DataError as error:
        assert "damaged" in str(error)
        return
    assert all(len(s.array("rollout_log_probs")) == s.response_length for s in found)
