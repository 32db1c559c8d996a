"""What the options of looking, replaying and own functions must say together.

Invariant: a debug switch may be added to any recipe: what it leaves without effect there is no error.
"""

from __future__ import annotations

from hpcrl.config.algorithm_files import find_algorithm_file
from hpcrl.config.options import Options
from hpcrl.errors import UsageError


def check_looking(o: Options) -> None:
    """UsageError for the first thing that excludes another."""
    one_side = [
        f"--{name}"
        for name, given in (
            ("debug-train-only", o.debug_train_only),
            ("load-debug-rollout-data", o.load_debug_rollout_data),
        )
        if given
    ]
    if o.debug_rollout_only and one_side:
        raise UsageError(f"--debug-rollout-only and {one_side[0]} exclude each other", "leave one of them out")
    if o.debug_train_only and o.load_debug_rollout_data is None and not o.learns_labels:
        raise UsageError(
            "--debug-train-only has nothing to train from",
            "give --load-debug-rollout-data, or a loss that learns labels",
        )
    if o.debug_rollout_only and o.learns_labels:
        raise UsageError(f"--debug-rollout-only: --loss-type {o.loss_type} samples nothing", "leave it out")
    if o.load_debug_rollout_data is not None and not o.num_rollout:
        raise UsageError("--load-debug-rollout-data without --num-rollout", "say how many of the files to train from")
    if o.load_debug_rollout_data is not None and o.save_debug_rollout_data is not None:
        raise UsageError(
            "--save-debug-rollout-data would write what --load-debug-rollout-data reads", "leave one of them out"
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
            f"--custom-reward-post-process-path takes the place of what --advantage-estimator {o.advantage_estimator} does to a group's rewards",
            "give --disable-rewards-normalization too",
        )


def _template(flag: str, template: str | None, rollouts: int | None) -> None:
    if template is None:
        return
    try:
        several = template.format(rollout_id=0) != template.format(rollout_id=1)
    except (LookupError, ValueError, AttributeError):
        raise UsageError(
            f"{flag} {template}: only {{rollout_id}} may stand in braces", "such as data/{rollout_id:05d}"
        ) from None
    if not several and rollouts != 1:
        raise UsageError(
            f"{flag} {template} is one file for all rollouts", "write {rollout_id} where their number is to stand"
        )
