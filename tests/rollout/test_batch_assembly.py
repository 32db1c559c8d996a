"""Decisions about a rollout: order, completeness, staleness, shares."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.report.page.panels import own_metrics
from hpcrl.rollout.batch_assembly import Rollout, ages, batch_metrics, check_staleness, make_shares
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile
from hpcrl.rollout.prompts.prompt_source import Group, PromptSource
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED


def make(group: int, index: int, length: int = 3, version: int = 5, **fields: object) -> Sample:
    values = {
        "tokens": np.arange(2 + length, dtype=np.int32) + 1000 * group + 100 * index,
        "response_length": length,
        "loss_mask": np.ones(length, np.uint8),
        "rollout_log_probs": np.full(length, -0.5, np.float32),
        "versions": np.full(length, version, np.int32),
        "status": COMPLETED,
    }
    return Sample(group_index=group, response_index=index, **(values | fields))  # type: ignore[arg-type]


def groups(count: int, first: int = 0) -> list[Group]:
    file = PromptFile(Path("p.jsonl"), tuple(Prompt(i, np.asarray([i], np.int32)) for i in range(first + count)), 0, "")
    return PromptSource(file, 0, False).next_groups(first + count)[first:]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_batch_is_in_group_order(count: int, each: int, chance: random.Random) -> None:
    """The batch is in the order of groups, whichever finished first."""
    rollout = Rollout(3, 5, groups(count, first=4), each)
    keys = [(4 + g, i) for g in range(count) for i in range(each)]
    for done, key in enumerate(chance.sample(keys, len(keys)), 1):
        rollout.add([make(*key)])
        assert rollout.missing == len(keys) - done
    assert [(s.group_index, s.response_index) for s in rollout.samples()] == keys


def test_no_sample_counts_twice_or_unasked() -> None:
    rollout = Rollout(0, 5, groups(2), 2)
    rollout.add([make(0, 0)])
    for stranger in (make(0, 0), make(0, 2), make(2, 0)):
        with pytest.raises(ValueError, match=f"sample {stranger.response_index} of group {stranger.group_index}"):
            rollout.add([stranger])
    assert rollout.missing == 3
    with pytest.raises(ValueError, match="3 samples of rollout 0 are missing"):
        rollout.samples()


def test_staleness_is_checked_on_every_token() -> None:
    fresh = make(0, 0, version=5)
    mixed = make(9, 1, versions=np.asarray([4, 5, 5], np.int32))
    check_staleness([fresh], 5)
    check_staleness([fresh, mixed], 5, bound=1)
    for samples, version in (([fresh, mixed], 5), ([fresh], 6), ([fresh], 4)):
        with pytest.raises(HpcrlError, match="sampled under policy versions"):
            check_staleness(samples, version)


def full(lengths: list[int], each: int) -> Rollout:
    rollout = Rollout(3, 5, groups(len(lengths) // each), each)
    for i, length in enumerate(lengths):
        status = TRUNCATED if length == 9 else COMPLETED
        mask = np.ones(length, np.uint8)
        mask[: length // 2] = 0
        rollout.add([make(i // each, i % each, length, reward=float(i % 3), loss_mask=mask, status=status)])
    return rollout


def test_metrics() -> None:
    rollout = full([1, 9, 3, 4, 5, 6], 3)
    found = batch_metrics(rollout, version=7, seconds=2.0)
    assert own_metrics(list(found)) == []
    assert found == pytest.approx(
        {
            "rollout/reward": 1.0,
            "rollout/response_len/mean": 28 / 6,
            "rollout/response_len/max": 9,
            "rollout/response_len/min": 1,
            "rollout/truncated_ratio": 1 / 6,
            "rollout/zero_std": 0.0,
            "rollout/reward_timeouts": 0.0,
            "rollout/reward_errors": 0.0,
            "staleness/mean": 2.0,
            "staleness/max": 2.0,
            "perf/rollout_time": 2.0,
            "perf/tokens_per_sec": 14.0,
        }
    )
    assert all(type(value) is float for value in found.values())
    assert batch_metrics(rollout, version=7, seconds=2.0, gpus=4)["perf/tokens_per_sec_per_gpu"] == 3.5
    prompts = np.concatenate([s.array("tokens")[: -s.response_length] for s in rollout.samples()])
    unknown = batch_metrics(rollout, version=7, seconds=2.0, unknown=int(prompts[0]))["rollout/unknown_ratio"]
    assert 0 < unknown == np.mean(prompts == prompts[0])
    labels = batch_metrics(rollout, version=7, seconds=2.0, sampled=False)
    assert set(labels) == {f"rollout/response_len/{name}" for name in ("mean", "max", "min")} | {"perf/rollout_time"}
    same = Rollout(0, 5, groups(2), 2)
    for g in range(2):
        for i in range(2):
            same.add([make(g, i, reward=float(g and i))])
    assert batch_metrics(same, 5, 1.0)["rollout/zero_std"] == 0.5


def test_groups_of_nearly_equal_rewards_differ() -> None:
    """zero_std counts groups whose rewards are equal but for rounding, and none that differ a little."""
    for spread, share in ((0.0, 1.0), (1e-8, 1.0), (1e-4, 0.0), (0.02, 0.0), (0.15, 0.0)):
        rollout = Rollout(0, 5, groups(2), 3)
        for g in range(2):
            for i in range(3):
                rollout.add([make(g, i, reward=0.3 + i * spread)])
        assert batch_metrics(rollout, 5, 1.0)["rollout/zero_std"] == share, spread


def test_a_reward_is_the_mean_of_its_samples() -> None:
    """A response of several samples counts once in every mean of rewards."""
    rollout = Rollout(0, 5, groups(1), 2)
    rollout.add([make(0, 0, reward=1.0), make(0, 0, reward=0.0), make(0, 0, reward=0.5)])
    rollout.add([make(0, 1, reward=2.5)])
    assert rollout.rewards() == [0.5, 2.5]
    assert batch_metrics(rollout, 5, 1.0)["rollout/reward"] == 1.5


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(12, 14))
def test_ages_of_tokens(versions: list[int], trainer: int) -> None:
    """Tokens by the versions that they lag behind; eight and more are one class; the shares add up to 1."""
    samples = [make(0, 0, len(versions), versions=np.asarray(versions, np.int32))]
    found = ages(samples, trainer)
    lags = [min(trainer - version, 8) for version in versions]
    for lag in range(max(lags) + 1):
        name = "8+" if lag == 8 else str(lag)
        assert found[f"staleness/tokens/{name}"] == lags.count(lag)
        assert found[f"staleness/share/{name}"] == pytest.approx(lags.count(lag) / len(lags))
    assert len(found) == 2 * (max(lags) + 1)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(0, 4), st.integers(4, 9))
def test_staleness_to_the_version(versions: list[int], bound: int, trainer: int) -> None:
    """A batch passes if no token lags by more than the bound or is newer than the trainer, and else not."""
    samples = [make(0, 0, len(versions), versions=np.asarray(versions, np.int32))]
    good = all(0 <= trainer - version <= bound for version in versions)
    for allowed, passes in ((bound, good), (None, max(versions) <= trainer)):
        try:
            check_staleness(samples, trainer, allowed)
            found = True
        except HpcrlError:
            found = False
        assert found == passes


def test_an_empty_response_counts_no_token() -> None:
    options = Options(rollout_batch_size=1, n_samples_per_prompt=3, actor_num_gpus_per_node=1)
    rollout = full([4, 1, 3], 3)
    empty = rollout.samples()[1]
    empty.response_length, empty.loss_mask = 0, empty.array("loss_mask")[:0]
    empty.rollout_log_probs, empty.versions = empty.array("rollout_log_probs")[:0], empty.array("versions")[:0]
    (share,) = make_shares(rollout, options, {})
    assert share.step_tokens == [sum(int(s.array("loss_mask").sum()) for s in rollout.samples())]


def test_failed_gradings_count_nowhere() -> None:
    """A sample whose grading failed is no member of its group and trains nothing; nor does a group of one that is
    left."""
    rollout = Rollout(3, 5, groups(3), 3)
    for g, i, kept in ((0, 0, 1), (0, 1, 0), (0, 2, 1), (1, 0, 1), (1, 1, 0), (1, 2, 0), (2, 0, 1), (2, 1, 1)):
        rollout.add([make(g, i, 4, reward=i + 1.0 if kept else 0.0, grading="" if kept else "timeout")])
    rollout.add([make(2, 2, 4, reward=5.0), make(2, 2, 2, reward=0.0, grading="error"), make(2, 2, 3, reward=3.0)])
    found = batch_metrics(rollout, 5, 1.0, dropped=[make(9, 0, grading="error"), make(9, 1)])
    assert (found["rollout/reward_timeouts"], found["rollout/reward_errors"]) == (3.0, 2.0)
    assert found["rollout/reward"] == pytest.approx(np.mean([1.0, 3.0, 1.0, 1.0, 2.0]))
    assert found["rollout/zero_std"] == pytest.approx(1 / 3)
    (share,) = make_shares(
        rollout, Options(rollout_batch_size=3, n_samples_per_prompt=3, actor_num_gpus_per_node=1), {}
    )
    table = share.table[share.table["length"] > 2]  # without filling
    assert (table["status"] != 0).tolist() == [True, False, True] + [False] * 3 + [True, True, True, False, True]
    assert table["trained"].tolist() == [4, 0, 4, 0, 0, 0, 4, 4, 7, 7, 7]
    assert share.step_tokens == [23] == [int(share.batch.loss_mask.sum())]
    assert all(sample.array("loss_mask").all() for sample in rollout.samples()), (
        "what is written of them is as it was made"
    )


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("cap", [None, 12])
def test_every_sample_is_in_exactly_one_share(dp: int, steps: int, cap: int | None) -> None:
    lengths = [1, 9, 3, 4, 5, 6, 7, 2]
    options = Options(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        actor_num_gpus_per_node=dp,
        num_steps_per_rollout=steps,
        micro_batch_size=2,
        use_dynamic_batch_size=cap is not None,
        max_tokens_per_gpu=cap,
    )
    rollout = full(lengths, 2)
    shares = make_shares(rollout, options, {"a": 1.0})
    batch = {(s.group_index, s.response_index): s for s in rollout.samples()}
    rewards = [s.reward for s in rollout.samples()]
    size = len(lengths) // steps
    assert len(shares) == dp
    seen: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    for share in shares:
        assert (share.rollout_id, share.version, share.metrics) == (3, 5, {"a": 1.0})
        assert share.step_samples == [size] * steps
        masked = [sum(length - length // 2 for length in lengths[i * size : (i + 1) * size]) for i in range(steps)]
        assert share.step_tokens == masked, "the loss mask of all ranks"
        assert share.table["reward"].tolist() == rewards, "of all ranks"
        assert share.table[share.own].tobytes() == share.batch.rows.tobytes()
        assert sorted(i for step in share.micro_batches for micro in step for i in micro) == list(
            range(len(share.batch))
        )
        tokens = share.batch.token_offsets
        mask = share.batch.response_offsets
        for number, step in enumerate(share.micro_batches):
            for micro in step:
                assert micro
                assert cap is None or len(micro) == 1 or sum(share.batch.rows["length"][micro]) <= cap
                for i in micro:
                    row = share.batch.rows[i]
                    seen[number].append((int(row["group_index"]), int(row["response_index"])))
                    own = batch[seen[number][-1]]
                    assert (share.batch.tokens[tokens[i] : tokens[i + 1]] == own.array("tokens")).all()
                    assert (share.batch.loss_mask[mask[i] : mask[i + 1]] == own.array("loss_mask")).all()
    order = [(s.group_index, s.response_index) for s in rollout.samples()]
    for number in range(steps):
        assert sorted(seen[number]) == order[number * size : (number + 1) * size], "a step consumes consecutive samples"
    assert len({tuple(len(step) for step in share.micro_batches) for share in shares}) == 1, (
        "equally many micro-batches on every rank"
    )


@pytest.mark.parametrize("cap", [None, 12, 30])
def test_the_two_samples_of_a_pair_stay_together(cap: int | None) -> None:
    options = Options(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        actor_num_gpus_per_node=2,
        micro_batch_size=4,
        use_dynamic_batch_size=cap is not None,
        max_tokens_per_gpu=cap,
        loss_type="dpo_loss",
    )
    for share in make_shares(full([1, 9, 3, 4, 5, 6, 7, 2], 2), options, {}):
        for micro in share.micro_batches[0]:
            members = share.batch.rows["group_index"][micro].tolist()
            assert all(members.count(group) == 2 for group in members)


def _shapes(lengths: list[int], **values: object) -> list[list[int]]:
    """Tokens of each micro-batch of each rank's first optimizer step."""
    options = Options(rollout_batch_size=len(lengths), n_samples_per_prompt=1, **values)  # type: ignore[arg-type]
    shares = make_shares(full(lengths, 1), options, {})
    return [[int(share.batch.rows["length"][micro].sum()) for micro in share.micro_batches[0]] for share in shares]


