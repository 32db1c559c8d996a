"""The HTTP server of the rollout process through which custom functions and agents ask the policy.

    POST /v1/chat/completions, /v1/completions   as OpenAI has them, as far as `requests.py` says (`openai.py`)
    GET  /v1/models                              the one model
    POST /v1/messages, /v1/messages/count_tokens as Anthropic has them (`anthropic.py`)
    POST /v1/tokens                              {"tokens": [...], "sampling_params": {...}}: exact tokens,
                                                 log-probs, versions
    POST /KEY/...                                the same, and what functions of slime's ask (`router.py`)

Invariants: every request brings the key of a response that is being made, which opens nothing else and ends with it; it
listens on the loopback alone, since custom functions run on the rollout's host, on a port that the system chose; bodies
are bounded, and every wait has a deadline.  An error of a request or of an engine has the shape
of the protocol that it answers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from hpcrl.errors import HpcrlError
from hpcrl.rollout.endpoint import anthropic, openai, router
from hpcrl.rollout.endpoint.session import BadRequest, Session

HOST = "127.0.0.1"
LARGEST = 1 << 24  #: bytes of a request
READ = 60.0  #: seconds that a request's body may take to arrive
_STATUS = {"rate_limit_exceeded": 429, "request_too_large": 413, "timeout": 408}
Failure = Callable[[int, str, str], dict[str, Any]]


@dataclass(frozen=True)
class AnsweredRoute:
    """What answers a path.

    Attributes:
        work: makes the answer of a request's body.
        events: (answer, body) -> its server-sent events, where the route has these.
        failure: (status, message, code) -> an error as the route's protocol has it.
        failed: the same as an event.
    """

    work: Callable[[Session, dict[str, Any]], Awaitable[dict[str, Any]]]
    events: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[bytes]] | None = None
    failure: Failure = openai.failure
    failed: Callable[[dict[str, Any]], bytes] = openai.event


class Endpoint:
    """The server; `open` gives a response its key, `close` takes it back."""

    def __init__(self) -> None:
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
        app.router.add_get("/v1/models", self._answering(AnsweredRoute(openai.models)))
        for path, route in POSTS.items():
            app.router.add_post(path, self._answering(route))
        for path, route in (POSTS | THEIRS).items():
            app.router.add_post(f"/{{key:hpcrl-[^/]+}}{path}", self._answering(route))
        app.router.add_route("*", "/{path:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        try:
            listening = asyncio.get_running_loop().create_server(runner.server, HOST, 0, backlog=512)
            self._listening = await listening
        except OSError as error:
            await runner.cleanup()
            raise HpcrlError(
                f"rollout: the endpoint of custom functions cannot listen on {HOST}: {error.strerror}"
            ) from error
        self._runner = runner
        port = self._listening.sockets[0].getsockname()[1]
        self.base_url = f"http://{HOST}:{port}/v1"

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

    def _session(self, request: web.Request) -> Session | None:
        """Whose key a request has: in its path, or as OpenAI's or Anthropic's clients send it."""
        if "key" in request.match_info:
            return self._sessions.get(request.match_info["key"])
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        return found or self._sessions.get(request.headers.get("X-Api-Key", "").strip())

    def _answering(self, route: AnsweredRoute) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A route as a handler: the session by the key, the body as an object, errors in the protocol's words."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            if session is None:
                return _error(route.failure, 401, "the key is of no response that is being made", "invalid_api_key")
            try:
                body = _object(await _read(request))
                if body.get("stream") is not True:
                    return _json(200, await route.work(session, body))
                if (events := route.events) is None:
                    raise BadRequest("stream is not served here: leave it out")
                return await stream(
                    request,
                    route.work(session, body),
                    lambda answer: events(answer, body),
                    lambda error: route.failed(route.failure(*known)) if (known := _known(error)) else None,
                )
            except Exception as error:
                if (known := _known(error)) is None:
                    raise
                return _error(route.failure, *known)

        return handle


async def _read(request: web.Request) -> bytes:
    """A request's body.

    Raises:
        BadRequest: if it is too large, or does not arrive in time.
    """
    try:
        async with asyncio.timeout(READ):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"a request is {LARGEST} bytes at most", "request_too_large") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error!s:.200}") from None
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {READ:g} s", "timeout") from None


def _object(data: bytes) -> dict[str, Any]:
    """A body as an object, {} of none.

    Raises:
        BadRequest: if it is another thing.
    """
    try:
        body = msgspec.json.decode(data) if data else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _known(error: Exception) -> tuple[int, str, str] | None:
    """(status, message, code) of an error that a request may have, None for a defect."""
    if isinstance(error, BadRequest):
        return _STATUS.get(error.code, 400), str(error), error.code
    if isinstance(error, HpcrlError):  # kept by the session: it ends the run
        return 503, f"no engine can answer: {error.what}", "server_error"
    if isinstance(error, RecursionError):
        return 400, "the body is nested too deeply", "invalid_request_error"
    return None


def _error(failure: Failure, status: int, message: str, code: str) -> web.Response:
    return _json(status, failure(status, message, code))


def _json(status: int, data: Mapping[str, Any]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")


async def _unknown(request: web.Request) -> web.Response:
    failure = anthropic.failure if request.path.startswith("/v1/messages") else openai.failure
    posts = ", ".join(POSTS)
    message = f"{request.method} {request.path} is not served: there are POST {posts}, and GET /v1/models"
    return _error(failure, 404, message, "not_found")


# ---- the routes


async def _tokens(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    tokens = body.get("tokens")
    params = body.get("sampling_params") or {}
    if not isinstance(tokens, list) or not isinstance(params, dict):
        raise BadRequest("tokens is not a list, or sampling_params no object")
    turn = await session.sample_turn(tokens, params)
    columns = {name: getattr(turn, name).tolist() for name in ("tokens", "logprobs", "versions")}
    return columns | {"finish_reason": turn.finish, "text": turn.text}


def _anthropics(route: AnsweredRoute) -> AnsweredRoute:
    return replace(route, failure=anthropic.failure, failed=lambda error: anthropic.event(**error))


POSTS = {
    "/v1/chat/completions": AnsweredRoute(openai.chat, openai.chat_events),
    "/v1/completions": AnsweredRoute(openai.completion, openai.completion_events),
    "/v1/messages": _anthropics(AnsweredRoute(anthropic.messages, anthropic.message_events)),
    "/v1/messages/count_tokens": _anthropics(AnsweredRoute(anthropic.count_tokens)),
    "/v1/tokens": AnsweredRoute(_tokens),
}
#: with the key in the path alone
THEIRS = {"/generate": AnsweredRoute(router.generate), "/inference/v1/generate": AnsweredRoute(router.inference)}


# ---- answers as events
#
# An answer as server-sent events.
#
# A turn is sampled whole, and its events follow one another once it is there. Until then comments keep the connection:
# clients and what stands between give one up on which nothing comes.
#
# Invariants: what fails before the head is sent is an answer with its own status, later an event; a client that leaves
# frees its request at once; every wait has an end.

FIRST = 2.0  #: seconds within which an error still has a status of its own
PAUSE = 10.0  #: seconds between two comments
SENT = 60.0  #: seconds within which a client has to take what it is sent
COMMENT = b": the turn is being sampled\n\n"


async def stream(
    request: web.Request,
    work: Coroutine[Any, Any, dict[str, Any]],
    events: Callable[[dict[str, Any]], Iterable[bytes]],
    failed: Callable[[Exception], bytes | None],
) -> web.StreamResponse:
    """Send what comes of `work`.

    Args:
        events: of the answer.
        failed: the event of an error, None for one that neither a client nor an engine caused.

    Raises:
        Exception: of `work`, as long as nothing is sent.
    """
    task = asyncio.ensure_future(work)
    response: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait({task}, timeout=FIRST if response is None else PAUSE))[0]:
            response = response or await _start_stream(request)
            await _send(response, COMMENT)
        try:
            pieces = list(events(task.result()))
        except Exception as error:
            said = failed(error)
            if response is None or said is None:
                raise
            pieces = [said]
        response = response or await _start_stream(request)
        await _send(response, b"".join(pieces))
    except _ClientGone:
        return response or web.Response(status=408)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return response


class _ClientGone(Exception):
    """The client has left, or takes nothing."""


async def _start_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(SENT):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise _ClientGone from error
