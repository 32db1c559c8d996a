"""Every field of every route with what does not belong there: an error that says so, or an answer, and never a
defect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_endpoint import FORMS, AskedEndpoint, asked, form_model, spoken

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "max_tokens": 9,
        "stop": ["zz"],
        "logprobs": True,
        "temperature": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": [3, 4], "max_tokens": 9, "stop": "q", "logprobs": 0, "stream": True},
    "/v1/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["zz"],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "a"},
        "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "1"}], "system": "a"},
    "/v1/tokens": {"tokens": [3, 4], "sampling_params": {"max_new_tokens": 3, "stop": ["a"]}},
    "/KEY/generate": {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True},
    "/KEY/inference/v1/generate": {"token_ids": [3, 4], "sampling_params": {"max_tokens": 3}},
}
DEEP: list[Any] = []
for _ in range(700):
    DEEP = [DEEP]
VALUES = [None, 0, -1, 2**70, 1.5, True, "", "a", "\ud800", [], {}, [None], [{}], {"a": 1}, DEEP]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def spoilt(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(body)
    inner: Any = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return whole


@pytest.mark.parametrize("path", REQUESTS)
def test_no_field_is_a_defect(path: str, tmp_path: Path) -> None:
    tokenizer = form_model(tmp_path, "glm4_moe")

    async def work(found: AskedEndpoint) -> None:
        statuses = set()
        for place in places(REQUESTS[path]):
            for value in VALUES:
                body = json.dumps(spoilt(REQUESTS[path], place, value)).encode()
                async with found.post(path.replace("KEY", found.key), body) as answer:
                    text = await answer.text()
                    assert answer.status in (200, 400), (body, text)
                    if answer.status == 400:
                        assert json.loads(text)["error"]["message"], body
                    elif answer.content_type == "text/event-stream":
                        assert "[DONE]" in text or "message_stop" in text, (body, text)
                statuses.add(answer.status)
            found.session.dialogues.clear()
            found.session.requests = 0
        assert statuses == {200, 400}
        assert found.session.broken is None and not found.session.in_flight

    asked(tokenizer, work, spoken(tokenizer, FORMS["glm4_moe"].said, FORMS["glm4_moe"].end))
