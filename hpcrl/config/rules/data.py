"""What prompts, their labels, rewards and held-out sets go together with: pure functions of the options of
`sections/data.py`.

Invariant: a run whose responses could not be graded, or whose labels are missing, is refused before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.passthrough import flag
from hpcrl.config.plugin_names import check_key, needing_labels, read_words
from hpcrl.config.prompt_words import read_words as read_prompt_words
from hpcrl.errors import UsageError


def check_prompts(o: Options) -> None:
    """Raise UsageError for labels that are needed and not named, and for a word of --prompt-data that cannot be
    read.
    """
    if o.load_debug_rollout_data is None and not o.only_evaluates:
        label_key(o)
    read_prompt_words(o.prompt_data, "--prompt-data")


def check_rewards(o: Options) -> None:
    """Raise UsageError where responses are graded and nothing says how, or two things do."""
    if not o.needs_engines:
        return
    unread = o.advantage_estimator == "none" and o.eval_interval is None  # a teacher says what is learned
    own = (
        o.learns_labels or o.only_evaluates or o.custom_generate_function_path
    )  # a held-out set, or the function, says the reward
    if not o.grades and not unread and not own:
        raise UsageError("no reward given", "give --rm-type or --custom-rm-path")
    if o.rm_type and o.custom_rm_path:
        raise UsageError("--rm-type and --custom-rm-path exclude each other", "leave one of them out")
    words = read_words(o.rm_type)
    if o.group_rm and o.advantage_estimator == "remax":
        raise UsageError(
            "--group-rm grades the responses to a prompt together, remax's greedy one alone", "leave one of them out"
        )
    if any(item.file == "remote_rm" for item in words) and o.rm_url is None:
        raise UsageError("--rm-type remote_rm needs the server's address", "give --rm-url")
    if o.rm_url is not None and not o.rm_url.startswith(("http://", "https://")):
        raise UsageError(f"--rm-url {o.rm_url} is not an address", "it begins with http:// or https://")
    for name in ("reward_key", "eval_reward_key"):
        if (key := getattr(o, name)) is not None and words:
            check_key(words, key, flag(name))


def check_evaluation(o: Options) -> None:
    """Raise UsageError for held-out sets that are missing, named twice or cannot be read."""
    if o.eval_config is not None and o.eval_prompt_data:
        raise UsageError("--eval-config and --eval-prompt-data both name the held-out sets", "leave one of them out")
    if o.eval_interval is not None and o.eval_config is None and not o.eval_prompt_data:
        raise UsageError(
            "--eval-interval needs held-out prompts", "give --eval-prompt-data NAME PATH, or --eval-config"
        )
    # a file that `prepare` is yet to write is read when it is there
    if o.eval_interval is not None and (o.eval_config is None or os.path.isfile(o.eval_config)):
        eval_sets(o)


def label_key(o: Options) -> str | None:
    """The key of the label in the training prompts; None where no label is wanted.

    Raises:
        UsageError: if the loss or the reward needs one and no key is given.
    """
    if o.label_key is not None:
        return o.label_key
    if o.loss_type == "dpo_loss" and o.learns_labels:
        raise UsageError(f"--loss-type {o.loss_type} needs a label to learn", "give --label-key")
    if o.learns_labels and not o.apply_chat_template:
        raise UsageError(
            f"--loss-type {o.loss_type} without --label-key learns the assistant's turns of chat messages",
            "give --label-key, or --apply-chat-template",
        )
    comparing = [] if o.custom_rm_path or o.learns_labels else needing_labels(read_words(o.rm_type))
    if comparing:
        raise UsageError(f"--rm-type {comparing[0]} compares with the label", "give --label-key")
    return None


def inert_in_data(o: Options) -> Iterator[tuple[str, str]]:
    """Options of data, rewards and held-out sets without effect, several in one string -> why."""
    if o.loss_type != "dpo_loss":
        yield "rejected_key", f"--loss-type is {o.loss_type}"
    if not o.apply_chat_template:
        yield "apply_chat_template_kwargs tool_key eval_tool_key", "--apply-chat-template is not given"
    if o.custom_rm_path is None:
        yield "group_rm", "--custom-rm-path is not given"
    if o.eval_interval is None:
        yield (
            "eval_prompt_data eval_config eval_input_key eval_label_key eval_tool_key eval_reward_key "
            "n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_max_response_len "
            "eval_max_prompt_len eval_max_context_len eval_min_new_tokens skip_eval_before_train log_passrate "
            "custom_eval_rollout_log_function_path eval_function_path",
            "--eval-interval is not given",
        )
    if o.data_source_path is not None:
        yield "rollout_shuffle", "--data-source-path orders its prompts itself"
    if o.only_evaluates:
        yield "data_source_path", "--num-rollout 0 trains nothing"
    if o.load_debug_rollout_data is not None:
        yield "data_source_path", "--load-debug-rollout-data has the samples"
    if not o.rollout_shuffle and not o.needs_engines:
        yield "rollout_seed", "--rollout-shuffle is not given, and nothing is sampled"
