"""Responses of several samples: how they are divided into optimizer steps.  Pure.

Invariants: every optimizer step gets the same number of responses, and all samples of each of its own; where their
samples do not divide over the ranks, a step is filled up with samples that train nothing, count in no group and in no
mean.
"""

from __future__ import annotations

import numpy as np

from hpcrl.sample import OPTIONAL, PENDING, STATUSES, SampleBatch, responses_of


def in_steps(batch: SampleBatch, steps: int, multiple: int) -> tuple[SampleBatch, list[int]]:
    """(the batch, filled up, samples of each optimizer step).

    Step i takes the i-th part of the responses, in order; multiple: what divides the samples of a step.  Where every
    response is one sample the batch is as it was, whether its steps divide or not: the schedule says so.
    """
    numbers = responses_of(batch.rows)
    responses = int(numbers[-1]) + 1 if len(numbers) else 0
    if responses == len(batch) or responses % steps:
        each, rest = divmod(len(batch), steps)
        return batch, [each] * (steps - 1) + [each + rest]
    ends = np.searchsorted(numbers, np.arange(1, steps + 1) * (responses // steps))
    order = []
    sizes = []
    first = 0
    for end in ends.tolist():
        lacking = -(end - first) % multiple
        order += [*range(first, end), *[len(batch) + end - 1] * lacking]  # beyond the batch: the filling of that row
        sizes.append(end - first + lacking)
        first = end
    if len(order) == len(batch):
        return batch, sizes
    filling = _filling(batch)
    return _joined(batch, filling).take(order), sizes


def _filling(batch: SampleBatch) -> SampleBatch:
    """For every sample one of a token of prompt and one of response, of the same response, which is not trained on."""
    rows = batch.rows.copy()
    rows["length"], rows["response_length"], rows["status"] = 2, 1, STATUSES.index(PENDING)
    starts = batch.token_offsets[:-1]
    responses = batch.response_offsets
    count = len(rows)
    tokens = batch.tokens[(starts[:, None] + np.arange(2)).ravel()]
    versions = batch.versions[np.maximum(responses[1:] - 1, 0)]
    extra = {}
    for name, column in batch.extra.items():
        most = 2 if OPTIONAL[name].of == "length" else 1
        at = (batch.offsets_of(name)[:-1, None] + np.arange(most)).ravel()
        extra[name] = column[np.minimum(at, len(column) - 1)]
    return SampleBatch(rows, tokens, np.zeros(count, np.uint8), np.zeros(count, np.float32), versions, extra)


def _joined(first: SampleBatch, second: SampleBatch) -> SampleBatch:
    columns = (
        np.concatenate([getattr(first, n), getattr(second, n)])
        for n in ("rows", "tokens", "loss_mask", "logprobs", "versions")
    )
    return SampleBatch(
        *columns, {name: np.concatenate([first.extra[name], second.extra[name]]) for name in first.extra}
    )
