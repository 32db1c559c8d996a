"""A teacher on a server of SGLang's, as slime asks it: by a reward function, with what post-processes its answers.

    --custom-rm-path examples.on_policy_distillation.on_policy_distillation.reward_func
    --custom-reward-post-process-path ....post_process_rewards  --rm-url http://HOST:PORT/generate

Every reward is 0 then, and the advantage is the teacher's log-prob less the student's.  Here the rollout process asks
the teacher itself (--use-opd --opd-type vllm), and the server at that address has to be vLLM's.

Invariant: these readings hold only where all of it is there; a part of it is what it is anywhere else.
"""

from __future__ import annotations

from hpcrl.slime.flag_reading import FlagReading, Given, one

_MODULES = tuple(
    f"{start}on_policy_distillation."
    for start in ("slime.rollout.", "vime.rollout.", "examples.on_policy_distillation.", "")
)
SERVER = "start vLLM there in place of SGLang"


def asks_a_server(given: Given) -> bool:
    """Whether slime's own functions ask a teacher: --opd-type sglang, or the estimator of older releases."""
    functions = {"custom-rm-path": "reward_func", "custom-reward-post-process-path": "post_process_rewards"}
    for flag, name in functions.items():
        if one(given, flag) not in [f"{module}{name}" for module in _MODULES]:
            return False
    estimator = one(given, "advantage-estimator", "grpo")
    older = estimator == "on_policy_distillation" and "use-opd" not in given
    newer = estimator == "grpo" and "use-opd" in given and one(given, "opd-type") == "sglang"
    return bool(one(given, "rm-url")) and (older or newer)


def address(flag: str, given: Given) -> FlagReading:
    """Where the teacher is, or a reward's server."""
    if not asks_a_server(given):
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    return FlagReading("translated", ("--opd-teacher-url", one(given, flag).removesuffix("/generate")), SERVER)


def teacher(flag: str, given: Given) -> FlagReading:
    """A teacher's server answers as vLLM does."""
    if one(given, flag) != "sglang":
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    if asks_a_server(given):
        return FlagReading("translated", (f"--{flag}", "vllm"), SERVER)
    why = "the teacher's server is vLLM's; give --opd-type vllm and --opd-teacher-url for --rm-url"
    return FlagReading("refused", (), why)


DISTILLATION = (address, teacher)
