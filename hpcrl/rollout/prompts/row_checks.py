"""What a row of a prompt file must hold, and what it says: the prompt, the label, the metadata, the tools.

Invariant: pure functions of a row and the keys; every fault is a DataError that names file and line.  A row that passes
can be rendered, unless the chat template itself refuses it, and be graded, as far as its label is concerned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcrl.config.eval_sets import EvalSet
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import RewardWord, declared, file_of, needs_label, read_words
from hpcrl.config.rules.data import label_key
from hpcrl.errors import DataError
from hpcrl.rollout.prompts.rows import PromptRows, kind_of_json
from hpcrl.sandbox.harbor.rows import METADATA, PROMPT, TaskRows
from hpcrl.utils.untrusted_files import parse_json

Messages = list[dict[str, Any]]
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Keys:
    """Where a row has what, and how long a prompt may be.

    label None: labels are not wanted.

    Attributes:
        label_needed: the reward compares with it (or it is learned).
        rewards: the files of hpcrl's rewards that grade a row whose metadata names none.
        own_types: the metadata's rm_type takes the reward's place.
        learned: the keys of responses that are learned, or, with `conversation`, none of them: then the prompt is a
            whole conversation, whose assistant turns are learned.
        max_prompt, max_context: tokens of a prompt, and of prompt and target together, at most; None: as the model has.
        overrides: take the place of the metadata's.
        flags: what sets the limits, for an error.
    """

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"
    chat_template: bool = False
    label_needed: bool = False
    rewards: tuple[str, ...] = ()
    own_types: bool = True
    learned: tuple[str, ...] = ()
    conversation: bool = False
    max_prompt: int | None = None
    max_context: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    flags: str = "--rollout-max-prompt-len or --rollout-max-context-len"

    @classmethod
    def from_options(cls, options: Options) -> Keys:
        """Those of the training prompts.

        Raises:
            UsageError: if a label is needed and no key is given.
        """
        learns, label = options.learns_labels, label_key(options)
        rewards = () if learns or options.custom_rm_path is not None else files_of(read_words(options.rm_type))
        return cls(
            options.input_key,
            label,
            options.metadata_key,
            options.tool_key,
            options.apply_chat_template,
            label_needed=learns or any(map(needs_label, rewards)),
            rewards=rewards,
            own_types=options.custom_rm_path is None,
            learned=tuple(key for key in (label, options.rejected_key) if key is not None) if learns else (),
            conversation=learns and label is None,
            max_prompt=options.rollout_max_prompt_len,
            max_context=options.rollout_max_context_len,
        )

    @classmethod
    def of_set(cls, held: EvalSet) -> Keys:
        """Those of a held-out set."""
        return cls(
            held.input_key,
            held.label_key,
            held.metadata_key,
            held.tool_key,
            held.apply_chat_template,
            label_needed=held.needs_label,
            rewards=files_of(held.rewards),
            own_types=held.own_types,
            max_prompt=held.max_prompt_len,
            max_context=held.max_context_len,
            overrides=dict(held.metadata_overrides),
            flags="--eval-max-prompt-len or --eval-max-context-len",
        )


def keys_in(rows: PromptRows, keys: Keys) -> Keys:
    """Where these rows have what: tasks have the same keys whatever the options say, which are of other prompt files.

    Raises:
        DataError: if tasks are to be compared with labels, or learned.
    """
    if not isinstance(rows, TaskRows):
        return keys
    if keys.label_needed or keys.learned or keys.conversation:
        raise DataError(
            f"{rows.path} is a folder of tasks, which have no labels",
            "the verifier's verdict is the reward: leave --rm-type out, and learn from other prompt files",
        )
    return replace(keys, input=PROMPT, label=None, metadata=METADATA, tools="tools", rewards=(), own_types=False)


def files_of(words: Sequence[RewardWord]) -> tuple[str, ...]:
    """The files of hpcrl's own among these rewards."""
    return tuple(item.file for item in words if item.file)


@dataclass(frozen=True)
class PromptRow:
    """What a row says.

    Attributes:
        raw: the prompt as the row has it.
        text, messages: one of them is the prompt.
        tools: their schemas.
    """

    raw: Any
    text: str | None
    messages: Messages | None
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    learned: tuple[Any, ...] = ()


def read_row(where: str, row: dict[str, Any], keys: Keys) -> PromptRow:
    """Check a row.

    Args:
        where: its file and line, for the DataError.
    """
    metadata = _metadata(where, row, keys)
    label = _label(where, row, keys, metadata)
    for key in keys.learned[1:]:
        _wanted(where, row, key, "--rejected-key")
    learned = tuple(_value(row, key) for key in keys.learned)
    for key, value in zip(keys.learned, learned, strict=True):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            said = "the label" if key == keys.label else f"the worse response ({key!r})"
            raise DataError(f"{where}: {said} is neither text nor a number but {kind_of_json(value)}")
    raw = _wanted(where, row, keys.input, "--input-key")
    text, messages = _prompt(where, raw, keys)
    tools = _tools(where, row, keys)
    return PromptRow(raw, text, messages, label, metadata, tools, learned)


def _value(row: dict[str, Any], key: str) -> Any:
    """What a row has for a key: of a.b, unless it is a key itself, the key b of the object a."""
    head, dot, rest = key.partition(".")
    if key in row or not dot or not isinstance(row.get(head), dict):
        return row.get(key)
    return _value(row[head], rest)


def _wanted(where: str, row: dict[str, Any], key: str, flag: str) -> Any:
    value = _value(row, key)
    if value is None:
        what = f"{key!r} is null" if key in row else f"no key {key!r}"
        raise DataError(f"{where}: {what}", f"its keys are {', '.join(sorted(row))}; {flag} chooses one")
    return value


