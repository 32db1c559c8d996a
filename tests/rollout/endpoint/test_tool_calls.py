"""Tool calls: which form a template shows, what is a call in it, and that a turn which calls one goes back exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rollout.endpoint.call_forms import USUAL, form_of, forms
from hpcrl.rollout.endpoint.call_values import BROKEN, Tools
from hpcrl.rollout.endpoint.chat import answer
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.support.asked_endpoint import FORMS, AskedEndpoint, asked, form_model, spoken

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
WANTED = {"a": 1, "b": "x y"}


@pytest.fixture(scope="module", params=sorted(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(form: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return form_model(tmp_path_factory.mktemp(form), form)


def split(form: str, text: str, tools: list[Any] | None = None) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    found = next(one for one in forms() if one.name == form)
    left, calls = found.split(text, [ADD] if tools is None else tools)
    return left, [(call.name, call.arguments) for call in calls]


def test_template_says_the_form(form: str) -> None:
    """Of a template that shows several forms' marks the most particular is it; of one that shows none Hermes'."""
    assert form_of(FORMS[form].template).name == form
    assert form_of("{{ messages }}").name == USUAL == "hermes"


def test_a_call_is_found(form: str) -> None:
    """The call, with the types of the tool's schema, is taken out of the text; two are found in their order."""
    said = FORMS[form].said
    assert split(form, said) == ("Well.", [("add", WANTED)])
    twice = said + said.removeprefix("Well.")
    assert split(form, twice) == ("Well.", [("add", WANTED)] * 2)


def test_cut_calls_stay_text(form: str) -> None:
    """A call that is cut before its end is text, and no obstacle to one behind it."""
    said = FORMS[form].said
    for end in range(len(said)):
        left, calls = split(form, said[:end])
        assert (left, calls) == (said[:end], []) or calls == [("add", WANTED)]
    left, calls = split(form, said[: len(said) // 2] + said)
    assert [name for name, _ in calls] == ["add"] and left.startswith("Well.")


def test_spoilt_calls_are_no_error(form: str) -> None:
    """Whatever a model writes, calls are objects that JSON can spell, and nothing is raised."""
    draw, said = random.Random(form), FORMS[form].said
    pieces = ["<tool_call>", "</tool_call>", "{", "[" * 3000, '"', '"\\ud800"', "NaN", "1e999", "9" * 5000]
    pieces += ["<function=", "<arg_key>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "null", "\x00", said]
    for _ in range(400):
        text = said
        for _ in range(draw.randint(1, 3)):
            begin = draw.randrange(len(text))
            end = min(len(text), begin + draw.choice((0, 1, 9)))
            text = text[:begin] + draw.choice(pieces) + text[end:]
        for _, arguments in split(form, text)[1]:
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()


def test_many_broken_calls_are_text(form: str) -> None:
    """Where a model repeats the beginning of a call without end, only the first ones are looked at."""
    said = FORMS[form].said
    broken = said[: len(said) // 2]
    text = (broken + "<") * (BROKEN // 2) + said
    assert split(form, text)[1]
    assert split(form, (broken + "<") * (4 * BROKEN)) == ((broken + "<") * (4 * BROKEN), [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{no json}</tool_call>",
        f"<tool_call>{'[' * 100_000}</tool_call>",
        f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add"} or so</tool_call>',
    ],
)
def test_no_call_of_hermes(text: str) -> None:
    assert split("hermes", text) == (text, [])


def test_other_spellings_of_calls() -> None:
    """What models write besides: no arguments, marks inside of values, no outer tags, DeepSeek-V3.1, GLM-4.7."""
    assert split("hermes", '<tool_call>{"name": "add"}</tool_call>') == ("", [("add", {})])
    inside = '<tool_call>{"name": "add", "arguments": {"b": "}</tool_call>"}}</tool_call> then'
    assert split("hermes", inside) == (" then", [("add", {"b": "}</tool_call>"})])
    twice = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert split("hermes", twice) == ("", [("add", {"a": 1})])
    bare = "<function=add>\n<parameter=b>\n\n</tool_call>\n</parameter>\n</function>"
    assert split("qwen3_coder", bare) == ("", [("add", {"b": "\n</tool_call>"})])
    assert split("qwen3_coder", "<function=add>\n</function>") == ("", [("add", {})])
    assert split("glm4_moe", "<tool_call>add\n</tool_call>") == ("", [("add", {})])
    short = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert split("glm4_moe", short) == ("", [("add", {"a": 1})])
    later = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    assert split("deepseek_v3", later) == ("", [("add", {"a": 1})])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "number"}, "true", "true"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, '{"a": [null]}', {"a": [None]}),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"$ref": "#/$defs/part"}, '{"x": 1}', {"x": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "3", "3"),
        (None, "3", "3"),
        ({"type": 3}, "3", "3"),
        ({"$ref": "#/properties/v"}, "3", "3"),
    ],
)
def test_types_are_those_of_the_schema(schema: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"v": schema}, "$defs": {"part": {"type": "object"}}}
    tools = Tools([3, {}, {"function": {"name": "f", "parameters": parameters}}, {"function": "f"}])
    found = tools.typed("f", "v", text)
    assert found == value and type(found) is type(value)


