"""Decisions about a rollout: what is still wanted, when it is complete, who trains on what.  Pure; no clock, no
network.

Invariants: what leaves here is in the order of group and index, whatever order the samples came in, so the same samples
make the same batch; no batch leaves whose staleness exceeds its bound; every sample of a batch is in exactly one share.
Every optimizer step gets the same number of responses, and all samples of each of its own; where their samples do not
divide over the ranks, a step is filled up with samples that train nothing, count in no group and in no mean.  A sample
whose grading failed trains nothing and counts in no group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.microbatches import Schedule, make_schedule
from hpcrl.rollout.grading.service import grading_metrics
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED
from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch, Share, responses_of, whole_responses
from hpcrl.utils.sample_parts import OPTIONAL, PENDING, REQUIRED, STATUSES, TRUNCATED

AGES = 8  #: policy versions that have metrics of their own


@dataclass
class Rollout:
    """The samples of one rollout as they come in.

    Attributes:
        version: the policy that they are sampled under.
    """

    rollout_id: int
    version: int
    groups: Sequence[Group]
    n_samples_per_prompt: int  #: samples of a group
    _found: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    _requested: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        self._requested = frozenset(
            (group.number, index) for group in self.groups for index in range(self.n_samples_per_prompt)
        )

    def add(self, samples: Sequence[Sample]) -> None:
        """Take in the finished samples of one response, one at least.

        Raises:
            ValueError: if it is not expected (any more): no response counts twice.
        """
        key = group, index = samples[0].group_index, samples[0].response_index
        if key not in self._requested or key in self._found:
            raise ValueError(f"sample {index} of group {group} is not expected")
        self._found[key] = list(samples)

    @property
    def missing(self) -> int:
        return len(self._requested) - len(self._found)

    def samples(self) -> list[Sample]:
        """All samples, by group and index.  ValueError while some are missing."""
        if self.missing:
            raise ValueError(f"{self.missing} samples of rollout {self.rollout_id} are missing")
        return [sample for key in sorted(self._found) for sample in self._found[key]]

    def rewards(self) -> list[float]:
        """The reward of every response, by group and index: the mean of its samples'."""
        found = [self._found[key] for key in sorted(self._found)]  # NaN where a grading failed
        return [float(np.mean([math.nan if one.grading else one.score for one in several])) for several in found]


def check_staleness(samples: Sequence[Sample], version: int, bound: int | None = 0) -> None:
    """Raise HpcrlError if a token is older than `bound` policy versions (None: any age), or newer than the trainer,
    at consumption.
    """
    allowed = "by any number" if bound is None else f"by {bound} at most"
    for sample in samples:
        oldest = int(sample.array("versions").min())
        newest = int(sample.array("versions").max())
        if (bound is not None and version - oldest > bound) or newest > version:
            raise HpcrlError(
                f"sample {sample.response_index} of group {sample.group_index} was sampled under policy versions "
                f"{oldest} to {newest}, the trainer is at {version} and may lag {allowed}"
            )


def make_shares(
    rollout: Rollout, options: Options, metrics: dict[str, float], batch: SampleBatch | None = None
) -> list[Share]:
    """One Share a data-parallel rank: its samples, packed for every optimizer step, and the table of all.

    Args:
        batch: the samples as the trainer is to see them; None: as they are.
    """
    samples = rollout.samples()
    batch = _graded(
        SampleBatch.from_samples(samples) if batch is None else batch, samples, rollout.n_samples_per_prompt
    )
    return shares_of(batch, options, rollout.rollout_id, rollout.version, metrics)


def _graded(batch: SampleBatch, samples: Sequence[Sample], each: int) -> SampleBatch:
    """The batch, in which no sample whose grading failed is trained on or counts in its group.

    Neither does the rest of a group where fewer than two responses (of `each`) are left: a function of the user's may
    have chosen such a group.
    """
    if not any(sample.grading for sample in samples):
        return batch
    kept = {(sample.group_index, sample.response_index) for sample in samples if not sample.grading}
    left = Counter(group for group, _ in kept)
    out = np.asarray([bool(sample.grading) or left[sample.group_index] < min(2, each) for sample in samples])
    rows = batch.rows.copy()
    owner = np.repeat(np.arange(len(rows)), rows["response_length"])
    mask = np.where(out[owner], 0, batch.loss_mask).astype(np.uint8)
    rows["status"][out] = STATUSES.index(PENDING)
    rows["trained"] = np.bincount(owner, mask, len(rows))
    return replace(batch, rows=whole_responses(rows), loss_mask=mask)


def shares_of(
    batch: SampleBatch, options: Options, rollout_id: int, version: int, metrics: dict[str, float]
) -> list[Share]:
    """The same for samples in the order of group and index."""
    multiple = options.data_parallel_size * options.micro_batch_multiple
    batch, sizes = in_steps(batch, options.steps_per_rollout, multiple)
    masked = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.diff(masked[batch.response_offsets[ends]]).tolist()  # trained tokens of each optimizer step
    shares = []
    for parts in _schedule(batch.rows["length"], sizes, options).steps:
        rows = [index for step in parts for micro in step for index in micro]
        local = iter(range(len(rows)))
        micros = [[[next(local) for _ in micro] for micro in step] for step in parts]
        of_all = {"step_samples": sizes, "step_tokens": tokens, "metrics": metrics, "table": batch.rows}
        shares.append(Share(rollout_id, version, batch.select(rows), micros, **of_all, own=np.asarray(rows, np.int32)))
    return shares


