"""What estimators, losses and corrections get and give, the ratios that they share, and how one is found: by its file's
name, or by the dotted path of a function of the user's.

Invariant: every tensor here is of samples or of tokens, never of packed rows; so a formula is the same in every layout.
Letters of shapes: n samples of the whole rollout, m samples at hand, t tokens of whole responses, r tokens that are
trained.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.config.custom_functions import guarded
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import Kind, algorithm_files, is_path
from hpcrl.config.plugin_points import load_own
from hpcrl.errors import UsageError


def _alone(sums: Tensor) -> Tensor:
    """The sum over data-parallel ranks where there is one."""
    return sums


@dataclass(frozen=True)
class RolloutBatch:
    """All samples of one rollout (every optimizer step of it) as an estimator sees them.

    The fields [n] are a table of all samples, in the order of group and index, equal on every rank. The fields [m] and
    [t] are of whole responses of this rank's samples, one after another, equal on the TP, CP and PP ranks of a
    data-parallel rank.

    Attributes:
        reward: float64 [n].
        group: int64 [n], the number of the prompt.
        length: int64 [n], tokens of the response (0: empty).
        truncated: bool [n].
        baseline: float64 [n], the reward of the greedy response to the same prompt (NaN: there is none), or None.
        response: int64 [n], which response each sample is of, -1 for one that counts nowhere (filling, or its grading
            failed); None where each is its own and counts. A response of several samples counts once in its group, as
            the mean of them.
        own: int64 [m], which rows of the table this rank's samples are.
        mask: bool [t], trained tokens, t = sum of length[own].
        old: float [t], log-probs under the old policy, before the update.
        reference: float [t], the reference's, or None.
        teacher: float [t], the teacher's log-probs, or None.
        values: float [t], the critic's value of the state before each token, or None.
        kl_penalty: float64 [t], --kl-coef x the KL estimate between old and reference, 0 without; `compute_advantages`
            fills it.
        total: sums a float64 tensor over data-parallel ranks (not over TP, CP, PP); identity on one rank.
    """

    reward: Tensor
    group: Tensor
    length: Tensor
    truncated: Tensor
    own: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    values: Tensor | None = None
    baseline: Tensor | None = None
    response: Tensor | None = None
    kl_penalty: Tensor | None = None
    total: Callable[[Tensor], Tensor] = _alone

    # ---- from groups to samples, [n] -> [n]

    def group_sum(self, values: Tensor) -> Tensor:
        """For each sample the sum of `values` over the responses of its group, each the mean of its samples."""
        if self.response is not None:
            values = values * self._share
        place = self._places
        return values.new_zeros(len(values)).index_add_(0, place, values)[place]  # no more groups than samples

    @cached_property
    def _places(self) -> Tensor:
        """int64 [n]: of the groups, numbered from 0, the one that each sample is of."""
        return torch.unique(self.group, return_inverse=True)[1]

    @property
    def group_size(self) -> Tensor:
        """For each sample how many its group has, float64 [n]."""
        return self.group_sum(torch.ones_like(self.reward))

    def group_mean(self, values: Tensor) -> Tensor:
        """For each sample the mean of `values` over its group."""
        return self.group_sum(values) / self.group_size.clamp(min=1)  # 0: of a group none of whose samples counts

    # ---- from responses of several samples to samples, [n] -> [n]

    def response_sum(self, values: Tensor) -> Tensor:
        """For each sample the sum of `values` over its response."""
        if self.response is None:
            return values
        place, real = self.response.clamp(min=0), self.response >= 0
        return values.new_zeros(len(values)).index_add_(0, place, values.where(real, torch.zeros_like(values)))[place]

    @property
    def _share(self) -> Tensor:
        """float64 [n]: what part of its response each sample is; 0 for one that counts nowhere."""
        assert self.response is not None
        real = (self.response >= 0).double()
        return real / self.response_sum(real).clamp(min=1)

    # ---- from samples to tokens

    @property
    def lengths(self) -> Tensor:
        """int64 [m]: tokens of each own response."""
        return self.length[self.own]

    def to_tokens(self, values: Tensor) -> Tensor:
        """[n] -> [t]: each own token gets its sample's value."""
        return self.spread(values[self.own])

    def spread(self, values: Tensor) -> Tensor:
        """[m] -> [t]: each own token gets its own sample's value."""
        return torch.repeat_interleave(values, self.lengths, output_size=len(self.mask))  # else the device is asked

    @property
    def last(self) -> Tensor:
        """bool [t]: the last trained token of each own response, where its reward is paid; none where nothing is
        trained."""
        owner = self.spread(torch.arange(len(self.own), device=self.mask.device))[self.mask]
        places = self.mask.nonzero()[:, 0]
        ends = torch.cat([owner[1:] != owner[:-1], owner.new_ones(min(1, len(owner)), dtype=torch.bool)])
        found = torch.zeros_like(self.mask)
        found[places[ends]] = True
        return found


