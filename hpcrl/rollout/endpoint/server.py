"""The HTTP server of the rollout process through which custom functions and agents ask the policy.

    POST /v1/chat/completions, /v1/completions   as OpenAI has them, as far as `read_fields` says
    POST /v1/tokens                              {"tokens": [...], "sampling_params": {...}}: exact tokens,
                                                 log-probs, versions
    GET  /v1/models                              the one model
    POST /KEY/...                                the same, and what functions of slime's ask (`router.py`)

Invariants: every request brings the key of a response that is being made, which opens nothing else and ends with it; it
listens on the rollout's address of the plan alone, on a port that the system chose; bodies are bounded, every wait has
a deadline, and who brings no key costs little (`connections.py`).  A field that is not honoured is an error that names
it, never ignored; how tokens are sampled is the run's choice, so that they can be trained on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from hpcrl.errors import HpcrlError
from hpcrl.rollout.endpoint import chat, router
from hpcrl.rollout.endpoint.chat import Dialogue
from hpcrl.rollout.endpoint.connections import Connection, Connections
from hpcrl.rollout.endpoint.session import DIALOGUES, BadRequest, Session, sampling_params
from hpcrl.rollout.engines.sampling import Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.trajectory import LENGTH, Trajectory, Turn

#: fields that a route honours, and of these the ones that bound an answer's tokens, the first that is given
CHAT = ("messages", "tools", "max_completion_tokens", "max_tokens", "stop", "logprobs")
COMPLETION = ("prompt", "max_tokens", "stop", "logprobs")
_LENGTHS = ("max_completion_tokens", "max_tokens")
#: fields that say nothing of the answer
_LABELS = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
#: fields with the values that ask for nothing else than what is done anyway
_USUAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "ignore_eos": (False,),
}
_WHY = {
    "n": "n is 1 here: ask several times",
    "stream": "stream is not served: leave it out",
    "top_logprobs": "top_logprobs is not served: there are log-probs of the sampled tokens alone",
    "tool_choice": "tool_choice is not served, but for auto: the policy calls a tool or does not",
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
        if name in served or name in _LABELS or _changes_nothing(name, value, given):
            continue
        if name in run and name not in ("stop", "stop_token_ids", "max_new_tokens"):
            if not _equal(value, run[name]):
                raise BadRequest(
                    f"{name} {value!r} is not served: the run samples at {run[name]:g}, and tokens that are sampled "
                    "otherwise cannot be trained on; leave it out"
                )
            continue
        raise BadRequest(_WHY.get(name, f"{name} is not served: leave it out"))
    params = {"stop": given["stop"]} if "stop" in given else {}
    most = next((given[name] for name in _LENGTHS if name in served and name in given), None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise BadRequest(f"{most!r} is not a number of tokens")
    return params | ({} if most is None else {"max_new_tokens": most})


def _changes_nothing(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    if name == "tool_choice" and value == "none":
        return not given.get("tools")
    return any(_equal(value, usual) for usual in _USUAL.get(name, ()))


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


# ---- the server

MODEL = "policy"
LARGEST = 1 << 24  #: bytes of a request
READ = 60.0  #: seconds that a request's body may take to arrive
ROUTES = "POST /v1/chat/completions, /v1/completions, /v1/tokens, and GET /v1/models"
_STATUS = {"rate_limit_exceeded": 429}
Handler = Callable[[Session, dict[str, Any]], Awaitable[dict[str, Any]]]


class Endpoint:
    """The server; `open` gives a response its key, `close` takes it back."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sessions = dict[str, Session]()
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            HpcrlError: if that fails.
        """
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/v1/models", self._answering(_models))
        posts = {"/v1/tokens": _tokens, "/v1/completions": _complete, "/v1/chat/completions": _chat}
        for path, work in posts.items():
            app.router.add_post(path, self._answering(work))
        theirs = {"/generate": router.generate, "/inference/v1/generate": router.inference}
        for path, work in (posts | theirs).items():
            app.router.add_post(f"/{{key:hpcrl-[^/]+}}{path}", self._answering(work))
        app.router.add_route("*", "/{path:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        accept = Connections(runner.server, lambda header: self._session(header) is not None)
        try:
            self._listening = await asyncio.get_running_loop().create_server(accept, self._host, 0, backlog=512)
        except OSError as error:
            await runner.cleanup()
            raise HpcrlError(
                f"rollout: the endpoint of custom functions cannot listen on {self._host}: {error.strerror}",
                "is this the host that the plan names?",
            ) from error
        self._runner = runner
        port = self._listening.sockets[0].getsockname()[1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"

    async def stop(self) -> None:
        """Listen no more, and end what is being answered."""
        self._sessions.clear()
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            runner = self._runner
            self._runner = None
            await runner.cleanup()

    def open(self, session: Session) -> str:
        """The key by which requests are of this session."""
        key = f"hpcrl-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """The key opens nothing any more."""
        self._sessions.pop(key, None)

    def _session(self, header: str) -> Session | None:
        """Whose key this Authorization header has."""
        scheme, _, key = header.partition(" ")
        return self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None

    def _answering(self, work: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`work` as a handler: the session by the key, the body as an object, errors as OpenAI's servers say them."""

        async def handle(request: web.Request) -> web.Response:
            named = f"Bearer {request.match_info['key']}" if "key" in request.match_info else ""
            session = self._session(named or request.headers.get("Authorization", ""))
            if session is None:
                return _error(401, "the key is of no response that is being made", "invalid_api_key")
            if isinstance(request.protocol, Connection):
                request.protocol.proved()
            try:
                async with asyncio.timeout(READ):
                    data = await request.read()
            except web.HTTPRequestEntityTooLarge:
                return _error(413, f"a request is {LARGEST} bytes at most", "invalid_request_error")
            except TimeoutError:
                return _error(408, f"the request's body did not arrive within {READ:g} s", "timeout")
            try:
                body = msgspec.json.decode(data) if data else {}
                if not isinstance(body, dict):
                    raise BadRequest("the body is not a JSON object")
                return web.Response(
                    body=msgspec.json.encode(await work(session, body)), content_type="application/json"
                )
            except BadRequest as error:
                return _error(_STATUS.get(error.code, 400), str(error), error.code)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _error(400, f"the body is not JSON: {error}", "invalid_request_error")
            except HpcrlError as error:  # kept by the session: it ends the run
                return _error(503, f"no engine can answer: {error.what}", "server_error")

        return handle


