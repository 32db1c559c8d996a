"""A teacher on a server of SGLang's, as slime asks it: by a reward function, with what post-processes its answers.

    --custom-rm-path examples.on_policy_distillation.on_policy_distillation.reward_func
    --custom-reward-post-process-path ....post_process_rewards  --rm-url http://HOST:PORT/generate

Every reward is 0 then, and the advantage is the teacher's log-prob less the student's.  Here the rollout process asks
the teacher itself (--use-opd --opd-type vllm), and the server at that address has to be vLLM's.

Invariant: these readings hold only where all of it is there; a part of it is what it is anywhere else.
"""

from __future__ import annotations

from hpcrl.config.slime.flag_reading import FlagReading, Given, one

_PACKAGES = ("slime.rollout.on_policy_distillation.", "vime.rollout.on_policy_distillation.")
#: where older releases have them: files of the user's own checkout
_COPIES = ("examples.on_policy_distillation.on_policy_distillation.", "on_policy_distillation.")
_FUNCTIONS = {"custom-rm-path": "reward_func", "custom-reward-post-process-path": "post_process_rewards"}
SERVER = "start vLLM there in place of SGLang"


def asks_a_server(given: Given) -> bool:
    """Whether slime's own functions ask a teacher: --opd-type sglang, or the estimator of older releases."""
    for flag, name in _FUNCTIONS.items():
        if one(given, flag) not in [f"{module}{name}" for module in (*_PACKAGES, *_COPIES)]:
            return False
    estimator = one(given, "advantage-estimator", "grpo")
    older = estimator == "on_policy_distillation" and "use-opd" not in given
    newer = estimator == "grpo" and "use-opd" in given and one(given, "opd-type") == "sglang"
    return bool(one(given, "rm-url")) and (older or newer)


def asking(flag: str, given: Given) -> FlagReading:
    """One of the two functions that ask a teacher, where `asks_a_server`."""
    path = one(given, flag)
    if flag == "custom-rm-path" and "eval-interval" in given and "rm-type" not in given:
        why = "it would grade held-out responses too (--eval-interval): give --rm-type, which grades them here"
        return FlagReading("refused", (), why)
    why = "--opd-type vllm asks the teacher itself"
    if path.startswith(_COPIES):
        why += f"; {path.rpartition('.')[0]} is taken for slime's example and is not read, an edited copy has no effect"
    return FlagReading("needless", (), why)


def address(flag: str, given: Given) -> FlagReading:
    """Where the teacher is, or a reward's server; there is one wherever a teacher is asked, so that it also says what
    replaces an estimator that is not named."""
    if not asks_a_server(given):
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    own = () if "advantage-estimator" in given else ("--advantage-estimator", "none")
    return FlagReading("translated", ("--opd-teacher-url", one(given, flag).removesuffix("/generate"), *own), SERVER)


def teacher(flag: str, given: Given) -> FlagReading:
    """A teacher's server answers as vLLM does."""
    if one(given, flag) != "sglang":
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    if asks_a_server(given):
        return FlagReading("translated", (f"--{flag}", "vllm"), SERVER)
    why = "the teacher's server is vLLM's; give --opd-type vllm and --opd-teacher-url for --rm-url"
    return FlagReading("refused", (), why)


DISTILLATION = (address, teacher)