class Advantages(NamedTuple):
    """What an estimator returns: advantages [t], and where there is a critic the returns [t] that it learns, else
    None."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """The r tokens of a micro-batch that are trained on and are on this rank; they belong to m samples.

    All float tensors have one dtype; logprobs, entropy and divergence carry a gradient.

    Attributes:
        logprobs: [r], of the model that is trained (nats).
        entropy: [r], of the model that is trained (nats).
        sample: int64 [r], which of the m samples each belongs to.
        weights: [r], what each token counts (see `loss.token_weights`): the loss is the sum of weight x term, over a
            divisor.
        greedy: bool [r], whether the token is the likeliest.
        old: [r], log-probs of the policy that the ratio is taken to (--use-rollout-logprobs: the engine's); where no
            pass computed them: `logprobs.detach()`.
        trainer: [r], the trainer's log-probs under the weights that sampled: `old`, except with --use-rollout-logprobs
            `logprobs.detach()`.
        rollout: [r], the engine's log-probs.
        advantages: [r].
        reference: [r], the reference's log-probs, or None.
        divergence: [r], the KL to the teacher over the whole vocabulary, or None.
        pg_weights: [r], as weights, for the policy-gradient term alone (a custom reducer), or None: `weights`.
        group: int64 [m] of the samples, in host memory; only a loss that compares samples (dpo) reads it.
        reward: float [m] of the samples, for the same.
        comparable: whether engine and trainer must agree on `rollout` and `trainer`; else nothing is reported of their
            difference.
        fresh: bool [r], whether they must agree on a token: False where an older policy sampled it, and it has no part
            in what is reported of the difference; None: on all.
        sum_over_sample: [k, r] -> [k, m], sums over each sample's trained tokens on all CP ranks; differentiable
            (backward also sums over CP).  Collective over CP: every loss calls it equally often on every rank, whatever
            r is.  None: this rank has the samples whole.
    """

    logprobs: Tensor
    entropy: Tensor
    sample: Tensor
    samples: int
    weights: Tensor
    greedy: Tensor | None = None
    old: Tensor | None = None
    trainer: Tensor | None = None
    rollout: Tensor | None = None
    advantages: Tensor | None = None
    reference: Tensor | None = None
    divergence: Tensor | None = None
    pg_weights: Tensor | None = None
    group: Tensor | None = None
    reward: Tensor | None = None
    comparable: bool = True
    fresh: Tensor | None = None
    sum_over_sample: Callable[[Tensor], Tensor] | None = None

    def sums(self, values: Tensor) -> Tensor:
        """[k, r] -> [k, m]: the sum of each row over every sample's trained tokens, on whatever rank they are."""
        if self.sum_over_sample is not None:
            return self.sum_over_sample(values)
        return values.new_zeros(len(values), self.samples).index_add(1, self.sample, values)

    def sample_means(self, *values: Tensor, among: Tensor | None = None) -> tuple[Tensor, ...]:
        """Each [r] -> [r]: the mean over all trained tokens of the token's sample (or those for which `among` is 1, not
        0)."""
        ones = torch.ones_like(values[0])
        *sums, counts = self.sums(torch.stack([*values, ones]) * (ones if among is None else among))
        return tuple((row / counts.clamp(min=1))[self.sample] for row in sums)


class Terms(NamedTuple):
    """What a policy loss returns of each token [r]: the loss, with its gradient, and 1.0 where clipping took effect,
    else 0."""

    loss: Tensor
    clipped: Tensor


class Correction(NamedTuple):
    """What a correction returns of each token.

    Attributes:
        weights: [r], detached, factors of the policy-gradient term.
        kept: [r] of 1.0 and 0.0; a token of 0 counts in no term, but stays in the divisor.
        report: name -> [r], logged as means that count as the loss does.
    """

    weights: Tensor
    kept: Tensor
    report: dict[str, Tensor]


@dataclass
class Report:
    """What to log of a micro-batch, by name (without train/): float64 scalars, detached.

    Attributes:
        means: sums of weight x value, to be added over micro-batches and ranks and divided by what the loss is divided
            by.
        counted: means with counts of their own: a sum, and what it is divided by once both are added up; a mean of
            nothing is not logged.
        maxima: the maximum counts; -inf, of nothing, is not logged. The names and their order depend on the options
            alone, so every rank has the same.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    counted: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Loss(NamedTuple):
    """The sum of weight x term of a micro-batch, a scalar with its gradient, and what to log."""

    total: Tensor
    report: Report


# ---- ratios of probabilities
# Every value and gradient is finite, so that a token which counts nowhere (advantage 0, rejected, masked by OPSM,
# clipped) adds exactly 0 to a gradient: infinity times 0 is NaN.  Below the bound nothing changes, bit for bit.

SLACK = 2.0  #: nats below the half, for what a product of two ratios is multiplied by


def bound_of(dtype: torch.dtype) -> float:
    """The bound of log-ratios: 42.4 in float32, 352.9 in float64.

    The product of two ratios at the bound is finite too, as in a KL that is weighted by a ratio."""
    return math.log(torch.finfo(dtype).max) / 2 - SLACK


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) of each, at most exp(`bound_of`), where the gradient is 0."""
    return log_ratio.clamp(max=bound_of(log_ratio.dtype)).exp()


def clip_range(options: Options) -> tuple[float, float]:
    """(--eps-clip, --eps-clip-high): how far below and above 1 the ratio is clipped; the second defaults to the
    first."""
    return options.eps_clip, options.eps_clip if options.eps_clip_high is None else options.eps_clip_high


def importance_report(ratio: Tensor, changed: Tensor) -> dict[str, Tensor]:
    """What is reported of ratios [r], and of where a correction changed them, in slime's names."""
    return {"tis": ratio, "tis_clipfrac": changed.to(ratio.dtype), "tis_abs": (ratio - 1).abs()}


# ---- how one is found

#: kind -> the function that a file of it holds
FUNCTION = {"estimators": "estimate", "losses": "policy_loss", "corrections": "correct", "kl": "kl"}


def find(kind: Kind, name: str, option: str) -> Callable[..., Any]:
    """The function that `name` stands for.

    Raises:
        UsageError: names the option if it stands for nothing; an HpcrlError does so for what a custom one raises.
    """
    if is_path(name):
        return guarded(load_own(option.removeprefix("--").replace("-", "_"), name), f"{option} {name}")
    if name not in algorithm_files(kind):
        raise UsageError(
            f"{option} {name} is unknown", f"known: {', '.join(algorithm_files(kind))}; or module.function"
        )
    return getattr(importlib.import_module(f"hpcrl.algorithms.{kind}.{name}"), FUNCTION[kind])
