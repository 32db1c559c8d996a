"""The loss of a micro-batch by --loss-type, and a critic's; and how far engine and trainer are apart, which is always
measured, whatever is corrected.

Invariants: a loss is a sum over tokens of weight x term, where a term depends on its sample alone (dpo: its pair);
divided by a count over the whole step, it depends neither on micro-batches nor on TP, PP, CP or DP.  What is only
measured has no gradient and changes no loss.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpcrl.algorithms.interface import Correction, Loss, Report, Terms, TokenBatch, find, importance_report, ratio_of
from hpcrl.config.custom_functions import guarded
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own
from hpcrl.config.rules.algorithm_needs import policy_loss_name
from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.utils.device_copies import to_device

DIFFERENCE = "train_rollout_logprob_abs_diff"


def mismatch_report(tokens: TokenBatch, fresh: Tensor) -> dict[str, Tensor]:
    """name -> [r], in slime's names; t: log-probs of the trainer under the weights that sampled, e: the engine's.

    mis_kl: e - t (k1 of the KL of the engine's policy to the trainer's).  mis_k3_kl: exp(t - e) - 1 - (t - e). Of the
    tokens of a response for which `fresh` [r] is 1, with the perplexity exp(-mean log-prob): mis_training_ppl,
    mis_rollout_ppl, mis_training_log_ppl, mis_rollout_log_ppl, mis_log_ppl_diff (trainer's minus engine's),
    mis_log_ppl_abs_diff, mis_ppl_ratio (trainer's over engine's).
    """
    difference = tokens.trainer - tokens.rollout
    trainer, engine = tokens.sample_means(tokens.trainer, tokens.rollout, among=fresh)
    return {
        "mis_kl": -difference,
        "mis_k3_kl": ratio_of(difference) - 1 - difference,
        "mis_training_ppl": ratio_of(-trainer),
        "mis_rollout_ppl": ratio_of(-engine),
        "mis_training_log_ppl": -trainer,
        "mis_rollout_log_ppl": -engine,
        "mis_log_ppl_diff": engine - trainer,
        "mis_log_ppl_abs_diff": (engine - trainer).abs(),
        "mis_ppl_ratio": ratio_of(engine - trainer),
    }


def add_difference(report: Report, tokens: TokenBatch, mismatch: bool = False) -> None:
    """Add |t - e| of the fresh tokens to a report, their mean and their maximum, where both are known and comparable.

    Args:
        mismatch: add `mismatch_report` too, whose means count tokens as the loss does.
    """
    if tokens.comparable and tokens.trainer is not None and tokens.rollout is not None:
        difference = (tokens.trainer - tokens.rollout).abs()
        fresh = torch.ones_like(difference) if tokens.fresh is None else tokens.fresh.to(difference.dtype)
        found = {DIFFERENCE: (difference, fresh)}
        if mismatch:
            found |= {name: (value, tokens.weights * fresh) for name, value in mismatch_report(tokens, fresh).items()}
        report.counted |= {name: ((value * w).sum().double(), w.sum().double()) for name, (value, w) in found.items()}
        none = difference.new_full((1,), -torch.inf)
        report.maxima[f"{DIFFERENCE}_max"] = torch.cat([difference.where(fresh > 0, none), none]).max().double()


def off_policy_mask(tokens: TokenBatch, delta: float) -> Tensor:
    """OPSM, [r]: 0.0 for tokens with a negative advantage of a response that the policy has moved away from, else 1.0.

    Moved away: mean_t (log p_old,t - log p_t) > delta.  Source: off-policy sequence masking, DeepSeek-AI 2025,
    DeepSeek-V3.2, arXiv:2512.02556, 3.1.
    """
    (moved,) = tokens.sample_means((tokens.old - tokens.logprobs).detach())
    return 1 - ((tokens.advantages < 0) & (moved > delta)).to(moved.dtype)


Found = TypeVar("Found", Terms, Correction)


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """The loss of --loss-type; see `policy_loss`, `sft_loss`, `dpo_loss`.

    custom_loss: function(tokens, options) -> Loss of --custom-loss-function-path.

    Raises:
        HpcrlError: if it returns something else.
    """
    if options.loss_type == "custom_loss":
        path = str(options.custom_loss_function_path)
        own = load_own("custom_loss_function_path", path)
        found = guarded(own, f"--custom-loss-function-path {path}")(tokens, options)
        if not isinstance(found, Loss) or found.total.ndim:
            raise HpcrlError(
                f"--custom-loss-function-path {path} returns no Loss of a scalar", "see hpcrl.algorithms.interface"
            )
        return found
    losses = {"policy_loss": policy_loss, "sft_loss": sft_loss, "dpo_loss": dpo_loss}
    return losses[options.loss_type](tokens, options)


def policy_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Policy gradient - entropy_coef x entropy + kl_loss_coef x KL (+ opd_kl_coef x KL to the teacher); tokens needs
    old, trainer, rollout and advantages.

    Report, in slime's names: loss, pg_loss, pg_clipfrac, ppo_kl, entropy_loss; kl_loss with --use-kl-loss;
    opd_reverse_kl or opd_forward_kl where that is a term of the loss; opsm_clipfrac with --use-opsm; ois, tis,
    tis_clipfrac, tis_abs and what the correction reports. Where trainer and engine are comparable, of the fresh tokens
    mis_* (`mismatch_report`), and train_rollout_logprob_abs_diff as a mean and a maximum.

    Raises:
        UsageError: if --use-kl-loss finds no reference.
    """
    name = policy_loss_name(options)
    terms = _of_tokens(Terms, find("losses", name, "--pg-loss-type")(tokens, options), tokens, f"--pg-loss-type {name}")
    moved = (tokens.old - tokens.logprobs).detach()
    if name == "gspo":  # whose ratio is one of responses
        (moved,) = tokens.sample_means(moved)
    report: dict[str, Tensor] = {}
    gradient, kept = terms.loss, torch.ones_like(tokens.weights)
    if options.use_opsm:
        mask = off_policy_mask(tokens, options.opsm_delta)
        gradient, report["opsm_clipfrac"] = gradient * mask, 1 - mask
    ratio = ratio_of(tokens.trainer - tokens.rollout)
    importance = importance_report(ratio, (ratio > options.tis_clip) | (ratio < options.tis_clip_low))
    if options.use_tis:
        which = options.custom_tis_function_path or "tis"
        found = find("corrections", which, "--custom-tis-function-path")(tokens, options)
        correction = _of_tokens(Correction, found, tokens, f"--custom-tis-function-path {which}")
        gradient = gradient * correction.weights.detach()
        kept = correction.kept.detach()
        importance |= correction.report
    report |= {"pg_clipfrac": terms.clipped * kept, "ppo_kl": moved * kept}  # in slime, too, of what is not rejected
    report |= {"ois": ratio_of(-moved)} | importance
    weights = tokens.weights * kept
    pg_weights = weights if tokens.pg_weights is None else tokens.pg_weights * kept
    sums = {"pg_loss": (gradient * pg_weights).sum(), "entropy_loss": (tokens.entropy * weights).sum()}
    total = sums["pg_loss"]
    if options.entropy_coef:
        total = total - options.entropy_coef * sums["entropy_loss"]
    if options.use_kl_loss:
        sums["kl_loss"] = (reference_kl(tokens, options) * weights).sum()
        if options.kl_loss_coef:
            total = total + options.kl_loss_coef * sums["kl_loss"]
    if tokens.divergence is not None:
        name = f"opd_{options.opd_kl_type}_kl"
        sums[name] = (tokens.divergence * weights).sum()
        if options.opd_kl_coef:
            total = total + options.opd_kl_coef * sums[name]
    loss = Loss(total, _report(tokens, total, sums, report))
    add_difference(loss.report, tokens, mismatch=True)
    return loss


