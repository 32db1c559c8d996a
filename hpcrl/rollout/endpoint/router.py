"""What functions written for slime or vime take for their router: an engine's own requests, by the key in the path.

    POST /KEY/generate                  as SGLang has it: input_ids or text in; tokens, log-probs and text out
    POST /KEY/inference/v1/generate     as vLLM has it: token_ids in

Invariants: as at the other routes, tokens are sampled as the run samples, and what is not honoured is an error that
names it; a response that the run has ended early is answered as an engine answers an abort, so that its function can
give up.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.rollout.endpoint.session import BadRequest, Session
from hpcrl.rollout.samplers.trajectory import Turn

ENDED = "ended_early"  #: the code of a request whose response is no longer needed
#: fields of a request with the values that ask for nothing else than what is done anyway
_USUAL: dict[str, Callable[[Any], bool]] = {
    "logprob_start_len": lambda value: isinstance(value, int),
    "model": lambda value: True,
    "request_id": lambda value: True,
    "return_logprob": lambda value: isinstance(value, bool),
    "return_text_in_logprobs": lambda value: value is False,
    "rid": lambda value: True,
    "stream": lambda value: value is False,
    "top_logprobs_num": lambda value: value == 0,
}
#: the same of sampling parameters
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "ignore_eos": lambda value: value is False,
    "logprobs": lambda value: True,
    "min_new_tokens": lambda value: value == 0,
    "n": lambda value: value == 1,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "spaces_between_special_tokens": lambda value: isinstance(value, bool),
}
_VLLMS = {"max_tokens": "max_new_tokens", "include_stop_str_in_output": "no_stop_trim"}


async def generate(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """SGLang's answer to a prompt."""
    given = _fields(body, ("input_ids", "text", "sampling_params"))
    if ("text" in given) == ("input_ids" in given):
        raise BadRequest("a request has either input_ids or text")
    tokens = given.get("input_ids")
    if tokens is None:
        if not isinstance(given["text"], str):
            raise BadRequest("text is not one text: ask once for each")
        tokens = session.tokenizer.encode([given["text"]])[0].tolist()
    _check_list(tokens)
    params, shown = _split(given.get("sampling_params"))
    meta = {"id": secrets.token_hex(8), "prompt_tokens": len(tokens), "cached_tokens": 0}
    try:
        turn = await _sample_turn(session, tokens, params)
    except BadRequest as error:
        if error.code != ENDED:
            raise
        meta |= {"completion_tokens": 0, "finish_reason": {"type": "abort", "message": str(error)}}
        return {"text": "", "output_ids": [], "meta_info": meta}
    ids = turn.tokens.tolist()
    reason: dict[str, Any] = {"type": turn.finish}
    reason |= {"matched": ids[-1]} if turn.finish == "stop" else {"length": len(ids)}
    meta |= {"completion_tokens": len(ids), "finish_reason": reason, "weight_version": _version(session, turn)}
    if body.get("return_logprob"):
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(turn.logprobs.tolist(), ids, strict=True)
        ]
    return {"text": _text(session, turn, params, shown), "output_ids": ids, "meta_info": meta}


async def inference(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's answer to token ids."""
    given = _fields(body, ("token_ids", "sampling_params"))
    words = given.get("sampling_params")
    if isinstance(words, dict):
        words = {_VLLMS.get(name, name): value for name, value in words.items()}
    params, _ = _split(words)
    choice: dict[str, Any] = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}
    try:
        turn = await _sample_turn(session, given.get("token_ids"), params)
    except BadRequest as error:
        if error.code != ENDED:
            raise
    else:
        ids = turn.tokens.tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(ids, turn.logprobs.tolist(), strict=True)
        ]
        choice |= {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": turn.finish}
        choice["weight_version"] = _version(session, turn)
    return {"request_id": secrets.token_hex(8), "choices": [choice], "prompt_logprobs": None}


def _check_list(tokens: Any) -> None:
    if not isinstance(tokens, list) or any(isinstance(token, list) for token in tokens):
        raise BadRequest("the prompt is not one list of token ids: ask once for each")


async def _sample_turn(session: Session, tokens: Any, params: Mapping[str, Any]) -> Turn:
    _check_list(tokens)
    return await session.sample_turn(tokens, params, logprobs=True)


def _version(session: Session, turn: Turn) -> str:
    return str(int(turn.versions[-1])) if len(turn.versions) else str(session.making.version)


def _fields(body: Mapping[str, Any], served: tuple[str, ...]) -> dict[str, Any]:
    """The fields that a route honours.

    Raises:
        BadRequest: for what is not served.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in served and not _USUAL.get(name, lambda value: False)(value):
            raise BadRequest(f"{name} is not served: leave it out")
    return {name: given[name] for name in served if name in given}


def _split(words: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters as a session takes them, and those that say how the text is made.

    Raises:
        BadRequest: for one that is not served.
    """
    if not isinstance(words, dict | None):
        raise BadRequest("sampling_params is no object")
    params, shown = {}, {"skip_special_tokens": False, "no_stop_trim": False}
    for name, value in (words or {}).items():
        if name in shown:
            shown[name] = bool(value)
        elif name not in _PLAIN:
            params[name] = value
        elif not _PLAIN[name](value):
            raise BadRequest(f"sampling_params has {name} {value!r}, which is not served: leave it out")
    return params, shown


def _text(session: Session, turn: Turn, params: Mapping[str, Any], shown: Mapping[str, Any]) -> str:
    """A turn's text; `no_stop_trim` leaves what ended it in."""
    tokenizer = session.tokenizer
    if shown["no_stop_trim"]:
        return tokenizer.decode_text(turn.tokens, shown["skip_special_tokens"])
    text = session.text(turn.tokens, shown["skip_special_tokens"])
    stops = params.get("stop") or session.making.sampling.stop
    at = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return text[: min(at)] if at else text
