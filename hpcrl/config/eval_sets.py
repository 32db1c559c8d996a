"""The held-out sets of a run, each with all of its settings: those of --eval-prompt-data, or of the YAML file
--eval-config.

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 16384}
        - {name: gpqa, path: "gpqa.jsonl@[:100]", rm_type: gpqa}

A set's own setting goes before the defaults', these before an --eval-... flag, and that before what training
has; only the longest prompt is not inherited from training, as in slime.

Invariant: what leaves here can be sampled and graded as far as options can say; an unknown key, and one without effect,
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.custom_settings import read_yaml
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import RewardWord, needing_labels, own_reward, read_words
from hpcrl.config.prompt_words import KINDS, PromptWord, read_word
from hpcrl.config.setting_names import kind_of_field, nearest
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError

FLAG = "--eval-prompt-data"
NAME = re.compile(r"[\w.+-]*[\w.+]")  #: a step follows it in file names, after a '-'


@dataclass(frozen=True)
class EvalSet:
    """One held-out set.

    Attributes:
        rewards: what grades it, in place of nothing else.
        own_types: its prompts' metadata may name another; max_response_len and the other lengths: tokens; top_k -1,
            min_p 0, top_p 1, repetition_penalty 1, min_new_tokens 0: off.
    """

    name: str
    word: PromptWord
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    apply_chat_template: bool
    apply_chat_template_kwargs: Mapping[str, Any]
    metadata_overrides: Mapping[str, Any]
    rewards: tuple[RewardWord, ...]
    own_types: bool
    reward_key: str | None
    n_samples: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_response_len: int
    max_prompt_len: int | None
    max_context_len: int | None
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    skip_special_tokens: bool

    @property
    def needs_label(self) -> bool:
        """Whether a reward of the set compares with the label."""
        return bool(needing_labels(self.rewards))


_OF_A_SET = {"name": Kind("str"), "path": Kind("str")}
#: slime's keys that hpcrl refuses -> why
_NOT_HERE = {
    "spaces_between_special_tokens": "a response is decoded as the tokenizer has it",
    "no_stop_trim": "a stop string stays in the response",
    "multimodal_keys": "only text is read",
    "custom_generate_function_path": "--custom-generate-function-path holds for all sets",
    "app_service": "there is no such service",
    "eval_task_timeout": "--timeout-factor scales the limit of an evaluation, --request-timeout bounds a response",
    "min_eval_samples": "an evaluation is whole or fails",
}
_EARLY = "eval_early_stop_"
#: a setting of a set -> the options that it is inherited from, the first that is set
_INHERITED = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "reward_key": ("eval_reward_key", "reward_key"),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "min_p": (),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "max_prompt_len": ("eval_max_prompt_len",),
    "max_context_len": ("eval_max_context_len", "rollout_max_context_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}
#: a key of a set or of the defaults -> its type and bounds: those of the options that it is inherited from, or its own
_KEYS = {name: kind_of_field(Options.model_fields[options[0]]) for name, options in _INHERITED.items() if options} | {
    "rm_type": Kind("str", many=True, lone=True),
    "custom_rm_path": Kind("str"),
    "metadata_overrides": Kind("object"),
    "repetition_penalty": Kind("float", bounds=">= 0"),
    "top_p": Kind("float", bounds=">= 0 and <= 1"),
    "min_p": Kind("float", bounds=">= 0 and <= 1"),
    "stop": Kind("str", many=True, lone=True),
}
_OFF = {"min_new_tokens": 0, "min_p": 0.0}


def eval_sets(options: Options) -> tuple[EvalSet, ...]:
    """The sets, in order.

    Raises:
        UsageError: names the flag or the file's key at fault; DataError is left to the code that opens a set's file.
    """
    if options.eval_config is not None:
        return tuple(_set(options, own, shown) for shown, own in _of_file(Path(options.eval_config)))
    return tuple(_set(options, own, FLAG) for own in _of_words(options.eval_prompt_data))


def _of_words(words: list[str]) -> Iterator[dict[str, Any]]:
    """{"name", "path"} of each set; a single path is a set that is called as the file."""
    if len(words) == 1:
        words = [Path(read_word(words[0], FLAG).path).stem, words[0]]
    if len(words) % 2:
        raise UsageError(f"{FLAG} takes pairs of NAME PATH, or one path: here are {len(words)} words")
    names = words[::2]
    for name, path in zip(names, words[1::2], strict=True):
        _check_name(name, names, FLAG)
        yield {"name": name, "path": path}


def _check_name(name: str, names: list[str], where: str) -> None:
    if name.endswith(KINDS):
        raise UsageError(f"{where}: {name} is not a name", "write NAME PATH for each file")
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {name!r} cannot be a name", "use letters, digits, '_', '-', '.', '+', and no '-' at the end"
        )
    if names.count(name) > 1:
        raise UsageError(f"{where} gives a name twice: {name}", "each set needs its own name")


# ---- the file


def _of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(how an error calls it, the set's own settings over the defaults)."""
    document = _document(path)
    for key in document:
        if key not in ("defaults", "datasets"):
            raise UsageError(f"{path}: eval.{key} is an unknown key", _like(key, ["defaults", "datasets"]))
    defaults = _table(document.get("defaults") or {}, f"{path}: eval.defaults", _KEYS)
    rows = document.get("datasets")
    if isinstance(rows, dict):
        rows = [{"name": name, **(row if isinstance(row, dict) else {"path": row})} for name, row in rows.items()]
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: eval.datasets is not a list of sets", "each has a name and a path")
    names = [str(row.get("name")) for row in rows if isinstance(row, dict)]
    for number, row in enumerate(rows, 1):
        shown = f"{path}: eval.datasets, set {number}"
        if not isinstance(row, dict):
            raise UsageError(f"{shown} is not a table", "write name: ... and path: ...")
        own = _table(row, shown, _KEYS | _OF_A_SET)
        for key in _OF_A_SET:
            if key not in own:
                raise UsageError(f"{shown} has no {key}", "each set needs a name and a path")
        _check_name(own["name"], names, shown)
        before = dict(defaults)
        if own.keys() & {"rm_type", "custom_rm_path"}:  # one of them takes the place of the other
            before = {key: value for key, value in defaults.items() if key not in ("rm_type", "custom_rm_path")}
        yield f"{path}: {own['name']}", before | own


