"""The optimizer steps of one share: old log-probs, forward, backward, step; the same metrics on every rank.

Invariants: the gradient is that of the whole batch's loss, exactly once, whatever the layout; a step that is not finite,
or whose log-probs differ from the engine's by more than the bound, ends the run before it changes a weight.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from hpcrl.errors import HpcrlError
from hpcrl.options import Options
from hpcrl.queue.wire import Share, decode, encode
from hpcrl.trainer import loss
from hpcrl.trainer.agree import broadcast_bytes
from hpcrl.trainer.megatron import Ranks
from hpcrl.trainer.model import Policy
from hpcrl.trainer.packing import Packed, pack


def spread(share: Share | None, ranks: Ranks) -> Share | None:
    """The share of this data-parallel rank, on all its tensor-, context- and pipeline-parallel ranks; collective.

    share: on the first of them (TP, CP and PP rank 0) what was fetched, None to stop; ignored on the others.
    """
    share = share if ranks.tp_rank == ranks.cp_rank == ranks.pp_rank == 0 else None
    data = b"" if share is None else _join([bytes(frame) for frame in encode(share)])
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        data = broadcast_bytes(data, dist.get_global_rank(group, 0), group)
    return decode(_split(data)) if data else None


def _join(frames: Sequence[bytes]) -> bytes:
    sizes = struct.pack(f"<{len(frames) + 1}Q", len(frames), *(len(f) for f in frames))
    return sizes + b"".join(frames)


def _split(data: bytes) -> list[memoryview]:
    (count,) = struct.unpack_from("<Q", data)
    sizes = struct.unpack_from(f"<{count}Q", data, 8)
    view, at, frames = memoryview(data), 8 + 8 * count, []
    for size in sizes:
        frames.append(view[at : at + size])
        at += size
    return frames


# ---- one share


def train(policy: Policy, ranks: Ranks, options: Options, share: Share) -> dict[str, float]:
    """Take all optimizer steps of `share`; collective.  Metrics of the last step, equal on every rank.

    HpcrlError names rollout and step when loss or gradient is not finite, or when the mean absolute difference of the
    trainer's and the engine's log-probs exceeds --max-logprob-diff.
    """
    begun = time.monotonic()
    steps = [[pack(share.batch, rows, ranks, options.sequence_parallel) for rows in step] for step in share.micro_batches]
    _old_logprobs(policy, options, steps)
    metrics: dict[str, float] = {}
    for number, micro_batches in enumerate(steps):
        where = f"rollout {share.rollout_id}, optimizer step {number}"
        count = share.step_tokens[number] if options.calculate_per_token_loss else share.step_samples[number]
        sampled = number == 0 or not options.use_rollout_logprobs  # else these weights have never sampled anything
        metrics = _step(policy, ranks, options, micro_batches, count, where, sampled)
    return metrics | {"perf/train_time": time.monotonic() - begun}


def _old_logprobs(policy: Policy, options: Options, steps: list[list[Packed]]) -> None:
    """Fill in the old policy's log-probs.

    The first step of a rollout runs with the weights that are the old policy: its own log-probs are the old ones.  Only
    where a second step follows are they computed before, for all samples.
    """
    if options.loss_type != "policy_loss" or (len(steps) == 1 and not options.use_rollout_logprobs):
        return
    for micro_batches in steps:
        found = None if options.use_rollout_logprobs else _forward(policy, options, micro_batches)
        for number, packed in enumerate(micro_batches):
            packed.old_logprobs = packed.rollout_logprobs if found is None else found[number]


@torch.no_grad()
def _forward(policy: Policy, options: Options, micro_batches: list[Packed]) -> list[torch.Tensor]:
    """Log-probs [t] of each micro-batch under the current weights; on all pipeline stages empty but the last."""

    def collect(packed: Packed, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        logits = loss.scaled(output, policy.vocab_size, options.rollout_temperature)
        return loss.token_logprobs(logits, packed.labels)

    found = _run(policy, micro_batches, collect, forward_only=True)
    return found if policy.ranks.last_stage else [torch.zeros_like(p.mask) for p in micro_batches]


def _step(
    policy: Policy, ranks: Ranks, options: Options, micro_batches: list[Packed], count: int, where: str, sampled: bool
) -> dict[str, float]:
    """One optimizer step.  sampled: whether the log-probs can be compared with the engine's."""
    policy.model.zero_grad_buffer()
    policy.optimizer.zero_grad()
    reports = _run(policy, micro_batches, partial(_loss, policy, options), forward_only=False)
    sums = _total(reports, ranks)
    metrics = _metrics(sums, count, options)
    _check(metrics, options, where, sampled)
    ok, norm, _ = policy.optimizer.step()
    if not ok or norm is None or not math.isfinite(float(norm)):
        raise HpcrlError(f"{where}: the gradient norm is {norm}", "lower --lr; the last checkpoint is good")
    metrics |= {"train/grad_norm": float(norm), "train/lr": policy.optimizer.param_groups[0]["lr"]}
    policy.scheduler.step(increment=1)
    return metrics