def test_ids_are_the_models_where_it_writes_them() -> None:
    """Of two calls of one id the second gets another, so that its result can be told."""
    call = '<|tool_call_begin|>functions.add:4<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    form = form_of(FORMS["kimi_k2"].template)
    calls = answer(form, call + call, call + call, [ADD], 9)["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.add:4", "call_9_1"]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


# ---- a call, its result, and the next turn


def check(tokenizer: Tokenizer, form: str, found: AskedEndpoint) -> None:
    """One conversation, of which the first turn has the sampled tokens, and what the template writes behind it."""
    model, [dialogue] = FORMS[form], found.session.dialogues
    first = [*found.policy.tokens, found.policy.end]
    trajectory = dialogue.trajectory
    response = trajectory.tokens[len(trajectory.prompt) :]
    told = tokenizer.encode([model.told])[0].tolist()
    assert response == [*first, *told, *first]
    assert trajectory.loss_mask == [1] * len(first) + [0] * len(told) + [1] * len(first)
    again = tokenizer.encode([model.said])[0].tolist()
    assert again != found.policy.tokens, "the turn is not what its text encodes to"


def test_rounds_keep_their_tokens(form: str, tokenizer: Tokenizer) -> None:
    """A turn that calls a tool, sent back with the result as the client got it, continues with the sampled tokens."""

    async def work(found: AskedEndpoint) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1"}]
        status, said = await found.ask("/v1/chat/completions", {"messages": messages, "tools": [ADD]})
        assert status == 200, said
        choice = said["choices"][0]
        message = choice["message"]
        [call] = message["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] == "Well."
        assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == WANTED
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        status, said = await found.ask("/v1/chat/completions", {"messages": messages, "tools": [ADD]})
        assert status == 200, said
        check(tokenizer, form, found)
        # a history that was rewritten is read by the template, calls and all
        messages[0] = {"role": "user", "content": "2+2"}
        status, said = await found.ask("/v1/chat/completions", {"messages": messages, "tools": [ADD]})
        assert status == 200 and len(found.session.dialogues) == 2, said

    asked(tokenizer, work, spoken(tokenizer, FORMS[form].said, FORMS[form].end))


def test_no_call_with_tool_choice_none(form: str, tokenizer: Tokenizer) -> None:
    async def work(found: AskedEndpoint) -> None:
        body = {"messages": [{"role": "user", "content": "1+1"}], "tools": [ADD], "tool_choice": "none"}
        _, said = await found.ask("/v1/chat/completions", body)
        choice = said["choices"][0]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert "add" in choice["message"]["content"]

    asked(tokenizer, work, spoken(tokenizer, FORMS[form].said, FORMS[form].end))


def test_another_role_than_was_expected(tmp_path: Path) -> None:
    """A GLM turn that ended with the token of one role, when another one speaks: both are there."""
    tokenizer = form_model(tmp_path, "glm4_moe")

    async def work(found: AskedEndpoint) -> None:
        messages = [{"role": "user", "content": "1+1"}]
        _, said = await found.ask("/v1/chat/completions", {"messages": messages})
        messages += [said["choices"][0]["message"], {"role": "user", "content": "a"}]
        await found.ask("/v1/chat/completions", {"messages": messages})
        [dialogue] = found.session.dialogues
        text = tokenizer._hf.decode(dialogue.trajectory.tokens)
        assert text == "<|user|>1+1<|assistant|>no<|tool|><|user|>a<|assistant|>no<|tool|>"

    asked(tokenizer, work, spoken(tokenizer, "no", "<|tool|>"))
