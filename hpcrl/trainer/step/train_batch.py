"""The optimizer steps of one share, of the policy and, where there is one, of the critic; the same metrics on every
rank.

Invariants: the gradient is that of the whole batch's loss, exactly once, whatever the layout; a step that is not
finite, or whose log-probs differ from the engine's by more than the bound, ends the run before it changes a weight of
its model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from hpcrl.algorithms.interface import Loss, Report, TokenBatch
from hpcrl.algorithms.loss import (
    DIFFERENCE,
    compute_loss,
    compute_value_loss,
    divides_by_tokens,
    policy_token_weights,
    token_weights,
)
from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import routing
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.run.role import say
from hpcrl.trainer.custom_hooks import TrainerHooks
from hpcrl.trainer.loop_schedule import steps_of
from hpcrl.trainer.megatron import mtp
from hpcrl.trainer.megatron.model import Policy, take_step
from hpcrl.trainer.megatron.output_head import Head
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.trainer.step import further_tokens, packing, passes
from hpcrl.trainer.step.packing import Packed
from hpcrl.trainer.step.prepare import NONE, OtherWeights, prepare
from hpcrl.trainer.step.routing_replay import Difference, given_experts
from hpcrl.trainer.step.sums import Totals, sums_over_samples, total
from hpcrl.transport.share_format import Share, responses_of
from hpcrl.utils.device_copies import to_device

#: of --max-logprob-diff, without and with bf16
MAX_LOGPROB_DIFF = (1e-3, 0.1)
NOT_FINITE = "lower --lr, or look at the samples of that step; the last checkpoint is good"
FURTHER = "lower --mtp-loss-scaling-factor or --lr, or leave out --enable-mtp-training; the last checkpoint is good"


# ---- one share


@dataclass(frozen=True)
class StepTotals:
    """What counts over all ranks in an optimizer step.

    Attributes:
        where: its name in errors.
        samples, tokens: of it over all ranks.
        comparable: whether trainer and engine must agree.
        fresh: bool, on which of the share's response tokens, those of the current policy (None: on all).
        spread: samples a response. The loss is divided by the samples, and its weights multiplied by this: a response
            counts once.
        embedding: the model's, for layers that predict further tokens (`mtp.embedding_of`).
    """

    where: str
    samples: int
    tokens: int
    comparable: bool
    fresh: torch.Tensor | None = None
    spread: float = 1.0
    embedding: torch.Tensor | None = None


def train(
    policy: Policy,
    ranks: Ranks,
    options: Options,
    share: Share,
    others: OtherWeights = NONE,
    record: Callable[[Share, Sequence[Packed]], None] = lambda *_: None,
    hooks: TrainerHooks | None = None,
    version: int | None = None,
) -> dict[str, float]:
    """Take all optimizer steps of `share`; collective.

    Args:
        record: called at the end with the share and its micro-batches.
        version: of the policy; None: that which sampled the share.

    Returns:
        Metrics, the same on every rank except times: of several steps the mean, of tokens the sum, of a maximum the
        maximum, of the learning rate the last.

    Raises:
        HpcrlError: before a weight changes, if the batch does not fit the model, loss or gradient is not finite, or the
            mean difference of log-probs exceeds --max-logprob-diff.
    """
    begun = time.monotonic()
    packing.check_batch(share.batch, policy.vocab_size)
    whose = routing(options)
    replay = None if whose == "own" else Difference.on(ranks.device)
    hooks = hooks or TrainerHooks(options, {})

    def pack(some: Share) -> list[list[Packed]]:
        experts = given_experts(policy, some.batch) if whose == "engine" else None
        args = (ranks, policy.config.sequence_parallel, experts, policy.trains_heads)
        return [[packing.pack(some.batch, rows, *args) for rows in step] for step in some.micro_batches]

    share, steps, before = prepare(policy, options, share, pack, others, hooks)
    prepared = time.monotonic()
    # the policy whose log-probs are compared with the engine's: the one that sampled, where its weights are kept
    compared = share.version if others.old is not None or version is None else version
    fresh = _sampled_under(compared, share, ranks.device)
    found: list[dict[str, float]] = []
    spreads = samples_a_response(share)
    for number, micro_batches in enumerate(steps):
        step = StepTotals(
            f"rollout {share.rollout_id}, optimizer step {number}",
            share.step_samples[number],
            share.step_tokens[number],
            # the engine never had the weights of a later step, unless their old log-probs were computed beforehand
            comparable=share.version == compared and (number == 0 or not options.use_rollout_logprobs),
            fresh=fresh,
            spread=spreads[number],
        )
        row: dict[str, float] = {}
        if policy_steps(options, share):
            hooks.before_step(policy, share.rollout_id, number)
            row |= _step(policy, ranks, options, micro_batches, step, _loss, replay=replay)
        if others.critic is not None:
            name = replace(step, where=f"{step.where} of the critic")
            row |= _step(others.critic, ranks, options, micro_batches, name, _value_loss, "critic-")
        found.append(row)
    untrained = _say_untrained(share, ranks) if found[0] else {}
    record(share, [packed for step in steps for packed in step])
    times = {"perf/train_time": time.monotonic() - begun, "perf/train_preparation_time": prepared - begun}
    changed = {} if replay is None or not policy_steps(options, share) else {"train/routing_changed": replay.share()}
    return before | _over_steps(found) | changed | untrained | times


def _say_untrained(share: Share, ranks: Ranks) -> dict[str, float]:
    """A line for the log and a metric where optimizer steps had no token to train on, on any rank: their gradient is 0,
    and weight decay and momentum alone move the weights, as in slime."""
    empty = [number for number, tokens in enumerate(share.step_tokens) if not tokens]
    if empty and ranks.rank == 0:
        say(
            f"rollout {share.rollout_id}: no token was trained on in optimizer step {', '.join(map(str, empty))}, as "
            "all of its responses are empty or masked; weight decay and momentum alone have moved the weights"
        )
    return {"train/steps_without_tokens": float(len(empty))} if empty else {}


def _sampled_under(version: int, share: Share, device: torch.device) -> torch.Tensor | None:
    """Which tokens of a share were sampled under that policy version, as bool on `device`; None: all."""
    current = share.batch.versions == version
    return None if current.all() else to_device(current, device)


def policy_steps(options: Options, share: Share) -> int:
    """How many optimizer steps of the policy, and so policy versions, training on `share` makes."""
    return len(share.micro_batches) if steps_of(options, share.rollout_id) else 0


def _step(
    model: Policy,
    ranks: Ranks,
    options: Options,
    micro_batches: Sequence[Packed],
    step: StepTotals,
    loss: Callable[..., Any],
    prefix: str = "",
    replay: Difference | None = None,
) -> dict[str, float]:
    """One optimizer step of a model.

    Args:
        prefix: of its metrics' names.
        replay: with the experts that were chosen before.
    """
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    if model.trains_heads:
        step = replace(step, embedding=mtp.embedding_of(model.modules, ranks.pp_size))
    body = partial(loss, model, options, step)
    experts = "own" if replay is None else "replay"
    reports = passes.run(model, micro_batches, body, forward_only=False, experts=experts, difference=replay)
    own = sum(len(packed.rows) for packed in micro_batches)
    totals = total(reports, own, ranks)
    if totals.tokens != step.tokens:
        raise HpcrlError(f"{step.where}: the ranks train on {totals.tokens} tokens, the batch has {step.tokens}")
    metrics = _metrics(totals, options, step)
    metrics |= _update(model, step.where) | {"lr": model.optimizer.param_groups[0]["lr"]}
    model.scheduler.step(increment=1)
    return {"perf/train_tokens": float(totals.tokens)} | {
        f"train/{prefix}{name}": value for name, value in metrics.items()
    }


def _update(policy: Policy, where: str) -> dict[str, float]:
    """The optimizer's step, with norms of the gradient before clipping; HpcrlError instead if one is not finite.

    Megatron's own step computes the norm too, but continues whatever it is; its check for NaN sees only what one rank
    has, and ends that rank alone.  All ranks see this norm.
    """
    policy.optimizer.prepare_grads()
    if policy.trains_heads:
        found = dict(zip(("grad_norm", "mtp_grad_norm"), mtp.norms(policy.optimizer), strict=True))
    else:
        found = {"grad_norm": float(policy.optimizer.get_grad_norm())}
    for name, norm in found.items():
        if not math.isfinite(norm):
            what, fix = ("mtp_grad_norm", FURTHER) if name == "mtp_grad_norm" else ("the gradient norm", NOT_FINITE)
            raise HpcrlError(f"{where}: {what} is {norm}", fix)
    if not take_step(policy.optimizer, *found.values()):
        raise HpcrlError(f"{where}: Megatron's optimizer refused the step")
    return found


def _loss(
    policy: Policy, options: Options, step: StepTotals, packed: Packed, head: Head, _: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """(sum, count, report) of one micro-batch, as Megatron's schedules take it with calculate_per_token_loss.

    The scale, exactly: Megatron leaves the sum as it is, adds the gradients of all micro-batches and (DDP then sums, it
    does not average) of all DP and CP ranks, and divides them once by the sum of all counts over micro-batches, DP and
    CP.  So the counts need only add up to the divisor: for a mean over tokens each counts where its row is; for a
    mean over samples a token's weight depends on the sample's whole mask sum and a sample counts once, on CP rank 0. TP
    ranks compute the same loss, each the gradient of its own columns; only the last pipeline stage has counts at all.
    """
    found = compute_loss(_token_batch(policy, options, step, packed, head), options)
    if packed.further is not None:
        assert step.embedding is not None, "of the last stage"
        weights = counting(token_weights(packed.counts, options), options, step)
        vocabulary = passes.vocabulary_of(policy)
        found = further_tokens.add_loss(found, head, packed.further, step.embedding, weights, vocabulary, options)
    return _counted(policy, options, packed, found)


def counting(weights: torch.Tensor, options: Options, step: StepTotals) -> torch.Tensor:
    """Weights of a loss that is divided by samples, so that it is one by responses."""
    return weights if divides_by_tokens(options) or step.spread == 1 else weights * step.spread


def samples_a_response(share: Share) -> list[float]:
    """Of every optimizer step its samples by its responses."""
    numbers = responses_of(share.table)
    ends = np.cumsum(share.step_samples)
    return [
        count / len(np.unique(numbers[end - count : end])) for count, end in zip(share.step_samples, ends, strict=True)
    ]


def _value_loss(
    critic: Policy, options: Options, step: StepTotals, packed: Packed, head: Head, _: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """The same for a critic."""
    if packed.values is None or packed.returns is None:
        raise UsageError(f"--advantage-estimator {options.advantage_estimator} gives no returns for a critic")
    weights = counting(token_weights(packed.counts, options), options, step)[packed.sample]
    found = compute_value_loss(passes.values_under(head), packed.values, packed.returns, weights, options)
    return _counted(critic, options, packed, found)


def _counted(model: Policy, options: Options, packed: Packed, found: Loss) -> tuple[torch.Tensor, torch.Tensor, Report]:
    count = len(packed.rows) if divides_by_tokens(options) else packed.samples * (model.ranks.cp_rank == 0)
    return found.total, torch.full((), count, dtype=torch.int, device=model.ranks.device), found.report


def _token_batch(policy: Policy, options: Options, step: StepTotals, packed: Packed, head: Head) -> TokenBatch:
    """What a loss sees of a micro-batch."""
    found = passes.tokens_under(policy, options, packed, head)
    own = found.logprobs.detach()
    old = own if packed.old is None else packed.old
    packed.trainer = own if options.use_rollout_logprobs else old
    pg_weights = policy_token_weights(packed.counts, options)
    group = parallel_state.get_context_parallel_group() if policy.ranks.cp_size > 1 else None
    return TokenBatch(
        logprobs=found.logprobs,
        entropy=found.entropy,
        greedy=found.greedy,
        sample=packed.sample,
        samples=packed.samples,
        weights=counting(token_weights(packed.counts, options), options, step)[packed.sample],
        pg_weights=None if pg_weights is None else counting(pg_weights, options, step)[packed.sample],
        old=old,
        trainer=packed.trainer,
        rollout=packed.rollout,
        advantages=packed.advantages,
        reference=packed.reference,
        divergence=found.divergence,
        group=packed.group,
        reward=packed.reward,
        comparable=step.comparable,
        fresh=None if step.fresh is None else step.fresh[packed.source],
        sum_over_sample=lambda values: sums_over_samples(values, packed.sample, packed.samples, group),
    )


# ---- metrics


def _metrics(totals: Totals, options: Options, step: StepTotals) -> dict[str, float]:
    """The metrics of one step; HpcrlError before the optimizer has changed anything if they must not be."""
    metrics = totals.metrics(step.tokens if divides_by_tokens(options) else step.samples)
    for name in ("loss", "value_loss"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise HpcrlError(f"{step.where}: the {name.replace('_', ' ')} is {metrics[name]}", NOT_FINITE)
    bound = _bound(options)
    difference = metrics.get(DIFFERENCE, 0.0)
    if not difference <= bound:
        raise HpcrlError(
            f"{step.where}: trainer and engine log-probs differ by {difference:.3g} (mean), --max-logprob-diff is "
            f"{bound:.3g}",
            "find the tensor with --check-weight-update-equal, compare the temperatures, or raise the bound",
        )
    return metrics


def _bound(options: Options) -> float:
    """How far the log-probs of trainer and engine may differ; in a replay, and with dropout, no bound but a given one.

    The samples of a replay may have been made by other weights than these, and dropout is in no engine: then the
    difference says nothing of the numbers.
    """
    dropout = options.lora_dropout or any(
        options.megatron.get(name) for name in ("attention_dropout", "hidden_dropout")
    )
    if options.max_logprob_diff is None and (dropout or options.load_debug_rollout_data is not None):
        return math.inf
    return options.max_logprob_diff or MAX_LOGPROB_DIFF[options.bf16]


def _over_steps(found: list[dict[str, float]]) -> dict[str, float]:
    """One row of metrics for several optimizer steps."""

    def combine(name: str, values: list[float]) -> float:
        if name.endswith("lr"):
            return values[-1]
        if name == "perf/train_tokens":
            return sum(values)
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    names = dict.fromkeys(name for step in found for name in step)
    return {name: combine(name, [step[name] for step in found if name in step]) for name in names}