def _run(policy: Policy, micro_batches: list[Packed], body: Any, forward_only: bool) -> list[Any]:
    """Megatron's schedule over the micro-batches; what `body` reported of each, on the last pipeline stage."""

    def forward(batches: Iterator[Packed], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)
        output = model(packed.tokens, packed.positions, None, packed_seq_params=packed.sequence)
        return output, partial(body, packed)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micro_batches),
        model=policy.model,
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.size(1),  # unread: variable_seq_lengths exchanges the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _loss(
    policy: Policy, options: Options, packed: Packed, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum, count, report) of one micro-batch, as Megatron's schedules take it with calculate_per_token_loss.

    Megatron sums gradients over micro-batches, DP and CP and divides them once by the sum of all counts.  With samples
    counted, each on CP rank 0 only, that is the mean over samples; with tokens counted, each where it lies, over tokens.
    """
    logits = loss.scaled(output, policy.vocab_size, options.rollout_temperature)
    logprobs = loss.token_logprobs(logits, packed.labels)
    weights = packed.mask if options.calculate_per_token_loss else packed.share
    if options.loss_type == "sft_loss":
        total, report = loss.sft_loss(logprobs, packed, weights)
    else:
        with torch.set_grad_enabled(options.entropy_coef > 0):
            entropy = loss.token_entropy(logits)
        total, report = loss.policy_loss(logprobs, entropy, packed, _clip(options), weights)
    count = packed.mask.sum() if options.calculate_per_token_loss else torch.tensor(packed.samples * (policy.ranks.cp_rank == 0))
    return total, count.to(torch.int, copy=False).to(logprobs.device), report


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
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peak = found[-1:].clone()
    dist.all_reduce(found, group=group)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    found[-1:] = peak
    if ranks.pp_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(found, last, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(loss.REPORT, found.tolist(), strict=True))


def _metrics(sums: dict[str, float], count: int, options: Options) -> dict[str, float]:
    per = 1.0 / max(count, 1)
    metrics = {"train/loss": sums["loss"] * per, "perf/train_tokens": sums["tokens"]}
    if options.loss_type == "policy_loss":
        metrics |= {
            "train/pg_loss": sums["pg_loss"] * per,
            "train/pg_clipfrac": sums["pg_clipfrac"] * per,
            "train/ppo_kl": sums["ppo_kl"] * per,
            "train/entropy_loss": sums["entropy"] * per,
            "train/train_rollout_logprob_abs_diff": sums["difference"] / max(sums["tokens"], 1.0),
            "train/train_rollout_logprob_abs_diff_max": sums["difference_max"],
        }
    return metrics


def _check(metrics: dict[str, float], options: Options, where: str, sampled: bool) -> None:
    """HpcrlError before the optimizer has changed anything."""
    if not math.isfinite(metrics["train/loss"]):
        raise HpcrlError(f"{where}: the loss is {metrics['train/loss']}", "lower --lr; the last checkpoint is good")
    bound = options.max_logprob_diff or (0.1 if options.bf16 else 1e-3)
    found = metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
    if sampled and not found <= bound:
        raise HpcrlError(
            f"{where}: trainer and engine log-probs differ by {found:.3g} (mean), --max-logprob-diff is {bound:.3g}",
            "find the tensor with --check-weight-update-equal, or raise the bound",
        )
