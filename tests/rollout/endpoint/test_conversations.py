"""Which requests continue a conversation, whatever clients make of its messages on the way, and which must not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hpcrl.rollout.endpoint.call_values import Tools
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.rollout.endpoint.test_streams import Held
from tests.rollout.endpoint.test_tool_calls import ADD
from tests.support.asked_endpoint import AskedEndpoint, asked, form_model, spoken

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "1+1"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "x y"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return form_model(tmp_path_factory.mktemp("model"), "hermes")


def said_twice(tokenizer: Tokenizer, text: str, change: Any, tools: bool = True) -> int:
    """Conversations after a turn was sent back, changed, with a result or a word of the user's behind it."""
    count = 0

    async def work(found: AskedEndpoint) -> None:
        nonlocal count
        body = {"messages": [USER]} | ({"tools": [ADD]} if tools else {})
        status, said = await found.ask(CHAT, body)
        assert status == 200, said
        message = change(said["choices"][0]["message"])
        calls = message.get("tool_calls")
        more = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"} if calls else USER
        status, said = await found.ask(CHAT, body | {"messages": [USER, message, more]})
        assert status == 200, said
        count = len(found.session.dialogues)

    asked(tokenizer, work, spoken(tokenizer, text, "<|end|>"))
    return count


def with_arguments(message: dict[str, Any], text: str) -> dict[str, Any]:
    [call] = message["tool_calls"]
    return message | {"tool_calls": [call | {"function": call["function"] | {"arguments": text}}]}


def test_a_call_in_a_clients_own_spelling(tokenizer: Tokenizer) -> None:
    """In another order, and with numbers as JavaScript writes them; another value is another call."""
    for text in ('{"b": "x y", "a": 1}', '{"a":1.0,"b":"x y"}'):
        assert said_twice(tokenizer, CALL, lambda message, text=text: with_arguments(message, text)) == 1
    assert said_twice(tokenizer, CALL, lambda message: with_arguments(message, '{"a": 2, "b": "x y"}')) == 2


def test_a_call_without_arguments(tokenizer: Tokenizer) -> None:
    none = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for text in ("", "{}"):
        assert said_twice(tokenizer, none, lambda message, text=text: with_arguments(message, text)) == 1


def test_thoughts_that_a_client_takes_apart(tokenizer: Tokenizer) -> None:
    def apart(message: dict[str, Any]) -> dict[str, Any]:
        thought, _, text = message["content"].removeprefix("<think>").partition("</think>")
        return message | {"content": text, "reasoning_content": thought}

    assert said_twice(tokenizer, "<think>hm, one.</think>\n\nWell.", apart, tools=False) == 1
    other = lambda message: apart(message) | {"reasoning_content": "two"}  # noqa: E731
    assert said_twice(tokenizer, "<think>hm, one.</think>\n\nWell.", other, tools=False) == 2


def test_a_call_in_a_thought_is_none(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        _, said = await found.ask(CHAT, {"messages": [USER], "tools": [ADD]})
        choice = said["choices"][0]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]

    asked(tokenizer, work, spoken(tokenizer, f"<think>I may write {CALL} or not</think>No call.", "<|end|>"))


def test_two_continuations_at_once_are_two(tokenizer: Tokenizer) -> None:
    """No turn is learned behind one that was not in its context."""

    async def work(found: AskedEndpoint) -> None:
        policy = found.policy
        assert isinstance(policy, Held)
        policy.free.set()
        _, said = await found.ask(CHAT, {"messages": [USER]})
        policy.free.clear()
        so_far = [USER, said["choices"][0]["message"]]
        both = [
            asyncio.create_task(found.ask(CHAT, {"messages": [*so_far, {"role": "user", "content": text}]}))
            for text in ("a", "b")
        ]
        await asyncio.sleep(0.2)
        policy.free.set()
        await asyncio.gather(*both)
        learned = [sum(one.trajectory.loss_mask) for one in found.session.dialogues]
        assert len(learned) == 2 and max(learned) == 2 * min(learned)

    asked(tokenizer, work, Held(tokenizer))


def test_other_tools_are_another_conversation(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        _, said = await found.ask(CHAT, {"messages": [USER]})
        messages = [USER, said["choices"][0]["message"], USER]
        await found.ask(CHAT, {"messages": messages, "tools": [ADD]})
        assert len(found.session.dialogues) == 2

    asked(tokenizer, work, spoken(tokenizer, "Well.", "<|end|>"))


def test_the_same_prompt_after_an_empty_answer(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        counts = []
        for _ in range(3):
            _, said = await found.ask("/v1/completions", {"prompt": "1+1"})
            counts.append(said["usage"]["prompt_tokens"])
        assert counts == [3, 3, 3]

    asked(tokenizer, work, spoken(tokenizer, "", "<|end|>"))


def test_a_turn_that_was_begun_for_the_policy(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        begun = {"role": "assistant", "content": "The answer is"}
        status, said = await found.ask("/v1/messages", {"messages": [USER, begun], "max_tokens": 9})
        assert status == 400 and "not continued here" in said["error"]["message"]

    asked(tokenizer, work)


def test_a_body_that_is_not_what_it_says(tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        headers = {"Authorization": f"Bearer {found.key}", "Content-Encoding": "gzip"}
        status, said = await found.ask(CHAT, json.dumps({"messages": [USER]}).encode(), **headers)
        assert status == 400 and "cannot be read" in said["error"]["message"]

    asked(tokenizer, work)


def test_references_that_follow_themselves() -> None:
    """Each is followed once: as many as this would never end."""
    own = {"anyOf": [{"$ref": "#/properties/a"}] * 40 + [{"type": "integer"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": own}}}}]
    assert Tools(tools).typed("f", "a", "1") == 1
