"""What is held of a group: its finished responses, and what there is of the others.  Pure.

Invariant: `fit` leaves nothing that a trainer at `version` may not consume: no token of a later policy (the run has
gone back to an older checkpoint), none older than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COLUMNS


@dataclass
class GroupProgress:
    """How far the responses of a group are.

    Attributes:
        finished: index of a response -> its graded samples.
        partial: index -> samples of one to be resumed: unfinished (ABORTED), or finished and not graded.
        baseline: the reward of the greedy response, NaN if there is none yet, infinite if its grading failed.
    """

    group: Group
    finished: dict[int, list[Sample]] = field(default_factory=dict)
    partial: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    baseline: float = math.nan

    @property
    def number(self) -> int:
        return self.group.number

    @property
    def empty(self) -> bool:
        return not self.finished and not self.partial

    def complete(self, each: int, greedy: bool) -> bool:
        """Whether all `each` responses are finished, and the greedy one too where it is wanted."""
        return len(self.finished) == each and not (greedy and math.isnan(self.baseline))

    def samples(self) -> list[Sample]:
        """Those of the finished responses, in order of index."""
        return [sample for index in sorted(self.finished) for sample in self.finished[index]]

    def graded(self) -> list[Sample]:
        """Those of them that count in the group: without the ones whose grading, or generation, failed."""
        return [sample for sample in self.samples() if not sample.grading]

    def counts(self, each: int) -> bool:
        """Whether enough of `each` finished responses count for the group to teach something."""
        counted = {sample.response_index for sample in self.graded()}
        return len(counted) >= min(2, each) and not math.isinf(self.baseline)

    def all_samples(self) -> list[Sample]:
        """The same with those that are begun."""
        every = self.finished | {index: list(samples) for index, samples in self.partial.items()}
        return [sample for index in sorted(every) for sample in every[index]]

    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version of its tokens; None without tokens."""
        columns = [sample.array("versions") for sample in self.all_samples()]
        spans = [(int(versions.min()), int(versions.max())) for versions in columns if len(versions)]
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


def fit(progress: GroupProgress, version: int, bound: int | None, parts: bool) -> tuple[GroupProgress, int]:
    """(what a trainer at `version` may consume of it, how many responses have to be made again, from their start or
    from a cut).

    Args:
        bound: versions that a token may lag behind, None: any.
        parts: whether a response that lost its end is resumed. A response with a token that is too old is made again,
            since its later tokens follow from it; of one with tokens of a later policy the part before them stays.
    """
    finished: dict[int, Any] = {}
    partial: dict[int, Any] = {}
    lost = 0
    for kept, responses in ((finished, progress.finished), (partial, progress.partial)):
        for index, samples in responses.items():
            if (parts or kept is finished) and all(_fits(sample, version, bound) for sample in samples):
                kept[index] = samples
                continue
            lost += 1
            if parts and (cut := _cut(samples, version, bound)) is not None:
                partial[index] = (cut,)
    # the greedy response was given by whatever policy the others were
    baseline = progress.baseline if lost == 0 else math.nan
    return replace(progress, finished=finished, partial=partial, baseline=baseline), lost


def _fits(sample: Sample, version: int, bound: int | None) -> bool:
    versions = sample.array("versions")
    if not len(versions):
        return True
    return int(versions.max()) <= version and (bound is None or version - int(versions.min()) <= bound)


def _cut(samples: Sequence[Sample], version: int, bound: int | None) -> Sample | None:
    """The part of a plain response (one sample, all of its tokens the policy's) up to the first token of a later
    policy."""
    if len(samples) != 1 or not samples[0].array("loss_mask").all():
        return None
    (sample,) = samples
    later = sample.array("versions") > version
    count = int(later.argmax()) if later.any() else len(later)
    if count == 0 or count == len(later):
        return None
    sizes = {"length": sample.prompt_length + count, "response_length": count}
    cut = {name: column[: sizes[COLUMNS[name].counted_by]] for name, column in sample.columns().items()}
    part = sample.replace(
        **cut,
        response_length=count,
        status=ABORTED,
        response="",
        reward=None,
        rewards={},
        grading="",
        grading_error="",
        transcript={},
    )
    return part if _fits(part, version, bound) else None


def mask_older(samples: list[Sample], version: int) -> list[Sample]:
    """The same samples, with loss mask 0 for every token of an older policy than `version`."""
    return [
        sample.replace(loss_mask=(sample.array("loss_mask") * (sample.array("versions") >= version)).astype(np.uint8))
        if (sample.array("versions") < version).any()
        else sample
        for sample in samples
    ]
