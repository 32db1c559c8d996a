"""Flags of slime's whose value decides what becomes of them: a function each, named in flags.toml.

A reader gets the flag's words and all other flags that were given, and says what to write here instead.

Invariant: pure functions of the words, and of the files that --custom-config-path and --megatron-config-path name; what
a reader cannot translate exactly it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from hpcrl.config.custom_functions import ours
from hpcrl.config.plugin_names import needing_labels, read_words
from hpcrl.config.setting_names import own
from hpcrl.config.slime.conditional_readers import CONDITIONAL, deepep_kind
from hpcrl.config.slime.distillation_readers import DISTILLATION, asking, asks_a_server
from hpcrl.config.slime.flag_reading import FlagReading, Given, number, one
from hpcrl.config.slime.mis_settings import mis_flags, reads_as_mis
from hpcrl.errors import UsageError

#: slime's preset of adapted layers -> the layers' names; it trains one adapter for all experts of a layer
PRESETS = {
    "dense_attention": ("linear_qkv", "linear_proj"),
    "dense_mlp": ("linear_fc1", "linear_fc2"),
    "dense_language": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "moe_attention": ("linear_qkv", "linear_proj"),
}


def use_lora(flag: str, given: Given) -> FlagReading:
    """slime's switch; its defaults of rank, scale and layers are not ours."""
    usual = {"lora-rank": ("64",), "lora-alpha": ("128",)}
    if not given.keys() & {"lora-target-preset", "target-modules"}:
        usual["target-modules"] = PRESETS["dense_language"]
    words = [word for name, value in usual.items() if name not in given for word in (f"--{name}", *value)]
    return FlagReading("translated" if words else "needless", tuple(words), "a rank above 0 turns adapters on")


def lora_preset(flag: str, given: Given) -> FlagReading:
    """A set of layers by its name."""
    name = one(given, flag)
    if name in PRESETS:
        return FlagReading("translated", ("--target-modules", *PRESETS[name]))
    why = "hpcrl's experts have an adapter each, slime's one for all of a layer: name layers with --target-modules"
    return FlagReading("refused", (), why)


def eval_prompt_data(flag: str, given: Given) -> FlagReading:
    """NAME PATH pairs are the same here; slime reads a single path as the set "aime"."""
    words = tuple(given[flag])
    if len(words) != 1:
        return FlagReading("kept", (f"--{flag}", *words))
    return FlagReading(
        "translated", (f"--{flag}", "aime", words[0]), "a path without a name is the set aime, as in slime"
    )


def own_function(flag: str, given: Given) -> FlagReading:
    """A function by its dotted path: slime's own are ours where they are the same (`config/custom_functions.py` says
    which)."""
    path = one(given, flag)
    try:
        mine = ours(path, f"--{flag}")
    except UsageError as error:
        return FlagReading(
            "refused", (), "; ".join(filter(None, [error.what.removeprefix(f"--{flag} {path} "), error.hint]))
        )
    if not mine:
        return FlagReading("needless", (), "hpcrl always does this")
    if flag not in own():
        return FlagReading("refused", (), "hpcrl does not call such a function yet")
    return FlagReading("kept" if mine == path else "translated", (f"--{flag}", mine))


def reward_function(flag: str, given: Given) -> FlagReading:
    """A function of the user's, or one of the two with which slime asks a teacher."""
    if asks_a_server(given):
        return asking(flag, given)
    foreign = one(given, flag).startswith(("slime.", "vime."))
    return own_function(flag, given) if foreign else FlagReading("kept", (f"--{flag}", *given[flag]))


def rollout_function(flag: str, given: Given) -> FlagReading:
    """Supervised fine-tuning and the fully asynchronous loop are functions in slime, and options here."""
    path = one(given, flag)
    tail = path.partition(".")[2]
    if tail == "rollout.sft_rollout.generate_rollout":
        if one(given, "loss-type") == "sft_loss" and "label-key" in given:
            return FlagReading("needless", (), "--loss-type sft_loss learns what the prompt file holds")
        if one(given, "loss-type") == "sft_loss":
            why = (
                "it learns the assistant's turns of chat messages, to the token that ends each; slime also what the "
                "template writes behind that token (Qwen's: a line break)"
            )
            return FlagReading("translated", ("--apply-chat-template",), why)
        return FlagReading("refused", (), "it belongs to --loss-type sft_loss")
    if path.endswith("fully_async_rollout.generate_rollout_fully_async"):  # slime's example is in its own directory
        return FlagReading("translated", ("--loop", "fully-async"), "hpcrl has this function as a loop")
    return own_function(flag, given)


