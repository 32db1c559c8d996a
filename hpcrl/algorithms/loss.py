"""The loss of a micro-batch by --loss-type, and a critic's."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Loss, TokenBatch
from hpcrl.config.options import AlgorithmOptions


def compute_loss(tokens: TokenBatch, options: AlgorithmOptions) -> Loss:
    """The loss of --loss-type: policy_loss, sft_loss, dpo_loss, custom_loss.

    Report of policy_loss, as slime names them: loss, pg_loss, pg_clipfrac, ppo_kl, entropy_loss, kl_loss (with a reference),
    ois, tis, tis_clipfrac, tis_abs (with a correction), opsm_clipfrac (with --use-opsm), mismatch_* and
    train_rollout_logprob_abs_diff (a token mean, and _max).
    """
    raise NotImplementedError


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, options: AlgorithmOptions) -> Loss:
    """A critic's clipped value loss; all [r], values with a gradient.  Report: loss, value_loss, value_clipfrac."""
    raise NotImplementedError