def _error(status: int, message: str, code: str) -> web.Response:
    body = {
        "error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "code": code}
    }
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


async def _unknown(request: web.Request) -> web.Response:
    return _error(404, f"{request.method} {request.path} is not served: there are {ROUTES}", "not_found")


# ---- the routes


async def _models(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "hpcrl"}]}


async def _tokens(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    tokens = body.get("tokens")
    params = body.get("sampling_params") or {}
    if not isinstance(tokens, list) or not isinstance(params, dict):
        raise BadRequest("tokens is not a list, or sampling_params no object")
    turn = await session.ask(tokens, params)
    columns = {name: getattr(turn, name).tolist() for name in ("tokens", "logprobs", "versions")}
    return columns | {"finish_reason": turn.finish, "text": turn.text}


async def _chat(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    messages, tools = body.get("messages"), body.get("tools") or None
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of messages")
    params = read_fields(body, CHAT, session.making.sampling)
    tokenizer = session.tokenizer
    check_logprobs(body, chat=True)
    try:
        forms = [chat.normal(message) for message in messages]
        found = chat.find_chat(session.dialogues, forms, chat.spelled(tools))
        dialogue = found or chat.begin_chat(tokenizer, messages, tools, session.making.version)
        told = chat.new_tokens(tokenizer, dialogue, messages, tools)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    before = len(dialogue.trajectory.tokens) + len(told)
    turn = await _turn(session, dialogue, told, params, logprobs=bool(body.get("logprobs")))
    clean = chat.until(session.text(turn.tokens, skip_special=True), params)
    message = chat.answer(clean, chat.until(turn.text, params), tools is not None, before)
    dialogue.messages = [*forms, chat.normal(message)]
    reason = "tool_calls" if message.get("tool_calls") else turn.finish
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": chat_logprobs(body, tokenizer, turn)}
    return _completion("chat.completion", choice, before, turn)


async def _complete(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if (
        not isinstance(prompt, str | list)
        or not prompt
        or (isinstance(prompt, list) and not isinstance(prompt[0], int))
    ):
        raise BadRequest("prompt is neither one text nor one list of token ids")
    params = read_fields(body, COMPLETION, session.making.sampling)
    check_logprobs(body, chat=False)
    found = chat.find_text(session.dialogues, prompt)
    new = prompt if found is None else found[1]
    told = session.tokenizer.encode([new])[0].tolist() if isinstance(new, str) else list(new)
    dialogue = found[0] if found else Dialogue(Trajectory(told, session.making.version))
    told = told if found else []
    before = len(dialogue.trajectory.tokens) + len(told)
    turn = await _turn(session, dialogue, told, params, logprobs=body.get("logprobs") is not None)
    text = session.text(turn.tokens, skip_special=True)
    if isinstance(prompt, str):
        dialogue.text = prompt + text
    logprobs = completion_logprobs(body, session.tokenizer, turn)
    choice = {"index": 0, "text": chat.until(text, params), "finish_reason": turn.finish, "logprobs": logprobs}
    return _completion("text_completion", choice, before, turn)


async def _turn(session: Session, dialogue: Dialogue, told: list[int], params: dict[str, Any], logprobs: bool) -> Turn:
    """The next turn of a conversation, which has it afterwards."""
    trajectory = dialogue.trajectory
    known = any(dialogue is other for other in session.dialogues)
    if not known and len(session.dialogues) >= DIALOGUES:
        raise BadRequest(f"more than {DIALOGUES} conversations in one response", "rate_limit_exceeded")
    room = session.making.room - trajectory.response_length - len(told)
    dialogue.busy = True
    try:
        if room < 1:
            raise BadRequest(
                f"the {session.making.room} tokens of --rollout-max-response-len are used up", "context_length_exceeded"
            )
        most = min(room, params.get("max_new_tokens", room))
        turn = await session.ask([*trajectory.tokens, *told], params | {"max_new_tokens": most}, logprobs)
    except BadRequest as error:
        if error.code == "context_length_exceeded":
            trajectory.finish = LENGTH
        raise
    finally:
        dialogue.busy = False
    trajectory.told(told)
    trajectory.said(turn)
    if not known:
        session.dialogues.append(dialogue)
    return turn


def _completion(kind: str, choice: dict[str, Any], prompt: int, turn: Turn) -> dict[str, Any]:
    said = len(turn.tokens)
    return {
        "id": f"{MODEL}-{secrets.token_hex(8)}",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said},
    }