def asynchronous(flag: str, given: Given) -> FlagReading:
    """slime's other program is an option here."""
    return FlagReading("translated", ("--loop", "async"))


def correction(flag: str, given: Given) -> FlagReading:
    """slime's examples of corrections are files of hpcrl/algorithms/corrections/."""
    path = one(given, flag)
    if path != "mis" and reads_as_mis(path):
        return FlagReading("translated", (f"--{flag}", "mis"), "slime's example is a correction of hpcrl's")
    return own_function(flag, given)


def own_settings(flag: str, given: Given) -> FlagReading:
    """Settings of custom functions are read here as in slime; those of its MIS example are options of hpcrl's."""
    path = one(given, flag)
    if correction("custom-tis-function-path", given).words[-1:] != ("mis",) or not path:
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    try:
        found = mis_flags(path, "use-tis" in given)
        if not found:
            return FlagReading("needless", (), "no effect: neither it nor --use-tis turns the correction on")
        return FlagReading("translated", found, "settings of slime's MIS are options of hpcrl's")
    except UsageError as error:
        why = error.what.removeprefix(f"--{flag} {path}: ").replace(f"--{flag} {path}", "it")
        return FlagReading("refused", (), "; ".join([why, error.hint or "name it by its path on this machine"]))


IGNORES_KL_COEF = ("grpo", "gspo", "cispo")  #: estimators of slime's that take nothing off rewards


def kl_in_reward(flag: str, given: Given) -> FlagReading:
    """slime computes this KL for every estimator and forgets it for some; hpcrl takes it off the reward with all of
    them."""
    estimator = one(given, "advantage-estimator", "grpo")
    value = one(given, flag)
    both = number(one(given, "kl-loss-coef", "0"))  # which slime refuses, and so do our rules
    if estimator not in IGNORES_KL_COEF or not number(value) > 0 or both:
        return FlagReading("kept", (f"--{flag}", *given[flag]))
    why = (
        f"slime ignores it with {estimator}; hpcrl's kl_coef would take the KL off the reward: write that into the "
        "recipe if it is meant"
    )
    return FlagReading("needless", (), why)


def _only_taught(given: Given) -> bool:
    """Whether a run has a teacher, and a reward that finds no label to compare with: slime's is 0 for every response
    then."""
    unlabelled = "label-key" not in given and "eval-interval" not in given and "custom-rm-path" not in given
    words = given.get("rm-type", ())
    if (
        "use-opd" not in given
        or not unlabelled
        or len(words) != 1
        or one(given, "advantage-estimator", "grpo") != "grpo"
    ):
        return False
    try:
        return bool(needing_labels(read_words(words[0])))
    except UsageError:
        return False


def reward(flag: str, given: Given) -> FlagReading:
    """A reward that compares with labels is 0 where none are named: with a teacher the run does without it."""
    if asks_a_server(given):
        if "eval-interval" in given:
            why = "it grades held-out responses; the teacher alone says what is learned"
            return FlagReading("kept", (f"--{flag}", *given[flag]), why)
        return FlagReading("needless", (), "slime's function asks the teacher instead: every reward is 0")
    if _only_taught(given):
        why = "without --label-key every reward is 0, and the teacher alone says what is learned"
        if "advantage-estimator" not in given:  # whose reader says so otherwise
            return FlagReading("translated", ("--advantage-estimator", "none"), why)
        return FlagReading("needless", (), why)
    return FlagReading("kept", (f"--{flag}", *given[flag]))


