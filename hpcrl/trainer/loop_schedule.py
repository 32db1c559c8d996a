"""The schedule of the training loop: when rollouts are requested and weights published, and how stale samples may be.
Pure.

    sync          request r, train r, publish                       r is sampled under the weights that it trains
    async         request r + 1, train r, wait for r + 1, publish   all of r + 1 has one version, that from before r
    fully-async   request r + 1, train r, publish                   weights change while responses are in flight

In the last two an evaluation runs while training continues, and newer weights may enter it.

Invariants: every rank comes to the same answers, as they depend on options and numbers that all ranks have; weights are
evaluated and, in deterministic mode, saved only once the engines have them; in deterministic mode the trainer waits for
an evaluation; no batch is trained on whose tokens lag behind the policy by more than the bound, or that is meant for
another policy, whatever the rollout process made of it.
"""

from __future__ import annotations

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.transport.share_format import Share


def steps_of(options: Options, rollout_id: int) -> int:
    """How many optimizer steps of the policy, and so policy versions, a rollout makes."""
    critic_only = needs(options).critic and rollout_id < options.num_critic_only_steps
    return 0 if critic_only else options.steps_per_rollout


def publishes(options: Options, rollout_id: int, evaluates: bool) -> bool:
    """Whether the engines get the weights after `rollout_id`.

    Args:
        evaluates: whether these are evaluated then.
    """
    if not options.runs_ahead:
        return True
    return evaluates or (rollout_id + 1) % options.update_weights_interval == 0


def settles(options: Options, publishing: bool) -> bool:
    """Whether the rollout that is sampled ahead is waited for before the step ends: new weights must not enter it, or a
    checkpoint of a run that repeats bit for bit needs it whole."""
    return options.runs_ahead and options.loop == "async" and (publishing or options.deterministic_mode)


def evaluates_beside(options: Options) -> bool:
    """Whether training continues while held-out prompts are answered."""
    return options.runs_ahead and not options.deterministic_mode


def last_evaluation(options: Options, rollout_id: int, total: int) -> int:
    """The last rollout up to `rollout_id` after which an evaluation is due; -1: the one before the first, or none."""
    if rollout_id + 1 == total:
        return rollout_id
    interval = options.eval_interval
    return (rollout_id + 1) // interval * interval - 1 if interval else -1


def check_staleness(share: Share, version: int, bound: int | None = 0) -> None:
    """Raise HpcrlError if the share, or a token of it, is older than `bound` policy versions (None: any age) or newer
    than the trainer.

    Args:
        version: the trainer's policy as the share is consumed. The error names the sample, its versions and the bound.
    """
    oldest = 0 if bound is None else version - bound
    allowed = "by any number" if bound is None else f"by {bound} at most"
    if not oldest <= share.version <= version:
        raise HpcrlError(
            f"rollout {share.rollout_id} was made for policy version {share.version}, the trainer is at {version} "
            f"and may lag {allowed}"
        )
    versions = share.batch.versions
    bad = (versions < oldest) | (versions > version)
    if bad.any():
        number = int(np.searchsorted(share.batch.response_offsets, int(bad.argmax()), side="right")) - 1
        row, start, end = share.batch.rows[number], *share.batch.response_offsets[number : number + 2]
        own = versions[start:end]
        raise HpcrlError(
            f"rollout {share.rollout_id}: sample {row['response_index']} of group {row['group_index']} was sampled "
            f"under policy versions {own.min()} to {own.max()}, the trainer is at {version} and may lag {allowed}"
        )
