"""Sums over the trained tokens of each sample, against plain loops; empty responses and whole masks included."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.trainer.step.sums import _over_own
from hpcrl.transport.share_format import ROW, SampleBatch, Share


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_sums_over_each_sample(lengths: list[int], seed: int, masked: bool, advantages: bool) -> None:
    rng, total = np.random.default_rng(seed), sum(lengths)
    rows = np.zeros(len(lengths), ROW)
    rows["response_length"], rows["length"] = lengths, np.array(lengths) + 1
    mask = rng.integers(0, 2, total).astype(np.uint8) if masked else np.ones(total, np.uint8)
    engine, trainer, advantage = (rng.normal(size=total).astype(np.float32) for _ in range(3))
    batch = SampleBatch(rows, np.zeros(total + len(lengths), np.int32), mask, engine, np.zeros(total, np.int32))
    own = rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
    table = np.zeros(len(lengths) + 2, ROW)
    share = Share(0, 0, batch, [], [], [], table=table, own=own)
    found = _over_own(share, trainer, advantage if advantages else None)
    wanted = np.zeros((len(table), 6))
    at = 0
    for row, length in zip(own, lengths, strict=True):
        for token in range(at, at + length):
            if mask[token]:
                differ = abs(float(trainer[token] - engine[token]))
                parts = (1, advantage[token] * advantages, trainer[token], engine[token], differ)
                wanted[row, :5] += [float(part) for part in parts]
                wanted[row, 5] = max(wanted[row, 5], differ)
        at += length
    assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6)
