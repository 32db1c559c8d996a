"""Packing: what each row holds, that padding is never more than the layout needs, and that CP ranks share the rows
out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import DataError
from hpcrl.sample import Sample
from hpcrl.trainer.step.packing import Packed, check_batch, pack
from hpcrl.transport.share_format import SampleBatch

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=7)  # (prompt, response)


def layout(tp: int = 1, cp: int = 1, cp_rank: int = 0, tp_rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(tp_size=tp, tp_rank=tp_rank, cp_size=cp, cp_rank=cp_rank, device=torch.device("cpu"))


def batch(sizes: list[tuple[int, int]], seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            group_index=number,
            response_index=0,
            tokens=rng.integers(1, 100, prompt + response).astype(np.int32),
            response_length=response,
            loss_mask=(rng.random(response) < 0.7).astype(np.uint8),
            rollout_log_probs=-rng.random(response).astype(np.float32),
            versions=np.zeros(response, np.int32),
            reward=float(rng.normal()),
        )
        for number, (prompt, response) in enumerate(sizes)
    ]
    return SampleBatch.from_samples(samples)


def expected(data: SampleBatch, rows: list[int]) -> list[tuple]:
    """(sample, position of the row, label, its place, log-prob, mask sum, reward) of every unmasked response token, by
    a loop."""
    found = []
    for i in rows:
        length = int(data.rows["length"][i])
        response = int(data.rows["response_length"][i])
        tokens = data.tokens[data.token_offsets[i] :][:length]
        mask = data.loss_mask[data.response_offsets[i] :][:response]
        logprobs = data.rollout_log_probs[data.response_offsets[i] :][:response]
        count = int(mask.sum())
        reward = float(np.float32(data.rows["reward"][i]))
        for k in range(response):
            if mask[k]:
                at = length - response + k
                place = int(data.response_offsets[i]) + k
                found.append((i, at - 1, int(tokens[at]), place, float(logprobs[k]), count, reward))
    return found


def read(packed: Packed, rows: list[int], owner: np.ndarray) -> list[tuple]:
    """The same, from a packed micro-batch; owner: which sample each of its rows belongs to."""
    assert packed.group.tolist() == rows  # a group of its own for each sample
    columns = (packed.labels, packed.source, packed.rollout, packed.counts[packed.sample], packed.reward[packed.sample])
    positions = packed.positions[0][packed.rows].tolist()
    names = [rows[owner[r]] for r in packed.rows.tolist()]
    return list(zip(names, positions, *(c.tolist() for c in columns), strict=True))


def owners(packed: Packed) -> np.ndarray:
    return np.repeat(np.arange(packed.samples), np.diff(packed.bounds.numpy()))


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(0, 2**32))
def test_tokens_appear_once(sizes: list, tp: int, seed: int) -> None:
    """Every unmasked response token appears once, with its columns."""
    data = batch(sizes, seed)
    rows = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    packed = pack(data, rows, layout(tp), sequence_parallel=tp > 1)
    assert read(packed, rows, owners(packed)) == expected(data, rows)
    for number, i in enumerate(rows):
        start = int(packed.bounds[number])
        length = int(data.rows["length"][i])
        assert (
            packed.tokens[0, start : start + length].tolist() == data.tokens[data.token_offsets[i] :][:length].tolist()
        )
        assert packed.positions[0, start : start + length].tolist() == list(range(length))
    assert packed.ends == tuple(packed.bounds.tolist()) and packed.samples == len(rows)
    assert packed.longest == np.diff(packed.bounds.numpy()).max()


@given(SIZES, st.sampled_from([2, 3]), st.integers(0, 2**32))
def test_context_parallel_ranks_share_the_rows_out(sizes: list, cp: int, seed: int) -> None:
    data, rows = batch(sizes, seed), list(range(len(sizes)))
    found, tokens = [], []
    for cp_rank in range(cp):
        packed = pack(data, rows, layout(cp=cp, cp_rank=cp_rank), sequence_parallel=False)
        assert (np.diff(packed.bounds.numpy()) % (2 * cp) == 0).all()
        assert packed.tokens.shape == packed.positions.shape == (1, int(packed.bounds[-1]) // cp)
        found += read(packed, rows, np.repeat(rows, np.diff(packed.bounds.numpy()) // cp))
        tokens += packed.tokens[packed.tokens > 0].tolist()
    assert sorted(found) == sorted(expected(data, rows))
    assert sorted(tokens) == sorted(data.tokens.tolist())


@given(SIZES, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]), st.integers(0, 2**32))
def test_experts_of_the_routers_rows(sizes: list, cut: tuple[int, int], seed: int) -> None:
    """Row by row those of its token; the same ones, all alike, where there is no token."""
    (tp, cp), data = cut, batch(sizes, seed)
    experts = np.stack([data.tokens, data.tokens + 100], 1).astype(np.uint8)[:, None].repeat(2, 1)
    experts[:, 1] += 1  # of the second layer
    for cp_rank in range(cp):
        of_rank = [layout(tp, cp, cp_rank, tp_rank) for tp_rank in range(tp)]
        packed = [pack(data, range(len(sizes)), ranks, tp > 1, experts) for ranks in of_rank]
        for number in range(2):
            found = np.concatenate([np.asarray(p.choices.table([number])[0]) for p in packed])
            real = packed[0].tokens[0].numpy()
            wanted = np.where(real[:, None] > 0, np.stack([real, real + 100], 1) + number, 0)
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("tp", "cp", "multiple", "whole"), [(1, 1, 1, 1), (4, 1, 1, 4), (1, 2, 4, 4), (2, 2, 4, 8)])
def test_padding_is_what_the_layout_needs(tp: int, cp: int, multiple: int, whole: int) -> None:
    data = batch([(3, 4), (1, 12), (9, 50), (6, 0)])
    packed = pack(data, range(4), layout(tp, cp), sequence_parallel=tp > 1)
    each = -(-data.rows["length"] // multiple) * multiple
    assert np.diff(packed.bounds.numpy())[:-1].tolist() == each[:-1].tolist()
    assert int(packed.bounds[-1]) == -(-int(each.sum()) // whole) * whole


def test_a_masked_sample_has_no_rows() -> None:
    data = batch([(3, 4), (2, 5)])
    data.loss_mask[:4] = 0
    data.rows["trained"][0] = 0
    packed = pack(data, [0], layout(), sequence_parallel=False)
    assert packed.samples == 1
    assert [len(c) for c in (packed.rows, packed.labels, packed.sample, packed.source, packed.rollout)] == [0] * 5
    assert packed.counts.tolist() == [0]
    assert len(pack(data, [0, 1], layout(), sequence_parallel=False).rows) == int(data.loss_mask.sum())


def test_what_cannot_be_trained_on_is_refused() -> None:
    check_batch(batch([(1, 3), (2, 2)]), 100)
    with pytest.raises(DataError, match="sample 0 of group 1 has no prompt"):
        check_batch(batch([(1, 3), (0, 2)]), 100)
    data = batch([(1, 3)])
    data.tokens[2] = 100
    with pytest.raises(DataError, match="token id 100.*outside the model's vocabulary.*100"):
        check_batch(data, 100)


def test_several_samples_weigh_as_one() -> None:
    """Each response's tokens share one weight, whatever its samples and whatever fills the step up; of the loss's own
    numbers."""
    from hpcrl.algorithms.loss import token_weights
    from hpcrl.config.options import Options
    from hpcrl.rollout.batch_assembly import shares_of
    from hpcrl.trainer.step.train_batch import StepTotals, counting, samples_a_response

    whole = batch([(3, 4), (2, 5), (4, 3), (2, 6)])
    data = whole.select([0, 0, 0, 1, 2, 3, 3])
    data.rows["response_index"], data.rows["group_index"] = [0, 0, 0, 1, 2, 3, 3], 0
    sums = np.add.reduceat(data.loss_mask.astype(np.int64), data.response_offsets[:-1])
    data.rows["trained"] = [sums[data.rows["response_index"] == index].sum() for index in data.rows["response_index"]]
    options = Options(actor_num_gpus_per_node=2, rollout_batch_size=1, n_samples_per_prompt=4, num_steps_per_rollout=2)
    shares = shares_of(data, options, 0, 0, {})
    assert shares[0].step_samples == [4, 4] and samples_a_response(shares[0]) == [2, 2]
    for step in range(2):
        found = np.zeros(4)
        for share in shares:
            for rows in share.micro_batches[step]:
                packed = pack(share.batch, rows, layout(), sequence_parallel=False)
                totals = StepTotals("", 4, share.step_tokens[step], True, spread=samples_a_response(share)[step])
                weights = counting(token_weights(packed.counts, options), options, totals)[packed.sample]
                index = share.batch.rows["response_index"][rows][packed.sample.numpy()]
                np.add.at(found, index, weights.numpy() / 4)  # the loss is divided by the samples of the step
        assert found[2 * step : 2 * step + 2] == pytest.approx([0.5, 0.5]), (
            "half of the step each: it has two responses"
        )