def _of_tokens(kind: type[Found], found: Any, tokens: TokenBatch, where: str) -> Found:
    """What an estimator of terms returned, if it is a `kind` whose tensors are [r].

    Raises:
        HpcrlError: names the option otherwise.
    """
    parts = [value for value in found if isinstance(value, Tensor)] if isinstance(found, kind) else []
    if not isinstance(found, kind) or any(part.shape != tokens.weights.shape for part in parts):
        raise HpcrlError(
            f"{where} returns no {kind.__name__} of {len(tokens.weights)} tokens", "see hpcrl.algorithms.interface"
        )
    return found


def reference_kl(tokens: TokenBatch, options: Options) -> Tensor:
    """[r]: the KL estimate of --kl-loss-type between policy and reference, with its gradient.

    With --use-unbiased-kl weighted by the ratio to the old policy, with the ratio's
    gradient (DeepSeek-V3.2, arXiv:2512.02556, 3.1).  Without a coefficient it is a metric alone and has no gradient.
    """
    if tokens.reference is None:
        raise UsageError("--use-kl-loss needs the log-probs of the reference, which are missing", "give --ref-load")
    logprobs = tokens.logprobs if options.kl_loss_coef else tokens.logprobs.detach()
    ratio = ratio_of(logprobs - tokens.old) if options.use_unbiased_kl else torch.ones_like(logprobs)
    return find("kl", options.kl_loss_type, "--kl-loss-type")(logprobs - tokens.reference, ratio)


