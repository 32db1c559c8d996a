"""Advantages of a rollout: shaping by length, KL in the reward, the estimator, KL to a teacher, whitening.

Invariant: the result depends on the samples alone, not on which rank has which; sums over ranks go through
`batch.total`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Advantages, RolloutBatch, find
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import find_algorithm_file
from hpcrl.errors import HpcrlError, UsageError

VARIANCE_EPSILON = 1e-8  #: keeps whitening of equal advantages finite


def compute_advantages(batch: RolloutBatch, options: Options) -> Advantages:
    """Advantages (and a critic's returns), float64 [t], of the own tokens; 0 where the mask is.

    In order: shaping by length, KL in the reward (off the response's reward, or left to an estimator of tokens), the
    estimator of --advantage-estimator, the KL to a teacher, --normalize-advantages. Collective over data-parallel ranks
    through `batch.total`.

    Raises:
        UsageError: if the batch lacks what the options need.
        HpcrlError: if an estimator returns something else than [t].
    """
    name = options.advantage_estimator
    estimate = find("estimators", name, "--advantage-estimator")
    batch = replace(batch, reward=batch.reward.double() - overlong_penalty(batch.response_sum(batch.length), options))
    batch = _with_kl(batch, options, name)
    found = estimate(batch, options)
    for what, values in found._asdict().items():
        if values is not None and values.shape != batch.mask.shape:
            shape = tuple(values.shape)
            raise HpcrlError(
                f"--advantage-estimator {name} returns {what} of shape {shape} for {len(batch.mask)} tokens"
            )
    advantages, returns = (None if x is None else x.double().where(batch.mask, 0.0) for x in found)
    if options.use_opd and options.opd_kl_type == "sampled":
        advantages = advantages - options.opd_kl_coef * teacher_kl(batch).where(batch.mask, 0.0)
    if options.normalize_advantages:
        advantages = whiten(advantages, batch)
    return Advantages(advantages, returns)


def overlong_penalty(length: Tensor, options: Options) -> Tensor:
    """float64 [n], what is taken off a reward for its response's length; 0 without --overlong-buffer-len.

    With L of --rollout-max-response-len and a buffer of B tokens: 0 up to L - B, then rising evenly to
    --overlong-penalty-factor at L.  Source: DAPO's soft overlong punishment, Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    buffer = options.overlong_buffer_len
    if buffer is None:
        return torch.zeros(len(length), dtype=torch.float64, device=length.device)
    beyond = length.double() - (options.rollout_max_response_len - buffer)
    return options.overlong_penalty_factor * (beyond / buffer).clamp(0, 1)


def _with_kl(batch: RolloutBatch, options: Options, name: str) -> RolloutBatch:
    """The batch with `kl_penalty`, or with the KL of each response taken off its reward.

    Source of the second: Ahmadian et al. 2024, arXiv:2402.14740, eq. 1, R - kl_coef sum_t KL_t.
    """
    none = torch.zeros(len(batch.mask), dtype=torch.float64, device=batch.mask.device)
    if not options.kl_coef:
        return replace(batch, kl_penalty=none)
    if batch.old is None or batch.reference is None:
        raise UsageError(
            "--kl-coef needs the log-probs of old policy and reference, which are missing", "give --ref-load"
        )
    difference = batch.old.double() - batch.reference.double()
    kl = find("kl", options.kl_loss_type, "--kl-loss-type")(difference, torch.ones_like(difference))
    penalty = (options.kl_coef * kl).where(batch.mask, 0.0)
    declared = find_algorithm_file("estimators", name)
    if declared is None or declared.kl == "token":
        return replace(batch, kl_penalty=penalty)
    owner = batch.spread(batch.own)
    sums = batch.total(torch.zeros_like(batch.reward).index_add_(0, owner, penalty))
    return replace(batch, reward=batch.reward - batch.response_sum(sums), kl_penalty=none)


def teacher_kl(batch: RolloutBatch) -> Tensor:
    """float64 [t]: log p_old - log p_teacher of each sampled token, an estimate of the reverse KL; --opd-kl-coef times
    that is taken off its advantage.

    Source: Lu and Thinking Machines Lab 2025, https://thinkingmachines.ai/blog/on-policy-distillation; as slime's
    --use-opd. UsageError without the log-probs of both.
    """
    if batch.old is None or batch.teacher is None:
        raise UsageError(
            "--use-opd needs the log-probs of old policy and teacher, which are missing", "give --opd-type"
        )
    return batch.old.double() - batch.teacher.double()


def whiten(values: Tensor, batch: RolloutBatch) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the trained tokens of all ranks; 0 elsewhere.  Variance: unbiased.

    Two passes over the ranks: mean, then squared deviations, so that a small variance next to a large mean stays exact.
    """
    weights = batch.mask.double()
    total, count = batch.total(torch.stack([(values * weights).sum(), weights.sum()]))
    centred = (values - total / count.clamp(min=1)) * weights
    (squares,) = batch.total((centred**2).sum()[None])
    return centred / (squares / (count - 1).clamp(min=1) + VARIANCE_EPSILON).sqrt()
