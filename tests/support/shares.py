"""Samples and shares of them, for tests of every room, and whether two shares are the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch, Share
from hpcrl.utils.sample_parts import COMPLETED, OPTIONAL, STATUSES


def sample(number: int, prompt: int = 3, answer: int = 5, optional: bool = False) -> Sample:
    """A sample whose every number depends on `number`; optional: with every column that only some runs have."""
    rng = np.random.default_rng(number)
    sizes = {"length": prompt + answer, "response_length": answer}
    extra = {
        name: rng.integers(0, 100, (sizes[kind.counted_by], *range(2, 2 + kind.dims))).astype(kind.dtype)
        for name, kind in OPTIONAL.items()
        if optional
    }
    return Sample(
        group_index=number // 4,
        response_index=number % 4,
        tokens=rng.integers(0, 1000, prompt + answer, dtype=np.int32),
        response_length=answer,
        loss_mask=rng.integers(0, 2, answer, dtype=np.uint8),
        rollout_log_probs=-rng.random(answer, dtype=np.float32),
        versions=np.sort(rng.integers(0, 3, answer, dtype=np.int32)),
        reward=float(number),
        baseline=-0.5 * number if number % 3 else math.nan,
        status=STATUSES[number % 4] if number else COMPLETED,
        **extra,
    )


def share_of(samples: list[Sample], rollout_id: int = 0, version: int = 0) -> Share:
    """All samples in one optimizer step, two to a micro-batch."""
    rows = list(range(len(samples)))
    micro_batches = [[rows[at : at + 2] for at in range(0, len(rows), 2)]] if rows else []
    steps = len(micro_batches)
    return Share(
        rollout_id,
        version,
        SampleBatch.from_samples(samples),
        micro_batches,
        [len(rows)] * steps,
        [7] * steps,
        {"reward": 0.5},
    )


def share(rollout_id: int = 0, seed: int = 0, answers: tuple[int, ...] = (5, 1, 8)) -> Share:
    """A small share that another rollout id or seed makes a different one."""
    return share_of(
        [sample(100 * rollout_id + 10 * seed + i, answer=n) for i, n in enumerate(answers)],
        rollout_id,
        version=rollout_id,
    )


def part_of(samples: list[Sample], own: list[int]) -> Share:
    """The share of one of several ranks, with the samples at `own` of a whole rollout."""
    whole = share_of(samples)
    its = share_of([samples[i] for i in own])
    its.table = whole.table
    its.own = np.asarray(own, np.int32)
    its.step_samples = [len(samples)]
    return its


def same(a: Share, b: Share) -> bool:
    """Whether two shares agree in every bit."""
    names = ("tokens", "loss_mask", "rollout_log_probs", "versions")
    if any(
        x.tobytes() != y.tobytes() for x, y in ((a.table, b.table), (a.own, b.own), (a.batch.rows, b.batch.rows))
    ):  # NaN = NaN
        return False
    if a.batch.extra.keys() != b.batch.extra.keys():
        return False
    columns = [(getattr(a.batch, name), getattr(b.batch, name)) for name in names]
    columns += [(column, b.batch.extra[name]) for name, column in a.batch.extra.items()]
    plain = ("rollout_id", "version", "micro_batches", "step_samples", "step_tokens", "metrics")
    return all(getattr(a, name) == getattr(b, name) for name in plain) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in columns
    )


def plain_sample(before: int = 2, answer: int = 3, /, **fields: Any) -> Sample:
    """A completed sample of `before` + `answer` tokens, all of them trained on.  fields: of Sample, instead of these."""
    own = {"group_index": 0, "response_index": 0, "response_length": answer, "status": COMPLETED}
    own |= {"tokens": np.arange(before + answer, dtype=np.int32), "loss_mask": np.ones(answer, np.uint8)}
    own |= {"rollout_log_probs": np.full(answer, -0.25, np.float32), "versions": np.zeros(answer, np.int32)}
    return Sample(**(own | fields))
