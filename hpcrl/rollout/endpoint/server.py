"""The HTTP server of the rollout process through which custom functions and agents ask the policy.

    POST /v1/chat/completions, /v1/completions   as OpenAI has them, as far as request_fields.py says
    POST /v1/tokens                              {"tokens": [...], "sampling_params": {...}}: exact tokens, log-probs, versions
    GET  /v1/models                              the one model

Invariants: every request brings the key of a response that is being made, which opens nothing else and ends with it; it
listens on the rollout's address of the plan alone, on a port that the system chose; bodies are bounded, and every wait
has a deadline.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from hpcrl.errors import HpcrlError
from hpcrl.rollout.endpoint import chat
from hpcrl.rollout.endpoint.chat import Dialogue
from hpcrl.rollout.endpoint.request_fields import (
    CHAT,
    COMPLETION,
    chat_logprobs,
    check_logprobs,
    completion_logprobs,
    read_fields,
)
from hpcrl.rollout.endpoint.session import DIALOGUES, BadRequest, Session
from hpcrl.rollout.samplers.trajectory import LENGTH, Trajectory, Turn

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
        self.base_url = ""

    async def start(self) -> None:
        """Listen.  HpcrlError if that fails."""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/v1/models", self._answering(_models))
        app.router.add_post("/v1/tokens", self._answering(_tokens))
        app.router.add_post("/v1/completions", self._answering(_complete))
        app.router.add_post("/v1/chat/completions", self._answering(_chat))
        app.router.add_route("*", "/{path:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, 0).start()
        except OSError as error:
            await runner.cleanup()
            raise HpcrlError(
                f"rollout: the endpoint of custom functions cannot listen on {self._host}: {error.strerror}",
                "is this the host that the plan names?",
            ) from error
        self._runner = runner
        port = runner.addresses[0][1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"

    async def stop(self) -> None:
        """Listen no more, and end what is being answered."""
        self._sessions.clear()
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

    def _answering(self, work: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`work` as a handler: the session by the key, the body as an object, errors as OpenAI's servers say them."""

        async def handle(request: web.Request) -> web.Response:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
            if session is None:
                return _error(401, "the key is of no response that is being made", "invalid_api_key")
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
                    raise BadRequest("the body is no JSON object")
                return web.Response(
                    body=msgspec.json.encode(await work(session, body)), content_type="application/json"
                )
            except BadRequest as error:
                return _error(_STATUS.get(error.code, 400), str(error), error.code)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _error(400, f"the body is no JSON: {error}", "invalid_request_error")
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
        raise BadRequest("tokens is no list, or sampling_params no object")
    turn = await session.ask(tokens, params)
    columns = {name: getattr(turn, name).tolist() for name in ("tokens", "logprobs", "versions")}
    return columns | {"finish_reason": turn.finish, "text": turn.text}


async def _chat(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    messages, tools = body.get("messages"), body.get("tools") or None
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages")
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
