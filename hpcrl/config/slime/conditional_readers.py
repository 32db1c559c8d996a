"""Flags of slime's that mean something with another flag, or by what a file says: readers as in `readers.py`.

Invariant: as there; a flag without effect in slime is needless here, and one whose numbers would differ is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.custom_settings import read_yaml
from hpcrl.config.setting_names import own
from hpcrl.config.slime.flag_reading import FlagReading, Given, number, one
from hpcrl.config.slime.mis_settings import reads_as_mis
from hpcrl.errors import UsageError

ROLES = "--megatron-config-path"
#: setting of slime's critic -> our option
OF_CRITIC = {"lr": "critic-lr", "lr_warmup_iters": "critic-lr-warmup-iters", "load": "critic-load"}


def mismatch_metrics(flag: str, given: Given) -> FlagReading:
    """slime applies the correction that it names to the loss, not only to metrics, with or without --use-tis."""
    path = one(given, "custom-tis-function-path")
    by_file = "custom-config-path" in given and reads_as_mis(path)  # that file says what is corrected
    if not path or "use-tis" in given or by_file:
        return FlagReading("needless", (), "engine and trainer are always compared")
    return FlagReading("translated", ("--use-tis",), f"slime multiplies the loss by {path} with this flag too")


def agreement(flag: str, given: Given) -> FlagReading:
    """A bound of slime's own tests."""
    if "ci-test" not in given:
        return FlagReading("needless", (), "no effect: --ci-test is not given")
    return FlagReading("translated", ("--max-logprob-diff", *given[flag]))


def decay_style(flag: str, given: Given) -> FlagReading:
    """Megatron counts in samples in slime, in steps here: that shows where a formula has no warm-up to divide by."""
    warm = any(number(one(given, name, "0")) > 0 for name in ("lr-warmup-iters", "lr-warmup-fraction"))
    if one(given, flag) != "inverse-square-root" or warm:
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    why = (
        "without warm-up slime's rate falls with the root of the samples that were trained on, hpcrl's with that of "
        "the steps; give --lr-warmup-iters, with which both are alike"
    )
    return FlagReading("refused", (), why)


def engine_tensor_parallel(flag: str, given: Given) -> FlagReading:
    """How many GPUs of an engine share a layer follows from its GPUs and from how else they are divided."""
    engine = number(one(given, "rollout-num-gpus-per-engine", "1"))
    others = [name for name in ("data", "pipeline") if f"vllm-{name}-parallel-size" in given]
    size = number(one(given, flag))
    for name in others:
        size *= number(one(given, f"vllm-{name}-parallel-size"))
    if size == engine:
        return FlagReading("needless", (), "it follows from --rollout-num-gpus-per-engine")
    return FlagReading("refused", (), f"it follows from --rollout-num-gpus-per-engine, {engine:g}: leave it out")


def role_settings(flag: str, given: Given) -> FlagReading:
    """The file in which slime's roles differ: options here, where there are any."""
    path = one(given, flag)
    try:
        words = tuple(_role_words(path, given))
    except UsageError as error:
        why = error.what.removeprefix(f"{ROLES} {path}: ").replace(f"{ROLES} {path}", "it")
        return FlagReading("refused", (), "; ".join(filter(None, [why, error.hint])))
    if not words:
        return FlagReading("needless", (), "it repeats the defaults of the roles")
    return FlagReading("translated", words, "hpcrl has options for what differs between roles")


def _role_words(path: str, given: Given) -> Iterator[str]:
    """The command line that says what the file says.

    Raises:
        UsageError: if it cannot be read, or says something of a role that has no option.
    """
    found = read_yaml(Path(path), ROLES)
    entries = found.get("megatron") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{ROLES} {path}: it has no list named megatron", "slime needs one too")
    for entry in entries:
        role, overrides = entry.get("role"), entry.get("overrides") or {}
        if role not in ("actor", "critic") or not isinstance(overrides, dict):
            raise UsageError(f"{ROLES} {path}: the role {role} is neither actor nor critic, or has no overrides")
        for name, value in overrides.items():
            yield from _setting(role, str(name), value, given)


