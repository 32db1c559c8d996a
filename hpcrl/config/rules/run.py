"""What a run as a whole goes together with: its length, saves, loop and staleness, weight updates, debug switches and
replays: pure functions of the options of `sections/run.py`.

Invariants: a run whose loop could not keep its bound on staleness, or could not repeat what --deterministic-mode
promises, is refused before anything starts, and so is an update that cannot be.  A debug switch may be added to any
recipe: what it leaves without effect is not an error there.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter

from hpcrl.config.options import Options
from hpcrl.config.passthrough import dashed
from hpcrl.config.plugin_names import find_algorithm_file
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import UsageError
from hpcrl.utils.plain_text import CONTROL


def check_needed(o: Options) -> None:
    """Raise UsageError for a run without model, prompts or length."""
    if o.hf_checkpoint is None:
        raise UsageError("no model given", "give --hf-checkpoint, a Hugging Face directory")
    given = o.prompt_data or o.data_source_path
    if given is None and o.load_debug_rollout_data is None and not o.only_evaluates:
        raise UsageError("no prompts given", "give --prompt-data, a .jsonl or .parquet file")
    if o.num_rollout is None and o.num_epoch is None:
        raise UsageError("no length of the run given", "give --num-rollout or --num-epoch")
    if o.num_rollout == 0 and o.eval_interval is None:
        raise UsageError(
            "--num-rollout 0 without --eval-interval leaves nothing to do", "give --eval-interval to evaluate only"
        )


def check_saving(o: Options) -> None:
    """Raise UsageError for checkpoints to keep that are never saved."""
    kept, each = o.save_retain_interval, o.save_interval
    if kept and each and kept % each:
        raise UsageError(
            f"--save-retain-interval {kept} is not a multiple of --save-interval {each}", "change one of them"
        )


def check_attempts(o: Options) -> None:
    """Raise UsageError for other hosts on which no attempt could begin."""
    if o.spares and o.attempts == 1:
        raise UsageError(
            f"--spares {o.spares} with --attempts 1: no second attempt ever begins", "leave out one of them"
        )


def check_run_dir(template: str, name: str = "") -> None:
    """Raise UsageError unless `template` has no other placeholders than {name} and {time}, and the path can be written
    into scripts and onto terminals."""
    for flag, text in (("--run-dir", template), ("--name", name)):
        if CONTROL.search(text) or not text.isprintable():
            raise UsageError(f"{flag} {text!r} holds a control character", "write it on one line of plain text")
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        parts = [("", "", None)]
    if any(field not in ("name", "time") or form or conversion for field, form, conversion in parts):
        raise UsageError(f"--run-dir {template}: only {{name}} and {{time}} may be in braces")


def check_loop(o: Options) -> None:
    """Raise UsageError for the first thing that --loop does not go with."""
    if not o.runs_ahead:
        return
    shown = f"--loop {o.loop}"
    if o.colocate:
        raise UsageError(
            f"{shown} and --colocate exclude each other: trainer and engines cannot share GPUs at the same time",
            "give the engines separate GPUs with --rollout-num-gpus, or take --loop sync",
        )
    if o.max_staleness is not None and o.max_staleness < o.loop_lag:
        raise UsageError(
            f"--max-staleness {o.max_staleness} is less than the {o.loop_lag} policy versions that {shown} runs ahead "
            "(--update-weights-interval x optimizer steps of a rollout)",
            "raise it, or take --loop sync",
        )
    if o.deterministic_mode and o.loop == "async" and o.update_weights_interval > 1:
        raise UsageError(
            f"--deterministic-mode with --update-weights-interval {o.update_weights_interval}: a run that is stopped "
            "between two updates could not resume with the weights that its engines had",
            "leave one of them out",
        )
    if o.loop == "fully-async":
        _check_fully_async(o)


def _check_fully_async(o: Options) -> None:
    if o.deterministic_mode:
        raise UsageError(
            "--loop fully-async and --deterministic-mode exclude each other: when new weights reach a response depends "
            "on the clock",
            "take --loop async, which repeats bit for bit",
        )
    if o.rollout_function_path is not None:
        raise UsageError(
            "--loop fully-async and --rollout-function-path exclude each other: the function makes one rollout at a "
            "time",
            "take --loop async",
        )
    if o.keep_old_actor:
        raise UsageError(
            "--loop fully-async and --keep-old-actor exclude each other: a response may have tokens of several "
            "policies",
            "take --use-rollout-logprobs, or --use-tis",
        )


def check_weights(o: Options) -> None:
    """Raise UsageError for a way of transfer that an update of this kind cannot take."""
    if o.weight_transfer == "disk" and o.check_weight_update_equal and o.engine_data_parallel_size > 1:
        raise UsageError(
            "--check-weight-update-equal: over --weight-transfer disk the first of an engine's data-parallel parts "
            "alone could be asked",
            "leave one of them out",
        )
    if o.weight_transfer == "ipc" and not o.colocate:
        raise UsageError(
            "--weight-transfer ipc is for engines on the trainer's GPUs, and --colocate is not given",
            "give --colocate, or --weight-transfer auto",
        )


def check_looking(o: Options) -> None:
    """Raise UsageError for the first thing that excludes another."""
    one_side = [f"--{dashed(name)}" for name in ("debug_train_only", "load_debug_rollout_data") if getattr(o, name)]
    if o.debug_rollout_only and one_side:
        raise UsageError(f"--debug-rollout-only and {one_side[0]} exclude each other", "leave one of them out")
    if o.debug_train_only and o.load_debug_rollout_data is None and not o.learns_labels:
        raise UsageError(
            "--debug-train-only needs data",
            "give --load-debug-rollout-data, or a loss that learns labels",
        )
    if o.debug_rollout_only and o.learns_labels:
        raise UsageError(f"--debug-rollout-only: --loss-type {o.loss_type} samples nothing", "leave it out")
    if o.load_debug_rollout_data is not None and not o.num_rollout:
        raise UsageError("--load-debug-rollout-data without --num-rollout", "give the number of files to train on")
    if o.load_debug_rollout_data is not None and o.save_debug_rollout_data is not None:
        raise UsageError(
            "--save-debug-rollout-data would overwrite the files of --load-debug-rollout-data", "leave one of them out"
        )
    _processed_rewards(o)
    for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
        _template("--" + name.replace("_", "-"), getattr(o, name), o.num_rollout)


def _processed_rewards(o: Options) -> None:
    if o.custom_reward_post_process_path is None or o.loss_type != "policy_loss" or o.disable_rewards_normalization:
        return
    declared = find_algorithm_file("estimators", o.advantage_estimator)
    if declared is not None and "disable_rewards_normalization" in declared.options:
        raise UsageError(
            f"--custom-reward-post-process-path takes the place of what --advantage-estimator {o.advantage_estimator} "
            "does to a group's rewards",
            "give --disable-rewards-normalization too",
        )


def _template(flag: str, template: str | None, rollouts: int | None) -> None:
    if template is None:
        return
    try:
        several = template.format(rollout_id=0) != template.format(rollout_id=1)
    except (LookupError, ValueError, AttributeError):
        raise UsageError(
            f"{flag} {template}: only {{rollout_id}} may be in braces", "such as data/{rollout_id:05d}"
        ) from None
    if not several and rollouts != 1:
        raise UsageError(f"{flag} {template} is one file for all rollouts", "write {rollout_id} for their number")


def inert_in_run(o: Options) -> Iterator[tuple[str, str]]:
    """Options of the run without effect, several in one string -> why."""
    yield from _inert_in_loop(o)
    if o.weight_transfer != "disk":
        yield "update_weight_disk_dir custom_update_weight_post_write_path", f"--weight-transfer is {o.weight_transfer}"
    if not o.use_wandb and not o.report_to:
        yield "wandb_project", "no tracker is given"
    if not o.use_wandb and "wandb" not in o.report_to:
        yield "wandb_group wandb_mode", "--use-wandb is not given"
    if not o.eval_config and not any(paths_of(o, name) for name in POINTS):
        yield "live_code code_path", "no function of your own is given"
    if o.attempts == 1:
        yield "oom_retries", "--attempts is 1"
    if o.num_rollout is not None:
        yield "num_epoch", "--num-rollout is given"
    if o.only_evaluates:
        yield "non_persistent_save_interval", "nothing is trained"
    elif o.save_interval and o.non_persistent_save_interval % o.save_interval == 0:
        yield "non_persistent_save_interval", f"--save-interval {o.save_interval} saves each of these steps on disk"
    if o.save_interval is None:
        yield "async_save", "--save-interval is not given, and the last save is waited for"


def _inert_in_loop(o: Options) -> Iterator[tuple[str, str]]:
    """Options without effect in this loop, several in one string -> why."""
    if o.learns_labels:
        yield (
            "loop update_weights_interval max_staleness",
            f"--loss-type {o.loss_type} learns what the prompt file holds",
        )
    if o.only_evaluates:
        yield "loop update_weights_interval max_staleness", "--num-rollout 0 trains nothing"
    if o.loop == "sync":
        yield "update_weights_interval", "--loop is sync"
        if not o.partial_rollout:
            yield "max_staleness", "--loop is sync, and --partial-rollout is not given"
    elif o.loop == "fully-async":
        yield (
            "over_sampling_batch_size partial_rollout mask_offpolicy_in_partial_rollout buffer_filter_path",
            "--loop fully-async issues as many groups as --max-staleness allows, and ends no response to fill a batch",
        )
