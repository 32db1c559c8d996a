"""How far engine and trainer are apart: always measured, whatever is corrected.

Invariant: nothing here has a gradient or changes a loss.
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Report, TokenBatch

DIFFERENCE = "train_rollout_logprob_abs_diff"


def mismatch_report(tokens: TokenBatch) -> dict[str, Tensor]:
    """name -> [r], in slime's names; t: log-probs of the trainer under the weights that sampled, e: the engine's.

    mis_kl: e - t (k1 of the KL of the engine's policy to the trainer's).  mis_k3_kl: exp(t - e) - 1 - (t - e). Of whole
    responses, the same for each token, with the perplexity exp(-mean log-prob): mis_training_ppl, mis_rollout_ppl,
    mis_training_log_ppl, mis_rollout_log_ppl, mis_log_ppl_diff (trainer's minus engine's), mis_log_ppl_abs_diff,
    mis_ppl_ratio (trainer's over engine's).
    """
    difference = tokens.trainer - tokens.rollout
    trainer, engine = tokens.sample_means(tokens.trainer, tokens.rollout)
    return {
        "mis_kl": -difference,
        "mis_k3_kl": difference.exp() - 1 - difference,
        "mis_training_ppl": (-trainer).exp(),
        "mis_rollout_ppl": (-engine).exp(),
        "mis_training_log_ppl": -trainer,
        "mis_rollout_log_ppl": -engine,
        "mis_log_ppl_diff": engine - trainer,
        "mis_log_ppl_abs_diff": (engine - trainer).abs(),
        "mis_ppl_ratio": (engine - trainer).exp(),
    }


def add_difference(report: Report, tokens: TokenBatch) -> None:
    """Add |t - e| to a report, as a token mean and a maximum, where both are known and comparable; 0 for tokens that
    are not fresh."""
    if tokens.comparable and tokens.trainer is not None and tokens.rollout is not None:
        difference = (tokens.trainer - tokens.rollout).abs()
        if tokens.fresh is not None:
            difference = difference * tokens.fresh
        report.token_means[DIFFERENCE] = difference.sum().double()
        report.maxima[f"{DIFFERENCE}_max"] = (
            difference.max() if difference.numel() else difference.new_zeros(())
        ).double()


def off_policy_mask(tokens: TokenBatch, delta: float) -> Tensor:
    """OPSM, [r]: 0.0 for tokens with a negative advantage of a response that the policy has moved away from, else 1.0.

    Moved away: mean_t (log p_old,t - log p_t) > delta.  Source: off-policy sequence masking, DeepSeek-AI 2025,
    DeepSeek-V3.2, arXiv:2512.02556, 3.1.
    """
    (moved,) = tokens.sample_means((tokens.old - tokens.logprobs).detach())
    return 1 - ((tokens.advantages < 0) & (moved > delta)).to(moved.dtype)