def _setting(role: str, name: str, value: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    dashed = name.replace("_", "-")
    flag = OF_CRITIC.get(name) if role == "critic" else dashed
    if flag is not None and flag in own() and not isinstance(value, (bool, dict, list)):
        critic = one(given, "advantage-estimator") == "ppo"
        return () if role == "critic" and not critic else (f"--{flag}", str(value))
    said = one(given, dashed)
    if said == str(value) or (said and number(said) == number(str(value))):
        return ()
    raise UsageError(
        f"the {role}'s {name} is {value}, and hpcrl has no such option of one role",
        f"of the critic it has {', '.join(f'--{flag}' for flag in OF_CRITIC.values())}",
    )


def warm_up(flag: str, given: Given) -> FlagReading:
    """slime's Megatron takes the fraction wherever one is given, and does not look at the iterations then."""
    if "lr-warmup-fraction" in given:
        return FlagReading("needless", (), "no effect: --lr-warmup-fraction is given, which slime takes then")
    return FlagReading("kept", (f"--{flag}", *given[flag]))


def dumps(flag: str, given: Given) -> FlagReading:
    """slime writes every rollout into the one file that is named without {rollout_id}, and keeps the last."""
    path = one(given, flag)
    try:
        several = path.format(rollout_id=0) != path.format(rollout_id=1)
    except (LookupError, ValueError, AttributeError):
        several = True  # the option itself refuses it
    if not path or several:
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    stem = path.removesuffix(".pt")
    why = "slime writes each rollout over the one before; here each has a file of its own, and all are kept"
    return FlagReading("translated", (f"--{flag}", f"{stem}_{{rollout_id}}{path[len(stem) :]}"), why)


def old_deepep(flag: str, given: Given) -> FlagReading:
    """Older SGLang's name of its DeepEP, which spread the experts over all GPUs of an engine, as vLLM does."""
    kind = deepep_kind(given)
    return FlagReading("translated", ("--vllm-enable-expert-parallel", "--vllm-all2all-backend", kind))


def deepep_kind(given: Given) -> str:
    """vLLM's name of the kernels that --sglang-deepep-mode asks for."""
    high = one(given, "sglang-deepep-mode") == "normal"
    return "deepep_high_throughput" if high else "deepep_low_latency"


def asks_deepep(given: Given) -> bool:
    """Whether the script's experts exchange rows by DeepEP."""
    return one(given, "sglang-moe-a2a-backend") == "deepep" or "sglang-enable-deepep-moe" in given


def deepep_mode(flag: str, given: Given) -> FlagReading:
    """A part of the all-to-all's name in vLLM."""
    if not asks_deepep(given):
        return FlagReading("refused", (), "it belongs to --sglang-moe-a2a-backend deepep")
    why = "it is a part of --vllm-all2all-backend"
    if one(given, flag) == "auto":
        why += f"; where SGLang changes kernels between prompts and responses, vLLM has {deepep_kind(given)} for both"
    return FlagReading("needless", (), why)


def chunked_prefill(flag: str, given: Given) -> FlagReading:
    """sglang divides the number by the parts of its data-parallel attention; vLLM's is of each part."""
    if asks_deepep(given) and deepep_kind(given) == "deepep_low_latency":
        return FlagReading("needless", (), "vLLM's own number suits its low-latency all-to-all")
    size = number(one(given, flag))
    parts = number(one(given, "sglang-dp-size") or one(given, "sglang-data-parallel-size", "1"))
    mine = (str(int(size // parts)),) if size >= parts > 1 else given[flag]
    return FlagReading("translated", ("--vllm-max-num-batched-tokens", *mine), "vLLM's is of each part of the engine")


def likeliest_share(flag: str, given: Given) -> FlagReading:
    """The same in sampling, and not in training."""
    why = "slime's loss is of the tokens that are left to sample from, hpcrl's of all: below 1 the gradient is another"
    return FlagReading("kept", (f"--{flag}", *given[flag]), why if number(one(given, flag)) < 1 else "")


CONDITIONAL = (agreement, chunked_prefill, decay_style, deepep_mode, dumps, engine_tensor_parallel, likeliest_share)
CONDITIONAL += (mismatch_metrics, old_deepep, role_settings, warm_up)