def _schedule(lengths: np.ndarray, sizes: list[int], options: Options) -> Schedule:
    """Which sample goes where; where a loss compares the two samples of a group, these stay together."""
    each = 2 if needs(options).pairs else 1
    schedule = make_schedule(
        lengths.reshape(-1, each).sum(1).tolist(),
        dp=options.data_parallel_size,
        cp=options.context_parallel_size,
        num_steps=len(sizes),
        step_samples=[size // each for size in sizes],
        max_tokens_per_gpu=options.max_tokens_per_gpu if options.use_dynamic_batch_size else None,
        micro_batch_size=max(1, options.micro_batch_size // each),
        multiple=options.micro_batch_multiple,
        balance=options.balance_data,
    )

    def whole(micro: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(each * i + k for i in micro for k in range(each))

    return Schedule(tuple(tuple(tuple(map(whole, step)) for step in rank) for rank in schedule.steps))


def batch_metrics(
    rollout: Rollout,
    version: int,
    seconds: float,
    sampled: bool = True,
    gpus: int = 0,
    dropped: Sequence[Sample] = (),
    unknown: int | None = None,
) -> dict[str, float]:
    """What to log about a rollout that took `seconds` and is consumed by a trainer at `version`; lengths in tokens.

    Args:
        sampled: False: the responses are labels to learn; only their lengths are worth logging.
        gpus: of the run's own engines; 0: none are known.
        dropped: samples that were finished, too; only their failed gradings are counted.
        unknown: the tokenizer's token for what it does not know.
    """
    samples = rollout.samples()
    lengths = np.asarray([s.response_length for s in samples])
    found = {
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "perf/rollout_time": seconds,
    }
    if not sampled:
        return found
    rewards = np.ma.masked_invalid(rollout.rewards()).reshape(-1, rollout.n_samples_per_prompt)
    stale = version - np.concatenate([s.array("versions") for s in samples])
    found |= {f"rollout/{name}": value for name, value in grading_metrics(samples, dropped).items()}
    if lost := sum(sample.metadata.get(UNSAMPLED, 0) for sample in samples):
        found[f"rollout/{UNSAMPLED}"] = float(lost)
    if unknown is not None:
        prompts = np.concatenate([s.array("tokens")[: -s.response_length or None] for s in samples])
        found["rollout/unknown_ratio"] = float(np.mean(prompts == unknown)) if len(prompts) else 0.0
    if samples[0].has("teacher_log_probs"):
        found["rollout/opd_teacher_errors"] = float(sum(bool(s.teacher_error) for s in samples))
    rate = float(lengths.sum()) / max(seconds, 1e-9)
    found |= {"perf/tokens_per_sec_per_gpu": rate / gpus} if gpus else {}
    return found | {
        "rollout/reward": float(np.ma.filled(rewards.mean(), 0.0)),
        "rollout/truncated_ratio": float(np.mean([s.status == TRUNCATED for s in samples])),
        "rollout/zero_std": float(np.mean(np.ma.filled(rewards.std(axis=1) <= 1e-6, True))),
        "staleness/mean": float(stale.mean()),
        "staleness/max": float(stale.max()),
        "perf/tokens_per_sec": rate,
    }


def ages(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How many of the tokens, and which share, were sampled how many policy versions before `version`, the trainer's;
    the last counts all that are older."""
    stale = np.minimum(version - np.concatenate([s.array("versions") for s in samples]), AGES)
    counts = [
        (f"{age}{'+' * (age == AGES)}", float(count)) for age, count in enumerate(np.bincount(stale, minlength=1))
    ]
    shares = {f"staleness/share/{age}": count / max(len(stale), 1) for age, count in counts}
    return shares | {f"staleness/tokens/{age}": count for age, count in counts}


# ---- responses of several samples


def in_steps(batch: SampleBatch, steps: int, multiple: int) -> tuple[SampleBatch, list[int]]:
    """(the batch, filled up, samples of each optimizer step).

    Step i takes the i-th part of the responses, in order.

    Args:
        multiple: what divides the samples of a step. Where every response is one sample the batch is as it was, whether
            its steps divide or not: the schedule says so.
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
    extra = {name: np.concatenate([batch.extra[name], filling.extra[name]]) for name in batch.extra}
    columns = {name: np.concatenate([getattr(batch, name), getattr(filling, name)]) for name in ("rows", *REQUIRED)}
    return SampleBatch(**columns, extra=extra).select(order), sizes


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
        most = 2 if OPTIONAL[name].counted_by == "length" else 1
        at = (batch.offsets_of(name)[:-1, None] + np.arange(most)).ravel()
        extra[name] = column[np.minimum(at, len(column) - 1)]
    return SampleBatch(rows, tokens, np.zeros(count, np.uint8), np.zeros(count, np.float32), versions, extra)