def sft_loss(tokens: TokenBatch, options: Options) -> Loss:
    """-log p of each token.  Report: loss, token_accuracy (the share of tokens that are the likeliest)."""
    total = -(tokens.logprobs * tokens.weights).sum()
    values = {} if tokens.greedy is None else {"token_accuracy": tokens.greedy.to(tokens.weights.dtype)}
    return Loss(total, _report(tokens, total, {}, values))


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, options: Options) -> Loss:
    """A critic's loss, max((v - R)^2, (v_old + clip(v - v_old, -value_clip, value_clip) - R)^2); all [r].

    Report: value_loss, value_clipfrac. Source: Schulman et al. 2017's implementation; Engstrom et al. 2020,
    arXiv:2005.12729, 2; without the factor 1/2, as slime.

    Args:
        values: the critic's, with a gradient.
        old_values: before the update.
        returns: of the estimator.
    """
    change = values - old_values
    clipped = old_values + change.clamp(-options.value_clip, options.value_clip)
    terms = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    total = (terms * weights).sum()
    outside = (change.detach().abs() > options.value_clip).to(weights.dtype)
    return Loss(
        total,
        Report(means={"value_loss": total.detach().double(), "value_clipfrac": (outside * weights).sum().double()}),
    )


@torch.no_grad()
def _report(tokens: TokenBatch, total: Tensor, sums: dict[str, Tensor], values: dict[str, Tensor]) -> Report:
    """Sums as they are, and values [r] weighted as the loss counts without rejection."""
    means = {"loss": total, **sums} | {name: (value * tokens.weights).sum() for name, value in values.items()}
    return Report(means={name: value.detach().double() for name, value in means.items()})


# ---- pairs of responses


