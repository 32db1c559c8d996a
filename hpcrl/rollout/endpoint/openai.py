"""OpenAI's routes: chats and completions, answered whole or as server-sent events, and the one model.

Invariants: an answer that is streamed says the same as one that is not; a turn is there before its first event is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from hpcrl.rollout.endpoint.requests import ChatBody, CompletionBody, OpenAIRequest, check_sampling, read
from hpcrl.rollout.endpoint.session import BadRequest, Session
from hpcrl.rollout.endpoint.turns import MODEL, ChatRequest, complete, say
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.trajectory import Turn

DONE = b"data: [DONE]\n\n"
_CHUNK = "chat.completion.chunk"


async def models(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """The one model."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "hpcrl"}]}


def _params(session: Session, asked: OpenAIRequest, most: int | None) -> dict[str, Any]:
    """The max_new_tokens and stop that a request asks for.

    Raises:
        BadRequest: for another sampling than the run's, or options of a stream without `stream`.
    """
    check_sampling(asked, session.making.sampling)
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options is for stream true alone: leave it out")
    params: dict[str, Any] = {} if asked.stop is None else {"stop": asked.stop}
    return params if most is None else params | {"max_new_tokens": most}


def _read_chat(session: Session, body: Mapping[str, Any]) -> ChatRequest:
    """A request for the next message of a chat.

    Raises:
        BadRequest: names the field that is not as it should be.
    """
    asked = read(body, ChatBody)
    if asked.parallel_tool_calls is False:
        raise BadRequest("parallel_tool_calls false is not served: leave it out")
    params = _params(session, asked, asked.max_completion_tokens or asked.max_tokens)
    tools = body["tools"] if asked.tools else None
    return ChatRequest(asked.messages, tools, params, bool(asked.logprobs), asked.tool_choice != "none")


async def chat(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat."""
    said = await say(session, _read_chat(session, body))
    logprobs = _chat_logprobs(body, session.tokenizer, said.turn)
    reason = "tool_calls" if said.message.get("tool_calls") else said.finish
    choice = {"index": 0, "message": said.message, "finish_reason": reason, "logprobs": logprobs}
    return _answer("chat.completion", choice, said.before, said.turn)


async def completion(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a prompt of text or tokens."""
    asked = read(body, CompletionBody)
    prompt: Any = asked.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("prompt is neither one text nor one list of token ids")
    if isinstance(prompt, list) and (bad := [token for token in prompt if type(token) is not int]):
        raise BadRequest(f"prompt is neither one text nor one list of token ids: it has {bad[0]!r:.80}")
    wanted = asked.logprobs is not None
    text, before, turn = await complete(session, prompt, _params(session, asked, asked.max_tokens), wanted)
    logprobs = _completion_logprobs(session.tokenizer, turn) if wanted else None
    choice = {"index": 0, "text": text, "finish_reason": turn.finish, "logprobs": logprobs}
    return _answer("text_completion", choice, before, turn)


def _answer(kind: str, choice: dict[str, Any], prompt: int, turn: Turn) -> dict[str, Any]:
    said = len(turn.tokens)
    return {
        "id": f"{MODEL}-{secrets.token_hex(8)}",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said},
    }


# ---- log-probs of an answer


def _chat_logprobs(body: Mapping[str, Any], tokenizer: Tokenizer, turn: Turn) -> dict[str, Any] | None:
    """What a chat's choice has under logprobs: every sampled token, what ended the turn included; None if not asked
    for."""
    if not body.get("logprobs"):
        return None
    rows = [
        # the text of a token that is part of a character alone does not say which bytes it has
        {"token": text, "logprob": v, "bytes": None if "\ufffd" in text else [*text.encode()], "top_logprobs": []}
        for text, v in zip(_texts(tokenizer, turn), turn.logprobs.tolist(), strict=True)
    ]
    return {"content": rows, "refusal": None}


def _completion_logprobs(tokenizer: Tokenizer, turn: Turn) -> dict[str, Any]:
    """What a completion's choice has under logprobs."""
    texts = _texts(tokenizer, turn)
    offsets = [0, *np.cumsum([len(text) for text in texts]).tolist()][: len(texts)]
    return {"tokens": texts, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None, "text_offset": offsets}


def _texts(tokenizer: Tokenizer, turn: Turn) -> list[str]:
    return [tokenizer.spell(token) for token in turn.tokens.tolist()]


# ---- as server-sent events


def chat_events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of a chat's answer."""
    [choice] = answer["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"] or choice["logprobs"]:
        deltas.append({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opened = {"index": index} | call | {"function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [opened]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    parts = [{"delta": delta, "logprobs": choice["logprobs"] if n == 1 else None} for n, delta in enumerate(deltas)]
    return _events(answer, body, _CHUNK, [*parts, {"delta": {}, "logprobs": None}], choice["finish_reason"])


def completion_events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of a completion's answer."""
    [choice] = answer["choices"]
    parts = [{name: choice[name] for name in ("text", "logprobs")}, {"text": "", "logprobs": None}]
    return _events(answer, body, answer["object"], parts, choice["finish_reason"])


def _events(
    answer: Mapping[str, Any], body: Mapping[str, Any], kind: str, parts: list[dict[str, Any]], finish: str
) -> Iterator[bytes]:
    """An event for each part of the one choice, the last with the reason of its end; the usage, if it was requested."""
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": kind}
    head |= {"usage": None} if usage else {}
    for number, part in enumerate(parts):
        reason = finish if number == len(parts) - 1 else None
        yield event(head | {"choices": [{"index": 0} | part | {"finish_reason": reason}]})
    if usage:
        yield event(head | {"choices": [], "usage": answer["usage"]})
    yield DONE


def event(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def failure(status: int, message: str, code: str) -> dict[str, Any]:
    """An error as OpenAI's servers say it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code}}
