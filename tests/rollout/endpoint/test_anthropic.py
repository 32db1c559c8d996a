"""Anthropic's messages: blocks in and out, which conversation continues, and what is refused, in Anthropic's words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.utils.sample_parts import ABORTED
from tests.rollout.endpoint.test_tool_calls import WANTED, check
from tests.support.asked_endpoint import FORMS, AskedEndpoint, asked, form_model, spoken

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"name": "add", "input_schema": SCHEMA}
USER = {"role": "user", "content": "1+1"}


@pytest.fixture(scope="module", params=sorted(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(form: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return form_model(tmp_path_factory.mktemp(form), form)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return form_model(tmp_path_factory.mktemp("hermes"), "hermes")


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 3000, "messages": list(messages)} | more


def test_rounds_keep_their_tokens(form: str, tokenizer: Tokenizer) -> None:
    """A turn that calls a tool, sent back as the blocks that the client got, continues with the sampled tokens."""

    async def work(found: AskedEndpoint) -> None:
        status, said = await found.ask(MESSAGES, body(USER, tools=[ADD]), **{"x-api-key": found.key})
        assert status == 200, said
        text, call = said["content"]
        assert text == {"type": "text", "text": "Well."} and said["stop_reason"] == "tool_use"
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", WANTED)
        told = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
        blocks = [{"type": "text", "text": "1+1", "cache_control": {"type": "ephemeral"}}]
        history = [{"role": "user", "content": blocks}, {"role": "assistant", "content": said["content"]}]
        again = body(*history, {"role": "user", "content": [told]}, tools=[ADD])
        _, count = await found.ask(COUNT, {name: again[name] for name in ("messages", "tools")})
        status, said = await found.ask(MESSAGES, again, **{"x-api-key": found.key})
        assert status == 200 and said["usage"]["input_tokens"] == count["input_tokens"], said
        check(tokenizer, form, found)

    asked(tokenizer, work, spoken(tokenizer, FORMS[form].said, FORMS[form].end))


def test_message_as_events(plain: Tokenizer) -> None:
    """Head, ping, each block with its start, delta and end, the reason and the end."""

    async def work(found: AskedEndpoint) -> None:
        events = await found.events(MESSAGES, body(USER, tools=[ADD]))
        assert all(name == data["type"] for name, data in events)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        names = ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
        assert [name for name, _ in events] == names
        data = [data for _, data in events]
        head = data[0]["message"]
        assert (head["content"], head["stop_reason"], head["usage"]["output_tokens"]) == ([], None, 0)
        assert data[2]["content_block"] == {"type": "text", "text": ""}
        assert data[3]["delta"] == {"type": "text_delta", "text": "Well."}
        assert data[5]["content_block"]["input"] == {} and data[5]["content_block"]["name"] == "add"
        assert (
            json.loads(data[6]["delta"]["partial_json"]) == WANTED
            and [d["index"] for d in data[2:8]] == [0] * 3 + [1] * 3
        )
        assert data[8]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert data[8]["usage"]["output_tokens"] == len(found.policy.tokens) + 1

    asked(plain, work, spoken(plain, FORMS["hermes"].said))


@pytest.mark.parametrize(
    ("more", "text", "reason", "stop"),
    [
        ({}, "ok so", "end_turn", None),
        ({"max_tokens": 2}, "ok", "max_tokens", None),
        ({"stop_sequences": ["so", " s"]}, "ok", "stop_sequence", " s"),
        ({"stop_sequences": []}, "ok so", "end_turn", None),
    ],
)
def test_why_a_message_ended(plain: Tokenizer, more: dict[str, Any], text: str, reason: str, stop: str | None) -> None:
    async def work(found: AskedEndpoint) -> None:
        _, said = await found.ask(MESSAGES, body(USER) | more)
        assert said["content"] == [{"type": "text", "text": text}]
        assert (said["stop_reason"], said["stop_sequence"]) == (reason, stop)

    asked(plain, work, spoken(plain, "ok so"))


def test_both_protocols_continue_one_chat(plain: Tokenizer) -> None:
    """A system prompt, and a conversation that is begun in one protocol and continued in the other."""

    async def work(found: AskedEndpoint) -> None:
        system = [{"type": "text", "text": "Be"}, {"type": "text", "text": " good"}]
        await found.ask(MESSAGES, body(USER, system=system))
        history = [{"role": "system", "content": "Be good"}, USER, {"role": "assistant", "content": "ok"}, USER]
        status, _ = await found.ask("/v1/chat/completions", {"messages": history})
        [dialogue] = found.session.dialogues
        assert status == 200 and sum(dialogue.trajectory.loss_mask) == 6
        assert plain._hf.decode(dialogue.trajectory.tokens).startswith("<|system|>Be good<|end|><|user|>1+1<|end|>")

    asked(plain, work, spoken(plain, "ok"))


def test_results_come_before_the_text(plain: Tokenizer) -> None:
    """A message with results of tools and text is read in that order, wherever its text is."""

    async def work(found: AskedEndpoint) -> None:
        results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "pq"]
        blocks = [{"type": "text", "text": "so"}, *results, {"type": "text", "text": "?"}]
        await found.ask(MESSAGES, body({"role": "user", "content": blocks}))
        text = plain._hf.decode(found.session.dialogues[0].trajectory.prompt)
        assert text == "<|tool|>p<|end|><|tool|>q<|end|><|user|>so?<|end|><|assistant|>"

    asked(plain, work)


def test_usual_values_are_taken(plain: Tokenizer) -> None:
    """What changes nothing may be said."""
    usual = {
        "temperature": 1,
        "metadata": {"user_id": "me"},
        "thinking": {"type": "disabled"},
        "tools": [ADD | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "stream": False,
        "system": "",
        "service_tier": "auto",
    }

    async def work(found: AskedEndpoint) -> None:
        status, said = await found.ask(MESSAGES + "?beta=true", body(USER, **usual))
        assert status == 200, said

    asked(plain, work)


def block(kind: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return body({"role": role, "content": [{"type": kind} | more]})


@pytest.mark.parametrize(
    ("request_body", "says"),
    [
        (body(), "$.messages`"),
        (body(3), "$.messages[0]`"),
        (body({"role": "system", "content": "a"}), "'system' - at `$.messages[0].role`"),
        (body({"role": "user"}), "field `content`"),
        (body({"role": "user", "content": 3}), "$.messages[0].content`"),
        (body({"role": "user", "content": ["a"]}), "$.messages[0].content[0]`"),
        (block("image", source={}), "'image' - at"),
        (block("document", source={}), "'document' - at"),
        (block("thinking", "assistant", thinking="a", signature="b"), "'thinking' - at"),
        (block("redacted_thinking", "assistant", data="a"), "'redacted_thinking' - at"),
        (block("tool_use", id="a", name="add", input={}), "'tool_use' - at"),
        (block("tool_result", "assistant", tool_use_id="a"), "'tool_result' - at"),
        (block("text"), "field `text`"),
        (block("tool_use", "assistant", id="a", name="add", input="{}"), "$.messages[0].content[0].input`"),
        (block("tool_use", "assistant", id="a", input={}), "field `name`"),
        (block("tool_result", content="a"), "field `tool_use_id`"),
        (block("tool_result", tool_use_id="a", content=[{"type": "image"}]), "'image' - at"),
        (block("tool_result", tool_use_id="a", content=3), "$.messages[0].content[0].content`"),
        (body(USER, system=3), "$.system`"),
        (body(USER, system=[{"type": "image"}]), "$.system[0].type`"),
        (body(USER, max_tokens=0), "$.max_tokens`"),
        (body(USER, max_tokens="9"), "$.max_tokens`"),
        (body(USER, temperature=0.5), "temperature 0.5"),
        (body(USER, top_p=0.5), "top_p 0.5"),
        (body(USER, top_k=5), "top_k 5"),
        (body(USER, stop_sequences="a"), "$.stop_sequences`"),
        (body(USER, stop_sequences=[""]), "$.stop_sequences[0]`"),
        (body(USER, stop_sequences=[3]), "$.stop_sequences[0]`"),
        (body(USER, thinking={"type": "enabled", "budget_tokens": 1024}), "$.thinking.type`"),
        (body(USER, n=2), "field `n`"),
        (body(USER, logprobs=True), "field `logprobs`"),
        (body(USER, stream=1), "$.stream`"),
        (body(USER, tools={}), "$.tools`"),
        (body(USER, tools=[3]), "$.tools[0]`"),
        (body(USER, tools=[{"name": "add"}]), "input_schema"),
        (body(USER, tools=[{"name": "bash", "type": "bash_20250124"}]), "bash_20250124"),
        (body(USER, tools=[ADD], tool_choice={"type": "any"}), "'any' - at `$.tool_choice.type`"),
        (body(USER, tools=[ADD], tool_choice={"type": "tool", "name": "add"}), "'tool' - at `$.tool_choice.type`"),
        (body(USER, tools=[ADD], tool_choice="auto"), "$.tool_choice`"),
        (
            body(USER, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
            "disable_parallel_tool_use",
        ),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
    ],
)
def test_what_is_not_served_is_said(plain: Tokenizer, request_body: Any, says: str) -> None:
    async def work(found: AskedEndpoint) -> None:
        status, answer = await found.ask(MESSAGES, request_body)
        assert status == 400 and answer["type"] == "error", answer
        assert answer["error"]["type"] == "invalid_request_error" and says in answer["error"]["message"], answer
        assert not found.policy.asked and not found.session.dialogues

    asked(plain, work)


def test_errors_in_anthropics_words(plain: Tokenizer) -> None:
    """Keys, sizes, routes, rooms and endings; no room is said in the words that clients look for."""

    async def work(found: AskedEndpoint) -> None:
        for headers in ({"x-api-key": "other"}, {"Authorization": "Bearer "}, {"x-api-key": ""}):
            status, answer = await found.ask(MESSAGES, body(USER), **headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        status, answer = await found.ask(MESSAGES + "/batches", {})
        assert (status, answer["error"]["type"]) == (404, "not_found_error") and "/v1/messages" in str(answer)
        status, answer = await found.ask(MESSAGES, b" " * (2**24 + 1))
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        found.session.making = replace(found.session.making, sampling=Sampling(1.0, 1, (), (1,)))
        turns = [USER, {"role": "assistant", "content": "a"}, USER]
        assert (await found.ask(MESSAGES, body(USER)))[1]["content"][0]["text"] == "a"
        status, answer = await found.ask(MESSAGES, body(*turns))
        assert status == 400 and "prompt is too long" in answer["error"]["message"]
        status, answer = await found.ask("/v1/chat/completions", {"messages": turns})
        assert status == 400 and "model's maximum context length" in answer["error"]["message"]
        found.policy.status = ABORTED
        status, answer = await found.ask(MESSAGES, body(USER))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error") and found.session.ended

    asked(plain, work)
