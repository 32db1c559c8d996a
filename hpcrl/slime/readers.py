"""Flags of slime's whose value decides what becomes of them: a function each, named in flags.toml.

A reader gets the flag's words and all other flags that were given, and says what to write here instead.

Invariant: pure functions of the words; what a reader cannot translate exactly it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.config.dotted_path import ours
from hpcrl.config.setting_names import own
from hpcrl.errors import UsageError

Given = Mapping[str, Sequence[str]]  #: flag, without dashes in front -> the words after it


@dataclass(frozen=True)
class Reading:
    """What becomes of one flag.  words: the command line that says the same here, () if nothing needs to be said."""

    outcome: Literal["kept", "translated", "needless", "refused"]
    words: tuple[str, ...] = ()
    why: str = ""


def one(given: Given, flag: str, default: str = "") -> str:
    """The one word after a flag."""
    words = given.get(flag, ())
    return words[0] if len(words) == 1 else default


def eval_prompt_data(flag: str, given: Given) -> Reading:
    """NAME PATH pairs are the same here; slime reads a single path as the set "aime"."""
    words = tuple(given[flag])
    if len(words) != 1:
        return Reading("kept", (f"--{flag}", *words))
    return Reading("translated", (f"--{flag}", "aime", words[0]), "a path without a name is the set aime, as in slime")


def own_function(flag: str, given: Given) -> Reading:
    """A function by its dotted path: slime's own are ours where they are the same (`config/dotted_path.py` says which)."""
    path = one(given, flag)
    try:
        mine = ours(path, f"--{flag}")
    except UsageError as error:
        return Reading("refused", (), "; ".join(filter(None, [error.what.removeprefix(f"--{flag} {path} "), error.hint])))
    if not mine:
        return Reading("needless", (), "it is what is done anyway")
    if flag not in own():
        return Reading("refused", (), "there is no place for such a function yet")
    return Reading("kept" if mine == path else "translated", (f"--{flag}", mine))


def rollout_function(flag: str, given: Given) -> Reading:
    """Supervised fine-tuning and the fully asynchronous loop are functions in slime, and options here."""
    path = one(given, flag)
    tail = path.partition(".")[2]
    if tail == "rollout.sft_rollout.generate_rollout":
        if one(given, "loss-type") == "sft_loss" and "label-key" in given:
            return Reading("needless", (), "--loss-type sft_loss learns what the prompt file holds")
        if one(given, "loss-type") == "sft_loss":
            return Reading("translated", ("--apply-chat-template",), "it learns the assistant's turns of chat messages")
        return Reading("refused", (), "it belongs to --loss-type sft_loss")
    if path.endswith("fully_async_rollout.generate_rollout_fully_async"):  # slime's example lies in a directory of its own
        return Reading("translated", ("--loop", "fully-async"), "that function is a loop here")
    return own_function(flag, given)


def asynchronous(flag: str, given: Given) -> Reading:
    """slime's other program is an option here."""
    return Reading("translated", ("--loop", "async"))


def correction(flag: str, given: Given) -> Reading:
    """slime's examples of corrections are files of hpcrl/algorithms/corrections/."""
    path = one(given, flag)
    if path.startswith("examples.") and path.rpartition(".")[2] in ("compute_mis_weights", "compute_mis_weights_with_cp"):
        return Reading("translated", (f"--{flag}", "mis"), "slime's example is a correction of hpcrl's")
    return own_function(flag, given)


def train_only(flag: str, given: Given) -> Reading:
    """Supervised fine-tuning starts no engines anyway."""
    if one(given, "loss-type") == "sft_loss":
        return Reading("needless", (), "--loss-type sft_loss asks no engine")
    return Reading("kept", (f"--{flag}", *given[flag]))


_BACKENDS = {"fa3": "FLASH_ATTN", "flashinfer": "FLASHINFER", "triton": "TRITON_ATTN", "torch_native": "TORCH_SDPA"}


def attention_backend(flag: str, given: Given) -> Reading:
    """sglang's names -> vLLM's."""
    name = one(given, flag)
    if name in _BACKENDS:
        return Reading("translated", ("--vllm-attention-backend", _BACKENDS[name]))
    return Reading("refused", (), f"of sglang's backends vLLM has {', '.join(_BACKENDS)}")


def expert_parallel(flag: str, given: Given) -> Reading:
    """vLLM spreads the experts over all GPUs of an engine, or over none."""
    size, engine = one(given, flag), one(given, "rollout-num-gpus-per-engine", "1")
    if size == "1":
        return Reading("needless", (), "experts are not spread over GPUs")
    if size == engine:
        return Reading("translated", ("--vllm-enable-expert-parallel",), "vLLM spreads them over all GPUs of the engine")
    return Reading("refused", (), f"vLLM spreads experts over all {engine} GPUs of an engine (--rollout-num-gpus-per-engine)")


def data_parallel(flag: str, given: Given) -> Reading:
    """sglang's data-parallel attention -> vLLM's."""
    if one(given, flag) == "1":
        return Reading("needless", (), "attention is not divided")
    return Reading("translated", ("--vllm-data-parallel-size", *given[flag]))


def all_to_all(flag: str, given: Given) -> Reading:
    """Which all-to-all the experts of an engine use; with --sglang-deepep-mode, one setting of vLLM's."""
    name = one(given, flag)
    if name == "none":
        return Reading("needless", (), "it is vLLM's own choice then")
    if name != "deepep":
        return Reading("refused", (), "deepep is the one that vLLM has too")
    kind = "deepep_low_latency" if one(given, "sglang-deepep-mode") == "low_latency" else "deepep_high_throughput"
    return Reading("translated", ("--vllm-all2all-backend", kind))


def deepep_mode(flag: str, given: Given) -> Reading:
    """See `all_to_all`."""
    if one(given, "sglang-moe-a2a-backend") == "deepep":
        return Reading("needless", (), "it is a part of --vllm-all2all-backend")
    return Reading("refused", (), "it belongs to --sglang-moe-a2a-backend deepep")


def deterministic(flag: str, given: Given) -> Reading:
    """One switch for both sides here."""
    if "deterministic-mode" in given:
        return Reading("needless", (), "--deterministic-mode holds for trainer and engines")
    return Reading("refused", (), "use --deterministic-mode, which holds for trainer and engines together")


def offload(flag: str, given: Given) -> Reading:
    """Both sides at once."""
    return Reading("translated", ("--offload-train", "--offload-rollout"))


READERS: dict[str, Callable[[str, Given], Reading]] = {
    reader.__name__: reader
    for reader in (
        all_to_all,
        asynchronous,
        attention_backend,
        correction,
        data_parallel,
        deepep_mode,
        deterministic,
        eval_prompt_data,
        expert_parallel,
        offload,
        own_function,
        rollout_function,
        train_only,
    )
}
