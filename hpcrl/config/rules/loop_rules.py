"""What a loop goes together with: pure functions of the resolved options.

Invariant: a run whose loop could not keep its bound on staleness, or could not repeat what --deterministic-mode says
that it repeats, is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.errors import UsageError


def check_loop(o: Options) -> None:
    """UsageError for the first thing that --loop does not go with."""
    if not o.runs_ahead:
        return
    shown = f"--loop {o.loop}"
    if o.colocate:
        raise UsageError(
            f"{shown} and --colocate exclude each other: trainer and engines cannot work at once on the same GPUs",
            "give the engines GPUs of their own with --rollout-num-gpus, or take --loop sync",
        )
    if o.max_staleness is not None and o.max_staleness < o.loop_lag:
        raise UsageError(
            f"--max-staleness {o.max_staleness} is less than the {o.loop_lag} policy versions that {shown} runs ahead "
            "(--update-weights-interval x optimizer steps of a rollout)",
            "raise it, or take --loop sync",
        )
    if o.deterministic_mode and o.loop == "async" and o.update_weights_interval > 1:
        raise UsageError(
            f"--deterministic-mode with --update-weights-interval {o.update_weights_interval}: a run that is stopped between two updates "
            "could not go on with the weights that its engines had",
            "leave one of them out",
        )
    if o.loop == "fully-async":
        _check_fully_async(o)


def _check_fully_async(o: Options) -> None:
    if o.deterministic_mode:
        raise UsageError(
            "--loop fully-async and --deterministic-mode exclude each other: when new weights reach a response depends on the clock",
            "take --loop async, which repeats bit for bit",
        )
    if o.rollout_function_path is not None:
        raise UsageError(
            "--loop fully-async and --rollout-function-path exclude each other: the function makes one rollout at a time",
            "take --loop async",
        )
    if o.keep_old_actor:
        raise UsageError(
            "--loop fully-async and --keep-old-actor exclude each other: a response may have tokens of several policies",
            "take --use-rollout-logprobs, or --use-tis",
        )
    corrected = o.use_tis or o.custom_tis_function_path is not None or o.use_rollout_logprobs
    if o.stale_samples == "train" and not corrected:
        raise UsageError(
            "--stale-samples train without a correction would learn from old samples as if they were new",
            "give --use-tis, --custom-tis-function-path or --use-rollout-logprobs",
        )


def inert_in_loop(o: Options) -> Iterator[tuple[str, str]]:
    """Options without effect in this loop, several in one string -> why."""
    if o.takes_turns:
        yield "engine_restarts", "with --colocate the end of an engine ends the run"
    if o.learns_labels:
        yield (
            "loop update_weights_interval stale_samples max_staleness",
            f"--loss-type {o.loss_type} learns what the prompt file holds",
        )
    if o.only_evaluates:
        yield "loop update_weights_interval stale_samples max_staleness", "--num-rollout 0 trains nothing"
    if o.loop == "sync":
        yield "update_weights_interval stale_samples", "--loop is sync"
        if not o.partial_rollout:
            yield "max_staleness", "--loop is sync, and --partial-rollout is not given"
    elif o.loop == "async":
        yield "stale_samples", "--loop is async: what is sampled ahead is as old as --update-weights-interval says"
    else:
        yield (
            "over_sampling_batch_size partial_rollout mask_offpolicy_in_partial_rollout buffer_filter_path",
            "--loop fully-async issues as many groups as --max-staleness allows, and ends no response to fill a batch",
        )