def _document(path: Path) -> dict[str, Any]:
    found = read_yaml(path, "--eval-config")
    if not isinstance(found, dict) or not isinstance(found.get("eval"), dict):
        raise UsageError(f"--eval-config {path} has no table `eval`", "it holds eval.defaults and eval.datasets")
    for key in found:
        if key != "eval":
            raise UsageError(f"{path}: {key} is an unknown key", "everything belongs in the table `eval`")
    return found["eval"]


def _table(row: Any, shown: str, known: Mapping[str, Kind]) -> dict[str, Any]:
    """The settings of a set or of the defaults, checked; null ones left out."""
    if not isinstance(row, dict):
        raise UsageError(f"{shown} is not a table")
    found = {}
    for key, value in row.items():
        if key not in known:
            why = _NOT_HERE.get(key) or ("there is no such stop" if str(key).startswith(_EARLY) else "")
            raise UsageError(
                f"{shown}: {key} is {'not a setting here' if why else 'an unknown key'}", why or _like(str(key), known)
            )
        if value is None:
            continue
        kind = known[key]
        if not (kind.fits(value) and kind.inside(value)):
            quote = "YAML reads no, off, yes and on as true or false, and digits as a number: put it in quotes"
            hint = quote if kind.fits(str(value)) else ""
            raise UsageError(f"{shown}: {key}: {value!r}: expected {kind}", hint)
        found[key] = value
    if {"rm_type", "custom_rm_path"} <= found.keys():
        raise UsageError(f"{shown}: rm_type and custom_rm_path exclude each other", "leave one of them out")
    return found


def _like(key: str, known: Any) -> str:
    near = nearest(key.replace("_", "-"), [name.replace("_", "-") for name in known])
    return f"did you mean {near.replace('-', '_')}?" if near else f"there are {', '.join(sorted(known))}"


# ---- one set


def _set(options: Options, own: dict[str, Any], shown: str) -> EvalSet:
    """All settings of a set that says `own`.  UsageError calls it as `shown`."""
    values = {name: own[name] if name in own else _inherited(options, name) for name in _INHERITED}
    if values["top_p"] == 0:
        raise UsageError(f"{shown}: top_p 0 leaves nothing to sample", "temperature 0 takes the likeliest token")
    rewards, own_types = _rewards(options, own, shown)
    if (needing := needing_labels(rewards)) and values["label_key"] is None:
        give = "give label_key" if options.eval_config else "give --eval-label-key or --label-key"
        raise UsageError(f"{shown}: the reward {needing[0]} compares with the label", give)
    context = values["max_context_len"]
    prompt = values["max_prompt_len"]
    if context and prompt and prompt >= context:
        raise UsageError(f"{shown}: prompts of {prompt} tokens leave no room for a response in a context of {context}")
    if context and options.rollout_max_context_len and context > options.rollout_max_context_len:
        raise UsageError(
            f"{shown}: a context of {context} tokens is more than the engines' --rollout-max-context-len "
            f"{options.rollout_max_context_len}",
            "raise that one",
        )
    if "rm_type" in own.get("metadata_overrides", {}):
        raise UsageError(f"{shown}: rm_type is in metadata_overrides", "write it next to the set's name")
    stop = values.pop("stop")
    return EvalSet(
        name=own["name"],
        word=_word(own["path"], shown),
        n_samples=values.pop("n_samples_per_eval_prompt"),
        metadata_overrides=own.get("metadata_overrides", {}),
        repetition_penalty=own.get("repetition_penalty", 1.0),
        rewards=rewards,
        own_types=own_types,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(values.pop("stop_token_ids")),
        **values,
    )


def _word(path: str, shown: str) -> PromptWord:
    word = read_word(path, shown)
    if word.weight is not None:
        raise UsageError(f"{shown}: {path} has a weight, but evaluations take none", "leave it out")
    return word


def _inherited(options: Options, name: str) -> Any:
    found = [value for option in _INHERITED[name] if (value := getattr(options, option)) is not None]
    return found[0] if found else _OFF.get(name)


def _rewards(options: Options, own: dict[str, Any], shown: str) -> tuple[tuple[RewardWord, ...], bool]:
    """What grades a set, and whether its prompts' metadata may name another reward."""
    if path := own.get("custom_rm_path"):
        return (own_reward(path),), False
    if "rm_type" in own:
        try:
            return read_words(own["rm_type"]), True
        except UsageError as error:
            raise UsageError(f"{shown}: {error.what.removeprefix('--')}", error.hint) from None
    if options.custom_rm_path:
        return (own_reward(options.custom_rm_path),), False
    if not options.rm_type and options.custom_generate_function_path:
        return (), True  # the function says what its samples are worth
    if not options.rm_type:
        raise UsageError(f"{shown}: no reward is given", "give --rm-type or --custom-rm-path")
    return read_words(options.rm_type), True
