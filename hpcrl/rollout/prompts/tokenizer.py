"""The model's tokenizer and the few facts of its config that the data must fit.

Invariants: every token id that this module returns lies within the model's vocabulary; text is encoded without special
tokens added behind our back (the chat template puts them where they belong).  Nothing here imports torch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.errors import DataError, UsageError
from hpcrl.models.files.config_json import CONFIG, read_config, read_object

Messages = list[dict[str, Any]]

#: what a chat template is always given, whatever the flags say
_ALWAYS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"} | {
    f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
}
_IDS_ALONE = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
_PLAIN = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  #: transformers' own tag, which jinja2 does not know


#: bytes of UTF-8 that Unicode's normalization forms make of one at most (NFKC,
#: https://unicode.org/faq/normalization.html); tokens that a tokenizer puts before a text without being told, and some
#: more
EXPANSION, PREFIX = 11, 8


class Tokenizer:
    """A tokenizer that fits its model.

    vocab_size: the model's; context: tokens that its positions reach, or None; eos_ids: every id that ends a response,
    as tokenizer, config.json and generation_config.json have them.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read the tokenizer and config.json in `directory`.

        Raises:
            DataError: if they are missing or do not fit each other.
        """
        self.directory = Path(directory)
        config = read_config(self.directory)
        config = config.get("text_config") or config
        self.vocab_size = config.get("vocab_size")
        if not isinstance(self.vocab_size, int) or self.vocab_size < 1:
            raise DataError(
                f"--hf-checkpoint: {self.directory / CONFIG} has no vocab_size", "name a language model's directory"
            )
        self.context: int | None = config.get("max_position_embeddings")
        self._hf = _load(self.directory)
        self.unknown: int | None = self._hf.unk_token_id
        self.template_kwargs: dict[str, Any] = {}
        self._visible: dict[str, bool] = {}  # character -> whether it has a token
        largest = max(self._hf.get_vocab().values(), default=-1)
        if largest >= self.vocab_size:
            raise DataError(
                f"the tokenizer in {self.directory} does not fit the model: it has token ids up to {largest}, the "
                f"model's vocab_size is {self.vocab_size}",
                "give --hf-checkpoint a directory whose tokenizer and config belong together",
            )
        generation = read_object(self.directory, "generation_config.json") or {}
        self.eos_ids = frozenset(
            _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")) | _ids(self._hf.eos_token_id)
        )

    def need_template(self) -> None:
        """Raise DataError if there is no chat template.

        Raises:
            UsageError: if it does not look at one of the variables that it is `given`.
        """
        if not self._hf.chat_template:
            raise DataError(
                f"--apply-chat-template: the tokenizer in {self.directory} has no chat template",
                "leave the flag out, or add chat_template.jinja there",
            )
        for name in self.template_kwargs:
            if name not in (known := self._variables()):
                raise UsageError(
                    f"--apply-chat-template-kwargs: the chat template in {self.directory} does not use {name!r}",
                    f"it looks at {', '.join(sorted(known)) or 'nothing'}",
                )

    @property
    def template(self) -> str:
        """The text of the chat template, of all of them where there are several; "" if there is none."""
        return "\n".join(self._templates())

    def _templates(self) -> list[str]:
        found = self._hf.chat_template
        return list(found.values()) if isinstance(found, dict) else [found] if found else []

    def _variables(self) -> set[str]:
        """What the chat template looks at besides what it is always given."""
        from jinja2 import Environment, TemplateError, meta

        texts = self._templates()
        try:
            parsed = [Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_PLAIN.sub("", text)) for text in texts]
        except TemplateError as error:
            raise DataError(f"the chat template in {self.directory} cannot be read: {error}") from error
        return {name for tree in parsed for name in meta.find_undeclared_variables(tree)} - _ALWAYS

    def render(self, messages: Messages, generation: bool, tools: Sequence[Any] | None = None) -> str:
        """Chat messages as the model's text; `generation` opens the assistant's turn.

        Args:
            tools: the schemas that it shows.

        Raises:
            ValueError: with the template's own words if it refuses the messages.
        """
        more = {"tools": list(tools)} if tools else {}
        try:
            return self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **more, **self.template_kwargs
            )
        except Exception as error:  # a template is a program of the model's authors: it raises what it likes
            raise ValueError(f"the chat template refuses it: {error}") from error

    def given(self, template_kwargs: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer, its chat template given these variables too (--apply-chat-template-kwargs)."""
        other = copy.copy(self)
        other.template_kwargs = dict(template_kwargs)
        return other

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 token ids of each text, nothing added."""
        if not texts:
            return []
        return [np.asarray(ids, np.int32) for ids in self._hf(list(texts), **_IDS_ALONE)["input_ids"]]

    def surely_within(self, text: str, limit: int | None) -> bool:
        """Whether it is certain without encoding that `text` has a token, and `limit` of them at most.

        A token stands for a byte at least, and a normalizer makes at most EXPANSION bytes of one, of ASCII none more.
        A text is not empty if its first visible character is not.
        """
        first = text.lstrip()[:1]
        most = len(text) if text.isascii() else EXPANSION * len(text.encode(errors="surrogatepass"))
        if not first or (limit is not None and most + PREFIX > limit):
            return False
        if first not in self._visible:
            self._visible[first] = bool(len(self.encode([first])[0]))
        return self._visible[first]

    def decode(self, tokens: np.ndarray, stops: frozenset[int] = frozenset(), skip_special: bool = False) -> str:
        """The text of a response, without the last token if it merely ended the response.

        Args:
            skip_special: nor any special token.
        """
        ids = tokens.tolist()
        if ids and (ids[-1] in self.eos_ids or ids[-1] in stops):
            ids.pop()
        return self._hf.decode(ids, skip_special_tokens=skip_special)

    def decode_text(self, tokens: np.ndarray, skip_special: bool = False) -> str:
        """The text of tokens, those that end a response included."""
        return self._hf.decode(tokens.tolist(), skip_special_tokens=skip_special)

    def spell(self, token: int) -> str:
        """The text of one token, special ones included."""
        return self._hf.decode([token])

    # ---- fine-tuning

    def target(self, messages: Messages | None, prompt: str, label: str, tools: Sequence[Any] | None = None) -> str:
        """The text to learn after `prompt`: what the chat template makes of `label` as the assistant's answer.

        The text ends with the end-of-turn token, if the template sets one; what the template puts behind it (a newline,
        usually) is not part of a response.  Where the template does not begin an answered chat with the text of the
        unanswered one, or without a template (messages None), it is the label itself.
        """
        for text in self.end_texts():
            label = label.removesuffix(text)
        if messages is None:
            return label
        whole = self.render([*messages, {"role": "assistant", "content": label}], False, tools)
        if not whole.startswith(prompt) or label not in whole[len(prompt) :]:
            return label
        answer = whole[len(prompt) :]
        after = answer.rindex(label) + len(label)
        ends = [at + len(eos) for eos in self.end_texts() if (at := answer.find(eos, after)) >= 0]
        return answer[: min(ends)] if ends else answer

    def ended(self, ids: np.ndarray) -> np.ndarray:
        """Token ids with an end-of-sequence token at their end.

        Raises:
            DataError: if the tokenizer has none.
        """
        if len(ids) and int(ids[-1]) in self.eos_ids:
            return ids
        if self._hf.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {self.directory} has no eos_token", "fine-tuning needs one to end a response with"
            )
        return np.concatenate([ids, np.asarray([self._hf.eos_token_id], np.int32)])

    def end_texts(self) -> list[str]:
        """The text of each token that ends a response."""
        return [text for text in self._hf.convert_ids_to_tokens(sorted(self.eos_ids)) if text]


def load_tokenizer(directory: str | None) -> Tokenizer:
    """The tokenizer of --hf-checkpoint. UsageError without one.

    Raises:
        DataError: if it does not fit.
    """
    if directory is None:
        raise UsageError("--hf-checkpoint is not given", "it names the model's directory: config, tokenizer, weights")
    if not Path(directory).is_dir():
        raise DataError(
            f"--hf-checkpoint {directory} is not a directory", "name a Hugging Face model directory on this machine"
        )
    return Tokenizer(directory)


def _load(directory: Path) -> Any:
    """The tokenizer object.  tokenizer.json is read as it lies, without the model classes, which would import torch."""
    if not any(directory.glob("tokenizer*")) and not any(directory.glob("vocab.*")):
        raise DataError(
            f"no usable tokenizer in --hf-checkpoint {directory}: no tokenizer.json there",
            "copy the model's tokenizer files into it",
        )
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        return Loader.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the Rust side raises bare Exceptions
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"no usable tokenizer in --hf-checkpoint {directory}: {text}") from error


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}
