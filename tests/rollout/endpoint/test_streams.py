"""Answers as server-sent events: the same turn and the same trajectory as an answer in one piece, read by OpenAI's own
client; errors, pauses, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from hpcrl.errors import PeerError
from hpcrl.rollout.endpoint import server
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.rollout.endpoint.test_tool_calls import ADD, WANTED
from tests.support.asked_endpoint import FORMS, AskedEndpoint, asked, form_model, spoken
from tests.support.two_ways import Policy

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = {"role": "user", "content": "1+1"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "1+1"},
    MESSAGES: {"messages": [USER], "max_tokens": 2000},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return form_model(tmp_path_factory.mktemp("hermes"), "hermes")


class Held(Policy):
    """A policy that answers when it is let."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, "ok")
        self.asking = asyncio.Event()
        self.free = asyncio.Event()

    async def complete(self, *given: Any) -> Any:
        self.asking.set()
        await self.free.wait()
        return await super().complete(*given)


def test_chat_as_chunks(tokenizer: Tokenizer) -> None:
    """Role, text, calls, the reason, the usage if it was asked for, and the end; log-probs with the text."""

    async def work(found: AskedEndpoint) -> None:
        body = {"messages": [USER], "tools": [ADD], "logprobs": True, "stream_options": {"include_usage": True}}
        *chunks, (_, last) = await found.events(CHAT, body)
        assert last == "[DONE]"
        assert {chunk["object"] for _, chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for _, chunk in chunks}) == 1
        *parts, end = [chunk for _, chunk in chunks]
        deltas = [part["choices"][0]["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1] == {"content": "Well."}
        call = deltas[2]["tool_calls"][0]
        assert call["index"] == 0 and call["type"] == "function" and call["id"]
        assert call["function"] == {"name": "add", "arguments": ""}
        assert json.loads(deltas[3]["tool_calls"][0]["function"]["arguments"]) == WANTED
        assert deltas[4:] == [{}]
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 4 + ["tool_calls"]
        rows = parts[1]["choices"][0]["logprobs"]["content"]
        assert len(rows) == end["usage"]["completion_tokens"] == len(found.policy.tokens) + 1
        assert end["choices"] == [] and all(part["usage"] is None for part in parts)

    asked(tokenizer, work, spoken(tokenizer, FORMS["hermes"].said))


def test_completion_as_chunks(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        chunks = await found.events(TEXT, {"prompt": "1+1", "max_tokens": 2, "logprobs": 0})
        (_, first), (_, second), (_, last) = chunks
        assert (first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == ("ok", None)
        assert first["choices"][0]["logprobs"]["tokens"] == ["o", "k"] and "usage" not in first
        assert (second["choices"][0]["text"], second["choices"][0]["finish_reason"]) == ("", "length")
        assert last == "[DONE]"

    asked(tokenizer, work, spoken(tokenizer, "ok then"))


@pytest.mark.parametrize("path", BODIES)
def test_streaming_changes_no_token(tokenizer: Tokenizer, path: str) -> None:
    """Two turns, streamed or not, are asked for with the same tokens, and make the same trajectory."""
    seen = []

    async def work(found: AskedEndpoint, stream: bool) -> None:
        body = dict(BODIES[path])
        for _ in range(2):
            if stream:
                await found.events(path, body)
            else:
                await found.ask(path, body)
            said = {"role": "assistant", "content": "ok"}
            more = [*body.get("messages", ()), said, USER]
            body |= {"prompt": "1+1ok+1"} if path == TEXT else {"messages": more}
        [dialogue] = found.session.dialogues
        trajectory = dialogue.trajectory
        asks = [(tokens, seed) for tokens, _, seed in found.policy.asked]
        seen.append((asks, trajectory.tokens, trajectory.loss_mask, trajectory.logprobs, trajectory.versions))

    for stream in (False, True):
        asked(tokenizer, lambda found, stream=stream: work(found, stream), spoken(tokenizer, "ok"))
    assert seen[0] == seen[1]


def test_openais_client_reads_both(tokenizer: Tokenizer) -> None:
    """OpenAI's client gets the same message streamed and whole, sends it back as it is, and reads errors as its own."""

    async def work(found: AskedEndpoint) -> None:
        client = openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key=found.key, max_retries=0)
        async with client:
            history: list[Any] = [USER]
            for stream in (False, True):
                asking = {"model": "policy", "messages": history, "tools": [ADD]}
                if stream:
                    async with client.chat.completions.stream(**asking) as events:
                        whole = await events.get_final_completion()
                else:
                    whole = await client.chat.completions.create(**asking)
                message = whole.choices[0].message
                [call] = message.tool_calls
                assert message.content == "Well." and json.loads(call.function.arguments) == WANTED
                told = {"role": "tool", "tool_call_id": call.id, "content": "3"}
                history += [message.model_dump(exclude_none=True), told]
            [dialogue] = found.session.dialogues
            assert len(found.policy.asked) == 2 and sum(dialogue.trajectory.loss_mask) == 2 * (
                len(found.policy.tokens) + 1
            )
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.chat.completions.create(model="m", messages=[USER], stream=True, temperature=0.3)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").chat.completions.create(model="m", messages=[USER])

    asked(tokenizer, work, spoken(tokenizer, FORMS["hermes"].said))


def test_comments_while_a_turn_is_sampled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the turn is there, comments come; the answer follows them."""
    monkeypatch.setattr(server, "FIRST", 0.05)
    monkeypatch.setattr(server, "PAUSE", 0.05)

    async def work(found: AskedEndpoint) -> None:
        assert isinstance(found.policy, Held)
        async with found.post(CHAT, BODIES[CHAT] | {"stream": True}) as answer:
            for _ in range(3):
                assert (await answer.content.readuntil(b"\n\n")).startswith(b":")
            found.policy.free.set()
            text = (await answer.content.read()).decode()
        assert '"content":"ok"' in text and text.endswith("data: [DONE]\n\n")

    asked(tokenizer, work, Held(tokenizer))


@pytest.mark.parametrize("path", BODIES)
def test_errors_of_streams(tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the head an error has its status; behind it it is an event, in the words of the protocol."""

    async def work(found: AskedEndpoint) -> None:
        assert isinstance(found.policy, Held)
        found.policy.broken = PeerError("engine-0 answered a completion without tokens")
        found.policy.free.set()
        status, answer = await found.ask(path, BODIES[path] | {"stream": True})
        assert status == 503 and "engine-0" in answer["error"]["message"]
        monkeypatch.setattr(server, "FIRST", 0.05)
        found.policy.free.clear()
        async with found.post(path, BODIES[path] | {"stream": True}) as response:
            assert response.status == 200
            assert (await response.content.readuntil(b"\n\n")).startswith(b":")
            found.policy.free.set()
            text = (await response.content.read()).decode()
        name, data = text.rstrip().rsplit("\n", 1) if path == MESSAGES else ("", text.rstrip())
        error = json.loads(data.removeprefix("data: "))
        assert "engine-0" in error["error"]["message"] and found.session.broken is found.policy.broken
        assert name.endswith("event: error") and error["type"] == "error" if path == MESSAGES else not name

    asked(tokenizer, work, Held(tokenizer))


@pytest.mark.parametrize("begun", [False, True], ids=["before the head", "behind the head"])
def test_who_leaves_frees_the_request(tokenizer: Tokenizer, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that disconnects ends its request: nothing is in flight, and its conversation is not busy."""
    monkeypatch.setattr(server, "FIRST", 0.05 if begun else 60.0)

    async def work(found: AskedEndpoint) -> None:
        assert isinstance(found.policy, Held)
        found.policy.free.set()
        await found.ask(CHAT, BODIES[CHAT])
        found.policy.free.clear()
        found.policy.asking.clear()
        again = {"messages": [USER, {"role": "assistant", "content": "ok"}, USER], "stream": True}
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {found.key}"}
            request = asyncio.ensure_future(http.post(f"{found.url}{CHAT}", json=again, headers=headers))
            await asyncio.wait_for(found.policy.asking.wait(), 20)
            if begun:
                await (await asyncio.wait_for(request, 20)).content.readuntil(b"\n\n")
            assert found.session.in_flight == 1 and found.session.dialogues[0].busy
            request.cancel()
        async with asyncio.timeout(20):
            while found.session.in_flight:
                await asyncio.sleep(0.01)
        [dialogue] = found.session.dialogues
        assert not dialogue.busy and len(dialogue.messages) == 2
        found.policy.free.set()
        await found.events(CHAT, again)
        assert len(found.session.dialogues) == 1 and len(dialogue.messages) == 4

    asked(tokenizer, work, Held(tokenizer))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"stream": 1}, "$.stream`"),
        ({"stream": "true"}, "$.stream`"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 3}, "$.stream_options`"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "$.stream_options.include_usage`"),
        ({"stream": True, "stream_options": {"other": True}}, "field `other`"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "field `include_obfuscation`"),
    ],
)
def test_no_stream_of_this(tokenizer: Tokenizer, more: dict[str, Any], says: str) -> None:
    async def work(found: AskedEndpoint) -> None:
        for path in (CHAT, TEXT):
            status, answer = await found.ask(path, BODIES[path] | more)
            assert status == 400 and says in answer["error"]["message"], answer
        assert not found.policy.asked

    asked(tokenizer, work)


def test_streams_of_other_routes_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What has no events says so, and does not send an answer in one piece in their place."""

    async def work(found: AskedEndpoint) -> None:
        for path, body in (("/v1/tokens", {"tokens": [3]}), ("/v1/messages/count_tokens", {"messages": [USER]})):
            status, answer = await found.ask(path, body | {"stream": True})
            assert status == 400 and "stream" in answer["error"]["message"]

    asked(tokenizer, work)