def estimator(flag: str, given: Given) -> FlagReading:
    """Of rewards that are all 0 grpo makes advantages of 0, as none does without them."""
    if asks_a_server(given):
        own = () if "use-opd" in given else ("--use-opd", "--opd-type", "vllm")
        return FlagReading(
            "translated", (f"--{flag}", "none", *own), "only the teacher's signal is learned: no rewards"
        )
    if one(given, flag) == "on_policy_distillation":  # slime's, before it had --use-opd
        why = "it is --use-opd now, with --advantage-estimator none, --opd-type vllm and --opd-teacher-url URL"
        return FlagReading("refused", (), why)
    if _only_taught(given):
        return FlagReading(
            "translated", (f"--{flag}", "none"), "without --label-key every reward, and grpo's advantage, is 0"
        )
    return FlagReading("kept", (f"--{flag}", *given[flag]))


#: --spec of slime's that a family here is built as (`Family.specs`)
SPECS = tuple(
    (f"{plugins}.models.{module}", name)
    for plugins in ("slime_plugins", "vime_plugins")
    for module, name in (
        ("glm4", "get_glm_spec"),
        ("minimax_m2", "get_minimax_m2_layer_spec"),
        ("qwen3_5", "get_qwen3_5_spec"),
        ("qwen3_next", "get_qwen3_next_spec"),
    )
)


def spec(flag: str, given: Given) -> FlagReading:
    """How a model is built: of the plugins' some are families here; `none NAME` stands for a file of arguments that is
    not there."""
    words = tuple(given[flag])
    if words[:1] == ("none",):
        return FlagReading("refused", (), f"{' '.join(words[1:])} belongs to no model family of hpcrl")
    if words and words[0].startswith(("slime_plugins.", "vime_plugins.")) and words not in SPECS:
        return FlagReading("refused", (), "this model belongs to no model family of hpcrl")
    return FlagReading("kept", (f"--{flag}", *words))


def update_mode(flag: str, given: Given) -> FlagReading:
    """Whole tensors, or what has changed of them."""
    if one(given, flag) in ("full", "delta"):
        return FlagReading("needless", (), "every update brings all tensors; the engines hold the same bits")
    return FlagReading("refused", (), "slime has full and delta")


def update_transport(flag: str, given: Given) -> FlagReading:
    """NCCL is what is taken where it can be."""
    name = one(given, flag)
    if one(given, "update-weight-mode") == "delta" and name == "disk":
        return FlagReading("needless", (), "whole tensors go from memory to memory: files of changes are not written")
    if name == "nccl":
        return FlagReading("needless", (), "--weight-transfer auto takes NCCL where there are GPUs")
    return FlagReading("translated", ("--weight-transfer", *given[flag]))


def update_directory(flag: str, given: Given) -> FlagReading:
    """Where whole tensors are written; of what has changed no file is."""
    if one(given, "update-weight-mode") == "delta":
        return FlagReading("needless", (), "whole tensors go from memory to memory: files of changes are not written")
    return FlagReading("kept", ("--update-weight-disk-dir", *given[flag]))


def fault_tolerance(flag: str, given: Given) -> FlagReading:
    """What becomes of a run whose engine ends (docs/runs.md)."""
    if "colocate" in given:
        why = (
            "slime starts a colocated engine again; here its end ends the run, which hpcrl resume RUN continues from "
            "its last checkpoint"
        )
        return FlagReading("needless", (), why)
    return FlagReading("needless", (), "an engine that dies or hangs is started again, up to --attempts - 1 times")


def train_only(flag: str, given: Given) -> FlagReading:
    """Supervised fine-tuning starts no engines anyway."""
    if one(given, "loss-type") == "sft_loss":
        return FlagReading("needless", (), "--loss-type sft_loss asks no engine")
    return FlagReading("kept", (f"--{flag}", *given[flag]))


_BACKENDS = {"fa3": "FLASH_ATTN", "flashinfer": "FLASHINFER", "triton": "TRITON_ATTN", "torch_native": "TORCH_SDPA"}


def attention_backend(flag: str, given: Given) -> FlagReading:
    """sglang's names -> vLLM's."""
    name = one(given, flag)
    if name in _BACKENDS:
        return FlagReading("translated", ("--vllm-attention-backend", _BACKENDS[name]))
    return FlagReading("refused", (), f"of sglang's backends vLLM has {', '.join(_BACKENDS)}")


