"""The optimizer steps of one share: old log-probs, forward, backward, step; the same metrics on every rank.

Invariants: the gradient is that of the whole batch's loss, exactly once, whatever the layout; a step that is not finite,
or whose log-probs differ from the engine's by more than the bound, ends the run before it changes a weight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.queue.share_format import Share
from hpcrl.trainer.megatron.model import Policy, inner
from hpcrl.trainer.megatron.optimizer import take_step
from hpcrl.trainer.megatron.packed_attention import boundaries
from hpcrl.trainer.megatron.sparse_logits import only_rows
from hpcrl.trainer.parallel.parallel_state import Ranks
from hpcrl.trainer.step import loss, packing
from hpcrl.trainer.step.packing import Packed

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
#: of --max-logprob-diff, without and with bf16
MAX_LOGPROB_DIFF = (1e-3, 0.1)
NOT_FINITE = "lower --lr, or look at the samples of that step; the last checkpoint is good"


# ---- one share


@dataclass(frozen=True)
class StepTotals:
    """where: its name in errors; samples, tokens: of it over all ranks; comparable: whether trainer and engine must agree."""

    where: str
    samples: int
    tokens: int
    comparable: bool


def train(policy: Policy, ranks: Ranks, options: Options, share: Share) -> dict[str, float]:
    """Take all optimizer steps of `share`; collective.

    Metrics, the same on every rank but for the time: of several steps the mean, of tokens the sum, of a maximum the
    maximum, of the learning rate the last.  HpcrlError, before a weight changes, when the batch does not fit the model;
    and naming rollout and step when loss or gradient is not finite, or when the mean absolute difference of the trainer's
    and the engine's log-probs exceeds --max-logprob-diff.
    """
    begun = time.monotonic()
    packing.check_batch(share.batch, policy.vocab_size)
    split = policy.config.sequence_parallel
    steps = [[packing.pack(share.batch, rows, ranks, split) for rows in step] for step in share.micro_batches]
    _fill_old_logprobs(policy, options, steps)
    found = []
    for number, micro_batches in enumerate(steps):
        step = StepTotals(
            f"rollout {share.rollout_id}, optimizer step {number}",
            share.step_samples[number],
            share.step_tokens[number],
            # the engine never had the weights of a later step, unless their old log-probs were computed beforehand
            comparable=number == 0 or not options.use_rollout_logprobs,
        )
        found.append(_step(policy, ranks, options, micro_batches, step))
    return _over_steps(found) | {"perf/train_time": time.monotonic() - begun}


def _fill_old_logprobs(policy: Policy, options: Options, steps: list[list[Packed]]) -> None:
    """Give each micro-batch the old policy's log-probs, where the training forward's own are not the old ones.

    The first step of a rollout runs with the weights that are the old policy: its own log-probs are the old ones.  Only
    where a second step follows are they computed before, for all samples.
    """
    if options.loss_type != "policy_loss" or (len(steps) == 1 and not options.use_rollout_logprobs):
        return
    for micro_batches in steps:
        old = (
            [p.rollout_logprobs for p in micro_batches]
            if options.use_rollout_logprobs
            else _logprobs(policy, options, micro_batches)
        )
        for packed, values in zip(micro_batches, old, strict=True):
            packed.old_logprobs = values


@torch.no_grad()
def _logprobs(policy: Policy, options: Options, micro_batches: list[Packed]) -> list[torch.Tensor]:
    """Log-probs [r] of each micro-batch under the current weights; zeros on all pipeline stages but the last."""

    def body(packed: Packed, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return _tokens(policy, options, packed, output).logprobs

    found = _run(policy, micro_batches, body, forward_only=True)
    return found if policy.ranks.last_stage else [torch.zeros_like(p.share) for p in micro_batches]


def _step(policy: Policy, ranks: Ranks, options: Options, micro_batches: list[Packed], step: StepTotals) -> dict[str, float]:
    """One optimizer step."""
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    reports = _run(policy, micro_batches, partial(_loss, policy, options), forward_only=False)
    sums = _total(reports, ranks)
    if sums["tokens"] != step.tokens:
        raise HpcrlError(f"{step.where}: the ranks train on {sums['tokens']:.0f} tokens, the batch has {step.tokens}")
    metrics = _metrics(sums, step, options)
    _check(metrics, options, step.where)
    metrics |= {"train/grad_norm": _update(policy, step.where), "train/lr": policy.optimizer.param_groups[0]["lr"]}
    policy.scheduler.step(increment=1)
    return metrics


def _update(policy: Policy, where: str) -> float:
    """The optimizer's step, with the norm of the gradient before clipping; HpcrlError instead if that is not finite.

    Megatron's own step computes the norm too, but goes on whatever it is; its check for NaN sees only what one rank has,
    and ends that rank alone.  All ranks see this norm.
    """
    policy.optimizer.prepare_grads()
    norm = float(policy.optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise HpcrlError(f"{where}: the gradient norm is {norm}", NOT_FINITE)
    if not take_step(policy.optimizer, norm):
        raise HpcrlError(f"{where}: Megatron's optimizer refused the step")
    return norm


def _run(policy: Policy, micro_batches: list[Packed], body: Callable[..., Any], forward_only: bool) -> list[Any]:
    """Megatron's schedule over the micro-batches; what `body` reported of each, on the last pipeline stage."""

    def forward(batches: Iterator[Packed], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)
        with only_rows(inner(model), packed.rows):
            output = model(
                packed.tokens, packed.positions, None, packed_seq_params=boundaries(packed.bounds, packed.ends, packed.longest)
            )
        return output, partial(body, packed)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in policy.chunks],  # each chunk sees every micro-batch, in order
        model=list(policy.chunks),
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.size(1),  # unread: variable_seq_lengths exchanges the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _tokens(policy: Policy, options: Options, packed: Packed, output: torch.Tensor) -> loss.Tokens:
    """What is known of the rows that are trained on, from the model's output [1, r, vocabulary / TP]."""
    group = parallel_state.get_tensor_model_parallel_group() if policy.ranks.tp_size > 1 else None
    return loss.tokens(output[0], packed.labels, loss.Vocabulary(policy.vocab_size, group), options.rollout_temperature)