def dpo_loss(tokens: TokenBatch, options: Options) -> Loss:
    """DPO: the response of higher reward in each group of two is to be the likelier one, as compared with the
    reference.

        L = -log sigmoid(dpo_beta ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))))

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. The loss of a pair is at each token of both responses, so the
    mean over samples is the mean over pairs; a response without trained tokens has log-ratio 0 and does not count
    itself. A pair of equal rewards is not a preference: its loss is 0. Report: loss, dpo_accuracy (share of pairs with
    a positive margin), dpo_margin (dpo_beta x the difference), dpo_chosen, dpo_rejected (dpo_beta x each response's
    log-ratio), dpo_ties (share of pairs of equal rewards, 0 in all the others). UsageError without a reference.

    Raises:
        DataError: if a group is not a pair.
    """
    if tokens.reference is None:
        raise UsageError(
            "--loss-type dpo_loss needs the log-probs of the reference, which are missing", "give --ref-load"
        )
    partner, chosen, tie = _pairs(tokens)
    (ratios,) = tokens.sums((tokens.logprobs - tokens.reference)[None])
    own = options.dpo_beta * ratios
    other = options.dpo_beta * ratios[partner]
    margin = torch.where(chosen, own - other, other - own)
    terms = -logsigmoid(margin).masked_fill(tie, 0.0)[tokens.sample]
    total = (terms * tokens.weights).sum()
    with torch.no_grad():
        each = {
            "dpo_accuracy": (margin > 0).to(margin.dtype),
            "dpo_margin": margin,
            "dpo_chosen": torch.where(chosen, own, other),
            "dpo_rejected": torch.where(chosen, other, own),
        }
        each = {name: value.masked_fill(tie, 0.0) for name, value in each.items()} | {"dpo_ties": tie.to(margin.dtype)}
        means = {name: (value[tokens.sample] * tokens.weights).sum() for name, value in each.items()}
    found = Loss(
        total, Report(means={name: value.detach().double() for name, value in ({"loss": total} | means).items()})
    )
    if not options.learns_labels:  # else no engine sampled them
        add_difference(found.report, tokens)
    return found


def _pairs(tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(int64 [m], the other sample of each one's pair; bool [m], whether it is the chosen one, and whether neither
    is)."""
    if tokens.group is None or tokens.reward is None:
        raise UsageError("--loss-type dpo_loss needs group and reward of each sample")
    order = torch.argsort(tokens.group, stable=True)  # on the host, as all of it: a GPU would be waited for
    pairs = order.view(-1, 2) if len(order) % 2 == 0 else order[:0].view(-1, 2)
    groups = tokens.group[pairs]
    if (
        2 * len(pairs) != len(order)
        or (groups[:, 0] != groups[:, 1]).any()
        or len(groups[:, 0].unique()) != len(groups)
    ):
        raise DataError(
            "--loss-type dpo_loss found a group that is not a pair in a micro-batch", "give --n-samples-per-prompt 2"
        )
    partner = torch.empty_like(order)
    partner[pairs[:, 0]], partner[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    partner = to_device(partner, tokens.reward.device)
    return partner, tokens.reward > tokens.reward[partner], tokens.reward == tokens.reward[partner]


# ---- what each token counts: by its sample's number of trained tokens alone, so no packing can change a loss


def token_weights(counts: Tensor, options: Options) -> Tensor:
    """float [m], what each trained token of a sample with `counts` int64 [m] trained tokens (its mask sum) counts.

    Per sample (default): 1 / max(count, 1); the loss is divided by the samples of the step.  Per token
    (--calculate-per-token-loss; DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 12): 1; divided by its trained tokens.
    """
    if divides_by_tokens(options):
        return torch.ones(len(counts), device=counts.device)
    return 1 / counts.clamp(min=1).float()


def policy_token_weights(counts: Tensor, options: Options) -> Tensor | None:
    """The same [m] for the policy-gradient term alone; None where that counts as the others do.

    Per constant (--pg-loss-divisor N; Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, 3.2): 1 / N.
    --custom-pg-loss-reducer-function-path: function(counts, options) -> float [m].

    Raises:
        HpcrlError: if it returns another shape.
    """
    if path := options.custom_pg_loss_reducer_function_path:
        own = load_own("custom_pg_loss_reducer_function_path", path)
        weights = guarded(own, f"--custom-pg-loss-reducer-function-path {path}")(counts, options)
        if not isinstance(weights, Tensor) or weights.shape != counts.shape:
            raise HpcrlError(
                f"--custom-pg-loss-reducer-function-path {path} returns no tensor of {len(counts)} weights"
            )
        return weights
    if options.pg_loss_divisor is not None:
        return torch.full(counts.shape, 1 / options.pg_loss_divisor, device=counts.device)
    return None


def divides_by_tokens(options: Options) -> bool:
    """Whether the loss is divided by the step's trained tokens; else by its samples."""
    return options.calculate_per_token_loss
