"""MIS: importance weights of tokens or responses, truncated, clipped or masked, with rejection.

    k = exp(l),   l_t = log p_trainer,t - log p_engine,t
                  l: l_t  (token),  sum_t l_t  (sequence),  mean_t l_t  (geometric);  held between -20 and 20 before exp
    --tis-mode truncate: w = min(k, tis_clip)      clip: w = clip(k, tis_clip_low, tis_clip)
               mask: w = k, and a token outside [tis_clip_low, tis_clip] is rejected
    --use-rs: k' of --rs-level outside [rs_lower_bound, rs_upper_bound] rejects too; bounds that are not given are those
              of the weights, the lower 1 / tis_clip where that is not given either
    --use-rs --rs-veto-threshold v: a response with any exp(l_t) < v is rejected whole
    A rejected token counts in no term of the loss, but stays in the divisor.
    --tis-batch-normalize: w / mean of w over the micro-batch: over its trained tokens, rejected ones too (token), or of
               each response, then over its responses (sequence); so how samples are packed changes what a token weighs

Source: Liu, Li et al. 2025, "When speed kills stability", yingru.notion.site; names and defaults as in slime's
train_infer_mismatch_helper, whose tis_upper_bound is tis_clip here, and whose tis_lower_bound is tis_clip_low.
Use: where --use-tis alone does not hold; sequence weights are unbiased and noisy, geometric rejection needs bounds
close to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Correction, TokenBatch
from hpcrl.config.options import Options

OPTIONS = (
    "tis_clip",
    "tis_clip_low",
    "tis_level",
    "tis_mode",
    "use_rs",
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "tis_batch_normalize",
)
BOUND = 20.0  #: of log-ratios, so that exp stays finite
LEAST = 1e-8  #: a mean that weights are not divided by, as in slime


def correct(tokens: TokenBatch, options: Options) -> Correction:
    """Weights by --tis-level and --tis-mode, and what rejection keeps."""
    low, high = options.tis_clip_low, options.tis_clip
    difference = tokens.trainer - tokens.rollout
    levels = _levels(tokens, difference, options)
    ratio = _ratio(levels[options.tis_level])
    kept, weights = torch.ones_like(ratio), ratio
    report = {"tis": ratio, "tis_abs": (ratio - 1).abs()}
    if options.tis_mode == "mask":
        kept = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
        report["tis_clipfrac"] = 1 - kept
    else:
        weights = ratio.clamp(low if options.tis_mode == "clip" else 0.0, high)
        report["tis_clipfrac"] = (weights != ratio).to(ratio.dtype)
    if options.use_rs:
        lowest, highest = rejection_bounds(options)
        rejection = _ratio(levels[options.rs_level])
        report["rs_mask_fraction_low"] = (rejection < lowest).to(ratio.dtype)
        report["rs_mask_fraction_high"] = (rejection > highest).to(ratio.dtype)
        kept = kept * ((rejection >= lowest) & (rejection <= highest))
    if options.use_rs and options.rs_veto_threshold is not None:
        report["rs_catastrophic_seq_fraction"] = levels["veto"]
        kept = kept * (1 - levels["veto"])
    if options.tis_batch_normalize:
        mean = _batch_mean(tokens, weights, options)
        mean = torch.where(mean > LEAST, mean, torch.ones_like(mean))
        weights = weights / mean
        report["mis_batch_norm_factor"] = mean.expand_as(weights)
    return Correction(weights, kept, report)


def _batch_mean(tokens: TokenBatch, weights: Tensor, options: Options) -> Tensor:
    """The mean weight of the micro-batch, a scalar that is equal on all CP ranks."""
    totals, counts = tokens.sums(torch.stack([weights, torch.ones_like(weights)]))
    if options.tis_level == "token":
        return totals.sum() / counts.sum().clamp(min=1)
    return (totals / counts.clamp(min=1)).sum() / max(tokens.samples, 1)


def rejection_bounds(options: Options) -> tuple[float, float]:
    """(--rs-lower-bound, --rs-upper-bound); they default to --tis-clip-low, or 1 / --tis-clip where that is 0, and
    --tis-clip."""
    low = options.tis_clip_low or 1 / options.tis_clip
    low = low if options.rs_lower_bound is None else options.rs_lower_bound
    return low, options.tis_clip if options.rs_upper_bound is None else options.rs_upper_bound


def _levels(tokens: TokenBatch, difference: Tensor, options: Options) -> dict[str, Tensor]:
    """Level -> log-ratios [r]; veto -> 1.0 for every token of a response that has one below the threshold.  One
    reduction."""
    below = torch.zeros_like(difference)
    if options.rs_veto_threshold is not None:
        below = (difference.exp() < options.rs_veto_threshold).to(difference.dtype)
    sums, vetoes, counts = tokens.sums(torch.stack([difference, below, torch.ones_like(difference)]))
    spread = {"sequence": sums, "geometric": sums / counts.clamp(min=1), "veto": (vetoes > 0).to(difference.dtype)}
    return {"token": difference} | {name: values[tokens.sample] for name, values in spread.items()}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-BOUND, BOUND).exp()