def test_shares_follow_the_layout() -> None:
    """The token limit is one rank's: context-parallel ranks hold a micro-batch together; virtual stages ask for a
    multiple."""
    lengths = [6, 6, 6, 6]
    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": len(full(lengths, 1).samples()[0].array("tokens"))}
    assert [len(rank) for rank in _shapes(lengths, actor_num_gpus_per_node=1, **packed)] == [4]
    assert [len(rank) for rank in _shapes(lengths, actor_num_gpus_per_node=2, context_parallel_size=2, **packed)] == [2]
    stages = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "actor_num_gpus_per_node": 2,
    }
    assert [len(rank) for rank in _shapes(lengths, micro_batch_size=4, **stages)] == [2], "a multiple of the stages"


def test_shares_are_balanced_unless_told_otherwise() -> None:
    lengths = [12, 1] * 4
    each = {"actor_num_gpus_per_node": 2, "micro_batch_size": 8}
    loads = {
        balance: [sum(rank) for rank in _shapes(lengths, balance_data=balance, **each)] for balance in (True, False)
    }
    assert loads[True][0] == loads[True][1] and loads[False][0] > 2 * loads[False][1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=8, max_size=8),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    st.sampled_from([None, 12, 40]),
)
def test_several_samples_count_once(lengths: list[list[int]], layout: tuple[int, int], cap: int | None) -> None:
    """8 responses, 4 of a group, each of one to four samples; every step gets as many responses, and every rank
    samples."""
    dp, steps = layout
    rollout = Rollout(3, 5, groups(2), 4)
    for i, several in enumerate(lengths):
        rollout.add([make(i // 4, i % 4, length, reward=float(i)) for length in several])
    options = Options(
        actor_num_gpus_per_node=dp,
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        num_steps_per_rollout=steps,
        use_dynamic_batch_size=cap is not None,
        max_tokens_per_gpu=cap,
        micro_batch_size=2,
    )
    shares = make_shares(rollout, options, batch_metrics(rollout, 5, 1.0))
    table, real = shares[0].table, shares[0].table["status"] != 0
    assert sum(real) == sum(map(len, lengths)) and sorted(np.concatenate([s.own for s in shares])) == list(
        range(len(table))
    )
    assert shares[0].metrics["rollout/reward"] == 3.5, "the mean over responses"
    first = 0
    for step, size in enumerate(shares[0].step_samples):
        rows = table[first : first + size]
        mine = lengths[step * 8 // steps : (step + 1) * 8 // steps]
        found = rows[real[first : first + size]]
        assert [(r["group_index"] * 4 + r["response_index"]) for r in found] == [
            step * 8 // steps + i for i, several in enumerate(mine) for _ in several
        ]
        assert found["trained"].tolist() == [sum(several) for several in mine for _ in several]
        assert shares[0].step_tokens[step] == sum(map(sum, mine)) and size - len(found) < dp and size % dp == 0
        first += size
    for share in shares:
        assert cap or [sum(map(len, step)) for step in share.micro_batches] == [
            size // dp for size in share.step_samples
        ]
        assert len({len(s.micro_batches[0]) for s in shares}) == 1
        filling = share.batch.rows["status"] == 0
        at = share.batch.response_offsets[:-1][filling]
        assert not share.batch.loss_mask[at].any() and (share.batch.rows["length"][filling] == 2).all()
        assert share.batch.rows["trained"].sum() >= share.batch.loss_mask.sum()
