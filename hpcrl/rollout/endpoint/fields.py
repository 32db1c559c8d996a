"""What a request in OpenAI's words may say, and what it gets for log-probs.

Invariants: a field that is not honoured is an error that names it, never ignored; how tokens are sampled is the run's
choice, so that they can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcrl.rollout.endpoint.session import BadRequest, sampling_params
from hpcrl.rollout.engines.sampling import Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.trajectory import Turn

#: fields that a route honours, and of these the ones that bound an answer's tokens, the first that is given
CHAT = ("messages", "tools", "max_completion_tokens", "max_tokens", "stop", "logprobs", "stream", "stream_options")
COMPLETION = ("prompt", "max_tokens", "stop", "logprobs", "stream", "stream_options")
_LENGTHS = ("max_completion_tokens", "max_tokens")
#: fields that say nothing of the answer
_LABELS = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
#: fields with the values that ask for nothing else than what is done anyway
_USUAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "ignore_eos": (False,),
}
_WHY = {
    "n": "n is 1 here: ask several times",
    "top_logprobs": "top_logprobs is not served: there are log-probs of the sampled tokens alone",
    "tool_choice": "tool_choice is not served, but for auto and none: the policy calls a tool or does not",
    "response_format": "response_format is not served, but for text: what the policy says is not constrained",
}


def read_fields(body: Mapping[str, Any], served: tuple[str, ...], sampling: Sampling) -> dict[str, Any]:
    """The max_new_tokens and stop that a request asks for.

    A field that is null counts as left out.

    Args:
        served: of its route.

    Raises:
        BadRequest: for what is not served.
    """
    given = {name: value for name, value in body.items() if value is not None}
    run = sampling_params(sampling)
    for name, value in given.items():
        if name in served or name in _LABELS or any(_equal(value, usual) for usual in _USUAL.get(name, ())):
            continue
        if name in run and name not in ("stop", "stop_token_ids", "max_new_tokens"):
            if not _equal(value, run[name]):
                raise BadRequest(
                    f"{name} {value!r:.80} is not served: the run samples at {run[name]:g}, and tokens that are "
                    "sampled otherwise cannot be trained on; leave it out"
                )
            continue
        raise BadRequest(_WHY.get(name, f"{name} is not served: leave it out"))
    params = {"stop": given["stop"]} if "stop" in given else {}
    length = next((name for name in _LENGTHS if name in served and name in given), "")
    most = given.get(length)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise BadRequest(f"{length} {most!r:.80} is not a number of tokens")
    return params | ({} if most is None else {"max_new_tokens": most})


def streams(body: Mapping[str, Any]) -> bool:
    """Whether a request wants its answer as server-sent events.

    Raises:
        BadRequest: for anything else than true or false, or options without it.
    """
    stream, options = body.get("stream"), body.get("stream_options")
    if not isinstance(stream, bool | None):
        raise BadRequest(f"stream {stream!r:.80} is neither true nor false")
    if options is not None and not stream:
        raise BadRequest("stream_options is for stream true alone: leave it out")
    for name, value in given_object("stream_options", options).items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool | None):
            raise BadRequest(f"stream_options has {name} {value!r}: there is include_usage, true or false")
        if name == "include_obfuscation" and value:
            raise BadRequest("include_obfuscation is not served: leave it out")
    return bool(stream)


def given_object(name: str, value: Any) -> dict[str, Any]:
    """A field that is an object, or left out.

    Raises:
        BadRequest: if it is another thing.
    """
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name} {value!r} is no object")
    return value or {}


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a chat, None for none.

    Raises:
        BadRequest: unless each is a function with a name.
    """
    if not value and isinstance(value, list | None):
        return None
    for tool in value if isinstance(value, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools has {tool!r:.200}: each is of the type function, with a function that has a name")
    return value


def _equal(value: Any, other: Any) -> bool:
    """Equal, and not merely because JSON's true is Python's 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


# ---- log-probs of an answer


def chat_logprobs(body: Mapping[str, Any], tokenizer: Tokenizer, turn: Turn) -> dict[str, Any] | None:
    """What a chat's choice has under logprobs: every sampled token, what ended the turn included; None if not asked
    for."""
    if not body.get("logprobs"):
        return None
    rows = [
        {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
        for text, value in zip(_texts(tokenizer, turn), turn.logprobs.tolist(), strict=True)
    ]
    return {"content": rows, "refusal": None}


def completion_logprobs(body: Mapping[str, Any], tokenizer: Tokenizer, turn: Turn) -> dict[str, Any] | None:
    """What a completion's choice has under logprobs; None if not asked for.

    Raises:
        BadRequest: for others than the sampled tokens'.
    """
    asked = body.get("logprobs")
    if asked is None or asked is False:
        return None
    texts = _texts(tokenizer, turn)
    offsets = [0, *np.cumsum([len(text) for text in texts]).tolist()][: len(texts)]
    return {"tokens": texts, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None, "text_offset": offsets}


def check_logprobs(body: Mapping[str, Any], chat: bool) -> None:
    """Raise BadRequest unless log-probs are asked for as they are served: a switch of a chat, 0 alternatives of a
    completion.
    """
    asked = body.get("logprobs")
    if chat and not isinstance(asked, bool | None):
        raise BadRequest(f"logprobs {asked!r} is neither true nor false")
    if not chat and not (asked is None or asked is False or _equal(asked, 0)):
        raise BadRequest(f"logprobs {asked!r} is not served: 0 gives those of the sampled tokens, there are no others")


def _texts(tokenizer: Tokenizer, turn: Turn) -> list[str]:
    return [tokenizer.spell(token) for token in turn.tokens.tolist()]


def _bytes(text: str) -> list[int] | None:
    """None for a token that is part of a character alone: its text does not say which."""
    return None if "\ufffd" in text else list(text.encode())