def expert_parallel(flag: str, given: Given) -> FlagReading:
    """vLLM spreads the experts over all GPUs of an engine, or over none."""
    size = one(given, flag)
    engine = one(given, "rollout-num-gpus-per-engine", "1")
    if size == "1":
        return FlagReading("needless", (), "experts are not spread over GPUs")
    if size == engine:
        return FlagReading(
            "translated", ("--vllm-enable-expert-parallel",), "vLLM spreads experts over all GPUs of the engine"
        )
    return FlagReading(
        "refused", (), f"vLLM spreads experts over all {engine} GPUs of an engine (--rollout-num-gpus-per-engine)"
    )


def data_parallel(flag: str, given: Given) -> FlagReading:
    """sglang's data-parallel attention -> vLLM's."""
    if one(given, flag) == "1":
        return FlagReading("needless", (), "attention is not divided")
    return FlagReading("translated", ("--vllm-data-parallel-size", *given[flag]))


def all_to_all(flag: str, given: Given) -> FlagReading:
    """Which all-to-all the experts of an engine use; with --sglang-deepep-mode, one setting of vLLM's."""
    name = one(given, flag)
    if name == "none":
        return FlagReading("needless", (), "vLLM then chooses it")
    if name != "deepep":
        return FlagReading("refused", (), "vLLM has only deepep of these")
    return FlagReading("translated", ("--vllm-all2all-backend", deepep_kind(given)))


def speculation(flag: str, given: Given) -> FlagReading:
    """sglang's EAGLE without a draft model drafts with the layers after the model's last one, which vLLM
    calls mtp."""
    name = one(given, flag)
    steps = one(given, "sglang-speculative-num-steps")
    if name.upper() not in ("EAGLE", "NEXTN") or "sglang-speculative-draft-model-path" in given:
        return FlagReading(
            "refused", (), "only EAGLE with the model's own layers is translated; use --vllm-speculative-config"
        )
    if not steps.isdecimal():
        return FlagReading(
            "refused", (), "sglang chooses how many tokens are drafted; give --sglang-speculative-num-steps"
        )
    config = {"method": "mtp", "num_speculative_tokens": int(steps)}
    if backend := _BACKENDS.get(one(given, "sglang-speculative-draft-attention-backend")):
        config["attention_backend"] = backend
    return FlagReading("translated", ("--vllm-speculative-config", json.dumps(config)))


def part_of_speculation(flag: str, given: Given) -> FlagReading:
    """See `speculation`; of draft tokens sglang itself takes one more than steps where it drafts a chain."""
    if "sglang-speculative-algorithm" not in given:
        return FlagReading("needless", (), "no effect: --sglang-speculative-algorithm is not given")
    if flag.endswith("-topk") and one(given, flag) != "1":
        return FlagReading("refused", (), "vLLM drafts a chain of tokens, no tree: 1")
    if flag.endswith("-backend") and one(given, flag) not in _BACKENDS:
        return FlagReading("refused", (), f"of sglang's backends vLLM has {', '.join(_BACKENDS)}")
    return FlagReading("needless", (), "it is a part of --vllm-speculative-config")


def deterministic(flag: str, given: Given) -> FlagReading:
    """One switch for both sides here."""
    if "deterministic-mode" in given:
        return FlagReading("needless", (), "--deterministic-mode holds for trainer and engines")
    return FlagReading("refused", (), "use --deterministic-mode, which holds for trainer and engines together")


def offload(flag: str, given: Given) -> FlagReading:
    """Both sides at once."""
    return FlagReading("translated", ("--offload-train", "--offload-rollout"))


READERS: dict[str, Callable[[str, Given], FlagReading]] = {
    reader.__name__: reader
    for reader in (
        all_to_all,
        asynchronous,
        attention_backend,
        correction,
        data_parallel,
        deterministic,
        estimator,
        eval_prompt_data,
        expert_parallel,
        fault_tolerance,
        kl_in_reward,
        lora_preset,
        offload,
        own_function,
        own_settings,
        part_of_speculation,
        reward,
        reward_function,
        rollout_function,
        spec,
        speculation,
        train_only,
        update_directory,
        update_mode,
        update_transport,
        use_lora,
        *CONDITIONAL,
        *DISTILLATION,
    )
}
