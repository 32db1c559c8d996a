"""What Transformer Engine's fused router is documented to compute, in plain torch: a stand-in of the same signature.

Its functions take the arguments of `transformer_engine.pytorch.router` of release 2.20, refuse what its binding
refuses, and follow the kernel's order of operations in fp32: scores of all experts, the correction bias added, the best
of each group summed, the best groups, the best experts of these, the bias taken off again, what is left normalised, and
the scaling factor.  It is the formula that tests compare with Megatron's own router, not the kernel: which of two equal
scores is taken, and sums in another order, are the kernel's own.
"""

from __future__ import annotations

import torch

NAMES = ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
EPSILON = 1e-20


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [tokens, experts] of the chosen, in the logits' dtype and 0 elsewhere, and bool which are chosen.

    Raises:
        ValueError: for arguments that the real one refuses.
    """
    if logits.dtype == torch.float64:
        raise ValueError("Current TE does not support float64 router type.")
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"{score_function}: not stood in for")
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    if expert_bias is not None and (score_function != "sigmoid" or expert_bias.dtype != torch.float32):
        raise ValueError("expert_bias must be a float32 tensor, with sigmoid")
    scores = _scores(logits.float(), score_function, use_pre_softmax)
    biased = scores if expert_bias is None else scores + expert_bias
    if group_topk and group_topk > 0:
        assert num_groups is not None
        biased = biased.masked_fill(~_of_best_groups(biased, num_groups, group_topk, topk // group_topk), -torch.inf)
    found, chosen = biased.topk(topk, dim=-1)
    if expert_bias is not None:
        found = found - expert_bias[chosen]
    if score_function == "softmax" and not use_pre_softmax:
        found = found.softmax(-1)
    if score_function == "sigmoid" and topk > 1:
        found = found / (found.sum(-1, keepdim=True) + EPSILON)
    found = found * (1.0 if scaling_factor is None else scaling_factor)
    probs = torch.zeros_like(scores).scatter(-1, chosen, found).to(logits.dtype)
    return probs, torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)


def _scores(logits: torch.Tensor, score_function: str, before: bool) -> torch.Tensor:
    if score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if before else logits


def _of_best_groups(scores: torch.Tensor, groups: int, best: int, summed: int) -> torch.Tensor:
    """bool [tokens, experts]: whether an expert is of one of the `best` groups, by the sum of their `summed` best."""
    each = scores.unflatten(-1, (groups, -1))
    taken = each.topk(summed, dim=-1).values.sum(-1).topk(best, dim=-1).indices
    mask = torch.zeros(each.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, taken, True)
    return mask.unsqueeze(-1).expand_as(each).flatten(-2)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool which experts are the best, their scores over the sum of all, fp32), both [tokens, experts]."""
    scores = _scores(logits.float(), score_function, True)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    chosen = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The loss by which experts are used evenly, one number."""
    weighed = (probs.float().sum(0) * tokens_per_expert).sum()
    return (weighed * (num_experts * coeff / topk / total_num_tokens / total_num_tokens)).to(probs.dtype)