def _metadata(where: str, row: dict[str, Any], keys: Keys) -> dict[str, Any]:
    found = row.get(keys.metadata)
    if found is not None and not isinstance(found, dict):
        raise DataError(f"{where}: {keys.metadata!r} is not a JSON object but {kind_of_json(found)}")
    if keys.own_types and found and not isinstance(name := found.get("rm_type"), str | None):
        raise DataError(f"{where}: metadata rm_type is {name!r}, not the name of a reward")
    return found or {}


def _label(where: str, row: dict[str, Any], keys: Keys, metadata: dict[str, Any]) -> Any:
    """The label: text, a number, true or false, a list, an object; null where the row's reward compares with none."""
    own = metadata.get("rm_type") if keys.own_types else None
    file = file_of(own.strip()) if isinstance(own, str) and not keys.learned else None
    label = None if keys.label is None else _value(row, keys.label)
    absent = keys.label is not None and keys.label not in row
    if label is None and (needs_label(file) if file else absent or (keys.label_needed and not keys.conversation)):
        _wanted(where, row, keys.label or "label", "--label-key")
    for name in (file,) if file else keys.rewards:
        _gradable(where, label, name, keys, metadata)
    return label


def _gradable(where: str, label: Any, reward: str, keys: Keys, metadata: dict[str, Any]) -> None:
    """Raise DataError for a row that the reward could not find right, whatever the response."""
    said = declared(reward)
    if any(metadata.get(key) for key in said["METADATA"]):
        return
    if label is None and said["METADATA"]:
        wanted = " or ".join((*(["a label"] if said["LABELS"] else []), *said["METADATA"]))
        raise DataError(f"{where}: the reward {reward} needs {wanted} in the metadata")
    if said["LABELS"] and (fault := label_fault(label, said["LABELS"])):
        hint = "write the answer as text, a number, or a list of right answers"
        if isinstance(label, dict) and label:
            hint = f"name a part of it: --label-key {keys.label}.{min(label, key=lambda key: key != 'ground_truth')}"
        raise DataError(
            f"{where}: the label {keys.label!r} is {fault}: no answer to the reward {reward} is right", hint
        )


def label_fault(label: Any, kinds: Sequence[str]) -> str:
    """Why no answer can match a label, where a reward declares these kinds as its LABELS; "" if one can."""
    if isinstance(label, list) and "list" in kinds:
        faults = (f"a list with {fault}" for item in label if (fault := label_fault(item, kinds)))
        return next(faults, "") if label else "an empty list"
    kind = {str: "words" if "words" in kinds else "text", bool: "truth", int: "number", float: "number"}.get(
        type(label)
    )
    if kind not in kinds:
        return kind_of_json(label)
    if isinstance(label, float) and not math.isfinite(label):
        return f"{label:g}, a missing value"
    if isinstance(label, str) and not label.rpartition("####")[2].strip():
        return "empty text"
    if kind == "words" and not set(re.sub(r"[!-/:-@\[-`{-~]", "", str(label)).lower().split()) - {"a", "an", "the"}:
        return "text without a word"
    if isinstance(label, str) and "json" not in kinds and (found := re.match(r"\s*([\[{])\s*[\"']", label)):
        return f"{'a list' if found[1] == '[' else 'an object'} written as text"
    return ""


def _prompt(where: str, prompt: Any, keys: Keys) -> tuple[str | None, Messages | None]:
    """The prompt as text, or as chat messages where a template is to render them."""
    if isinstance(prompt, list):
        if not prompt:
            raise DataError(f"{where}: the prompt is an empty list")
        messages = [_message(where, message) for message in prompt]
        if not keys.chat_template:
            raise DataError(f"{where}: the prompt is a list of chat messages", "give --apply-chat-template")
        if keys.conversation and messages[-1]["role"] != ASSISTANT:
            raise DataError(
                f"{where}: the conversation ends with a message of {messages[-1]['role']!r}, there is nothing to learn "
                "at its end",
                "end it with the assistant's turn, or name the response with --label-key",
            )
        return None, messages
    if not isinstance(prompt, str):
        raise DataError(f"{where}: the prompt is neither text nor a list of chat messages but {kind_of_json(prompt)}")
    if keys.conversation:
        raise DataError(
            f"{where}: the prompt is text, there is no turn of an assistant to learn", "name the response: --label-key"
        )
    return (None, [{"role": "user", "content": prompt}]) if keys.chat_template else (prompt, None)


def _message(where: str, message: Any) -> dict[str, Any]:
    """A chat message, its content as one text; null stays null next to calls of tools."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where}: a chat message of the prompt is not an object with role and content")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None and message.get("tool_calls"):
        return message | {"content": None}
    if isinstance(content, list):
        return message | {"content": "".join(_part(where, part) for part in content)}
    shown = "null" if content is None else kind_of_json(content)
    raise DataError(
        f"{where}: the content of a chat message is {shown}: role and content as text, or a list of parts, are expected"
    )


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else kind_of_json(part)
    raise DataError(
        f"{where}: a part of a chat message is {kind!r}, only text is read", "leave out images, audio and video"
    )


def _tools(where: str, row: dict[str, Any], keys: Keys) -> list[Any] | None:
    """The schemas of the tools that the template is to show: a list, or one written as JSON text."""
    found = row.get(keys.tools) if keys.chat_template else None
    if isinstance(found, str):
        try:
            found = parse_json(found)
        except ValueError as error:
            raise DataError(f"{where}: {keys.tools!r} is text that is not JSON: {error}") from None
    if found is not None and (not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found)):
        raise DataError(f"{where}: {keys.tools!r} is not a list of objects but {kind_of_json(found)}")
    return found or None
