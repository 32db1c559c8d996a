"""Losses of pairs of responses to one prompt.

Invariant: a pair is whole in one micro-batch; its loss is spread over the tokens of both, so that it counts like any
other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpcrl.algorithms.interface import Loss, Report, TokenBatch
from hpcrl.algorithms.mismatch import add_difference
from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError


def dpo_loss(tokens: TokenBatch, options: Options) -> Loss:
    """DPO: the response of higher reward in each group of two is to be the likelier one, as compared with the
    reference.

        L = -log sigmoid(dpo_beta ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))))

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.  The loss of a pair stands at each token of both responses,
    so the mean over samples is the mean over pairs; a response without trained tokens has log-ratio 0 and does not
    count itself.  A pair of equal rewards is no preference: its loss is 0.
    Report: loss, dpo_accuracy (share of pairs with a positive margin), dpo_margin (dpo_beta x the difference),
    dpo_chosen, dpo_rejected (dpo_beta x each response's log-ratio), dpo_ties (share of pairs of equal rewards, 0 in all
    the others). UsageError without a reference; DataError if a group is no pair.
    """
    if tokens.reference is None:
        raise UsageError("--loss-type dpo_loss needs the log-probs of the reference, here are none", "give --ref-load")
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
    order = torch.argsort(tokens.group, stable=True)
    pairs = order.view(-1, 2) if len(order) % 2 == 0 else order[:0].view(-1, 2)
    groups = tokens.group[pairs]
    if (
        2 * len(pairs) != len(order)
        or (groups[:, 0] != groups[:, 1]).any()
        or len(groups[:, 0].unique()) != len(groups)
    ):
        raise DataError(
            "--loss-type dpo_loss found a group that is no pair in a micro-batch", "give --n-samples-per-prompt 2"
        )
    partner = torch.empty_like(order)
    partner[pairs[:, 0]], partner[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return partner, tokens.reward > tokens.reward[partner], tokens.reward == tokens.reward[partner]