def _loss(
    policy: Policy, options: Options, packed: Packed, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum, count, report) of one micro-batch, as Megatron's schedules take it with calculate_per_token_loss.

    The scale, exactly: Megatron leaves the sum as it is, adds the gradients of all micro-batches and (DDP then sums, it
    does not average) of all DP and CP ranks, and divides them once by the sum of all counts over micro-batches, DP and
    CP.  So the counts need only add up to the divisor: for a mean over tokens each counts where its row lies; for a mean
    over samples of their own means, `share` holds 1 / the sample's whole mask sum and a sample counts once, on CP rank 0.
    TP ranks compute the same loss, each the gradient of its own columns; only the last pipeline stage has counts at all.
    """
    found = _tokens(policy, options, packed, output)
    per_token = options.calculate_per_token_loss
    weights = torch.ones_like(packed.share) if per_token else packed.share
    if options.loss_type == "sft_loss":
        total, report = loss.sft_loss(found, weights)
    else:
        total, report = loss.policy_loss(found, packed, _clip(options), weights)
    count = len(packed.rows) if per_token else packed.samples * (policy.ranks.cp_rank == 0)
    return total, torch.tensor(count, dtype=torch.int, device=total.device), report


def _clip(options: Options) -> loss.Clip:
    high = options.eps_clip if options.eps_clip_high is None else options.eps_clip_high
    return loss.Clip(options.eps_clip, high, options.eps_clip_c, options.entropy_coef)


# ---- metrics


def _total(reports: list[torch.Tensor], ranks: Ranks) -> dict[str, float]:
    """The reports of all micro-batches of all ranks, summed (the last entry: its maximum); equal on every rank."""
    found = torch.zeros(len(loss.REPORT), dtype=torch.float64, device=ranks.device)
    if reports:
        stacked = torch.stack(reports)
        found = torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].amax(0)])
    sums, peak = found[:-1].clone(), found[-1:].clone()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    found = torch.cat([sums, peak])
    if ranks.pp_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(found, last, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(loss.REPORT, found.tolist(), strict=True))


def _metrics(sums: dict[str, float], step: StepTotals, options: Options) -> dict[str, float]:
    """The metrics of one step from its sums; losses, and what is weighted as they are, over what the loss counts."""
    count = max(step.tokens if options.calculate_per_token_loss else step.samples, 1)
    mean = {name: sums[name] / count for name in ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "greedy")}
    metrics = {"train/loss": mean["loss"], "perf/train_tokens": sums["tokens"]}
    if options.loss_type == "sft_loss":
        return metrics | {"train/token_accuracy": mean["greedy"]}
    metrics |= {f"train/{name}": mean[name] for name in ("pg_loss", "pg_clipfrac", "ppo_kl")}
    metrics["train/entropy_loss"] = mean["entropy"]
    if step.comparable:
        metrics[DIFFERENCE] = sums["difference"] / max(sums["tokens"], 1.0)
        metrics[DIFFERENCE + "_max"] = sums["difference_max"]
    return metrics


def _over_steps(found: list[dict[str, float]]) -> dict[str, float]:
    """One row of metrics for several optimizer steps."""

    def combine(name: str, values: list[float]) -> float:
        if name == "train/lr":
            return values[-1]
        if name == "perf/train_tokens":
            return sum(values)
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: combine(name, [step[name] for step in found if name in step]) for name in found[0]}


def _check(metrics: dict[str, float], options: Options, where: str) -> None:
    """HpcrlError before the optimizer has changed anything."""
    if not math.isfinite(metrics["train/loss"]):
        raise HpcrlError(f"{where}: the loss is {metrics['train/loss']}", NOT_FINITE)
    bound = options.max_logprob_diff or MAX_LOGPROB_DIFF[options.bf16]
    if not metrics.get(DIFFERENCE, 0.0) <= bound:
        raise HpcrlError(
            f"{where}: trainer and engine log-probs differ by {metrics[DIFFERENCE]:.3g} (mean), --max-logprob-diff is {bound:.3g}",
            "find the tensor with --check-weight-update-equal, compare the temperatures, or raise the bound",
        )
