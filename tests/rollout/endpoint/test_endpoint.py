"""The OpenAI-compatible endpoint: which requests go on with which conversation, with the very tokens, and who is let
in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcrl.errors import PeerError
from hpcrl.rollout.endpoint.call_forms import form_of
from hpcrl.rollout.endpoint.chat import answer, for_template
from hpcrl.rollout.endpoint.server import LARGEST, Endpoint
from hpcrl.rollout.endpoint.session import ResponseContext, Session
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.trajectory import continuation
from hpcrl.utils.sample_parts import ABORTED
from tests.support.two_ways import Policy, make_model, words

SAMPLING = Sampling(1.0, 40, (), (1,))
Ask = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_model(tmp_path_factory.mktemp("model")))


def served(tokenizer: Tokenizer, work: Callable[[Ask, Session, Policy], Awaitable[None]], context: int = 256) -> None:
    """Run `work` against an endpoint with one session."""

    async def run() -> None:
        policy, endpoint = Policy(tokenizer), Endpoint()
        session = Session(ResponseContext(SAMPLING, ("train", 1), 7), policy, tokenizer, lambda: context)  # type: ignore[arg-type]
        await endpoint.start()
        key = endpoint.open(session)
        async with aiohttp.ClientSession() as http:

            async def ask(path: str, body: Any, key: str = key) -> tuple[int, dict[str, Any]]:
                data = body if isinstance(body, bytes) else json.dumps(body)
                async with http.post(
                    f"{endpoint.base_url}/{path}", data=data, headers={"Authorization": f"Bearer {key}"}
                ) as answer:
                    return answer.status, await answer.json()

            try:
                await work(ask, session, policy)
                endpoint.close(key)
                assert (await ask("tokens", {"tokens": [7]}))[0] == 401, "the key ends with its response"
            finally:
                await endpoint.stop()

    asyncio.run(run())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_continued_chat_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    """A continued chat keeps its tokens, and another begins a new conversation."""

    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        status, first = await ask(
            "chat/completions", {"messages": [user("1+1")], "temperature": 1, "user": "me", "max_tokens": 9}
        )
        message = first["choices"][0]["message"]
        assert (status, message, first["choices"][0]["finish_reason"]) == (
            200,
            {"role": "assistant", "content": "ab"},
            "stop",
        )
        # as clients send it back: content in parts, fields of theirs, a space
        again = {"role": "assistant", "content": [{"type": "text", "text": "ab "}], "refusal": None}
        _, second = await ask("chat/completions", {"messages": [user("1+1"), again, user("more")]})
        assert second["usage"]["prompt_tokens"] == 6 + 3 + 7 and len(session.dialogues) == 1
        told = ["<|user|>", "m", "o", "r", "e", "<|end|>", "<|assistant|>"]
        trajectory = session.dialogues[0].trajectory
        assert words(tokenizer, trajectory.tokens[6:]) == ["a", "b", "<|end|>", *told, "a", "b", "<|end|>"]
        assert trajectory.loss_mask == [1] * 3 + [0] * 7 + [1] * 3
        # a history that was rewritten is another conversation, whose own turns alone are learned
        await ask("chat/completions", {"messages": [user("1+1"), {"role": "assistant", "content": "b"}, user("more")]})
        assert len(session.dialogues) == 2 and session.dialogues[1].trajectory.loss_mask == [1] * 3
        # the same request once more: another conversation with noise of its own
        await ask("chat/completions", {"messages": [user("1+1")]})
        assert len(session.dialogues) == 3 and len({seed for _, _, seed in policy.asked}) == 4

    served(tokenizer, work)


def test_completions_go_on_by_text_and_by_tokens(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        policy.end = tokenizer.encode(["c"])[0][0]
        _, first = await ask("completions", {"prompt": "1+1=", "stop": "c"})
        assert first["choices"][0]["text"] == "ab", "without what ended it, as OpenAI has it"
        await ask("completions", {"prompt": "1+1=abc<a>"})
        assert words(tokenizer, session.dialogues[0].trajectory.tokens) == [
            *"1+1=",
            "a",
            "b",
            "c",
            *"<a>",
            "a",
            "b",
            "c",
        ]
        tokens = tokenizer.encode(["m"])[0].tolist()
        await ask("completions", {"prompt": tokens})
        await ask("completions", {"prompt": [*session.dialogues[1].trajectory.tokens, *tokens]})
        assert words(tokenizer, session.dialogues[1].trajectory.tokens) == ["m", "a", "b", "c", "m", "a", "b", "c"]
        assert session.dialogues[1].trajectory.loss_mask == [1, 1, 1, 0, 1, 1, 1]

    served(tokenizer, work)


def test_room_is_that_of_the_whole_response(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        messages = [user("1+1")]
        for _ in range(4):  # 3 tokens, then 10 a turn: 33 of 40
            _, answer = await ask("chat/completions", {"messages": messages})
            messages += [answer["choices"][0]["message"], user("more")]
        status, answer = await ask("chat/completions", {"messages": messages})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert session.dialogues[0].trajectory.finish == "length"
        status, answer = await ask("tokens", {"tokens": [7] * 256})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    served(tokenizer, work)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", {"messages": [user("a")], "n": 2}, "$.n`"),
        ("chat/completions", {"messages": [user("a")], "n": True}, "$.n`"),
        (
            "chat/completions",
            {"messages": [user("a")], "temperature": 0.0},
            "run samples at 1",
        ),
        ("chat/completions", {"messages": [user("a")], "top_p": 0.9}, "top_p 0.9 is not served"),
        ("chat/completions", {"messages": [user("a")], "seed": 3}, "field `seed`"),
        (
            "chat/completions",
            {"messages": [user("a")], "response_format": {"type": "json_object"}},
            "$.response_format.type`",
        ),
        (
            "chat/completions",
            {"messages": [user("a")], "tool_choice": "required"},
            "$.tool_choice`",
        ),
        ("chat/completions", {"messages": [user("a")], "tool_choice": {"type": "function"}}, "$.tool_choice`"),
        ("chat/completions", {"messages": [user("a")], "tools": 3}, "$.tools`"),
        ("chat/completions", {"messages": [user("a")], "tools": {}}, "$.tools`"),
        ("chat/completions", {"messages": [user("a")], "tools": [{}]}, "$.tools[0]`"),
        (
            "chat/completions",
            {"messages": [user("a")], "tools": [{"type": "function", "function": 3}]},
            "$.tools[0].function`",
        ),
        ("chat/completions", {"messages": [user("a")], "stop": 3}, "$.stop`"),
        ("chat/completions", {"messages": [user("a")], "stop": ["a", ""]}, "$.stop[1]`"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls is not"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "tool_calls is"),
        ("chat/completions", {"messages": [{"role": 3, "content": "a"}]}, "object with a role"),
        ("chat/completions", {"messages": [user("a")], "max_tokens": "9"}, "$.max_tokens`"),
        ("completions", {"prompt": 3}, "$.prompt`"),
        ("completions", {"prompt": [7, "a"]}, "it has 'a'"),
        ("completions", {"prompt": [7, True]}, "it has True"),
        (
            "chat/completions",
            {"messages": [user("a")], "logprobs": True, "top_logprobs": 3},
            "$.top_logprobs`",
        ),
        ("chat/completions", {"messages": [user("a")], "logprobs": 1}, "$.logprobs`"),
        ("chat/completions", {"messages": [user("a")], "frequency_penalty": 0.5}, "$.frequency_penalty`"),
        ("chat/completions", {"messages": [user("a")], "prompt": "a"}, "field `prompt`"),
        ("completions", {"prompt": "a", "logprobs": 2}, "$.logprobs`"),
        ("completions", {"prompt": "a", "max_completion_tokens": 2}, "field `max_completion_tokens`"),
        ("chat/completions", {"messages": []}, "$.messages`"),
        ("chat/completions", {"messages": ["a"]}, "$.messages[0]`"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "neither text nor"),
        ("chat/completions", {"messages": [user("a")], "max_tokens": 0}, "$.max_tokens`"),
        ("completions", {"prompt": ["a", "b"]}, "neither one text nor"),
        ("completions", {"prompt": [7, 900]}, "token id below 64"),
        ("tokens", {"tokens": [True]}, "not a token id"),
        ("tokens", {"tokens": [7], "sampling_params": {"temperature": 0.1}}, "cannot be trained on"),
        ("tokens", {"tokens": [7], "sampling_params": {"best_of": 3}}, "sampling_params has 'best_of'"),
        ("tokens", b"{", "body is not JSON"),
        ("tokens", b"[1]", "not a JSON object"),
    ],
)
def test_what_is_not_served_is_said(tokenizer: Tokenizer, path: str, body: Any, says: str) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        status, answer = await ask(path, body)
        assert status == 400 and says in answer["error"]["message"], answer
        assert not policy.asked and not session.dialogues and session.broken is None

    served(tokenizer, work)


def test_what_changes_nothing_may_be_said(tokenizer: Tokenizer) -> None:
    usual = {
        "model": "gpt",
        "n": 1,
        "stream": False,
        "top_p": 1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tool_choice": "none",
    }
    more = {"seed": None, "response_format": {"type": "text"}, "parallel_tool_calls": True, "metadata": {"a": "b"}}

    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        status, answer = await ask("chat/completions", {"messages": [user("a")]} | usual | more)
        assert status == 200 and answer["choices"][0]["logprobs"] is None, answer

    served(tokenizer, work)


def test_log_probs_are_those_of_the_sampled_tokens(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        _, answer = await ask("chat/completions", {"messages": [user("1+1")], "logprobs": True})
        rows = answer["choices"][0]["logprobs"]["content"]
        assert [(row["token"], row["logprob"], row["top_logprobs"]) for row in rows] == [
            ("a", -0.125, []),
            ("b", -0.25, []),
            ("<|end|>", -0.375, []),
        ]
        assert bytes(rows[2]["bytes"]) == b"<|end|>"
        _, answer = await ask("completions", {"prompt": "1+1", "logprobs": 0})
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "b", "<|end|>"],
            "token_logprobs": [-0.125, -0.25, -0.375],
            "top_logprobs": None,
            "text_offset": [0, 1, 2],
        }
        session.making = replace(session.making, sampling=replace(SAMPLING, logprobs=False))  # as evaluations sample
        await ask("chat/completions", {"messages": [user("+")]})
        await ask("chat/completions", {"messages": [user("+")], "logprobs": True})
        assert [sampling.logprobs for _, sampling, _ in policy.asked[-2:]] == [False, True]

    served(tokenizer, work)


def test_special_tokens_stay_in_the_sample(tokenizer: Tokenizer) -> None:
    """Special tokens are left out of the answer and stay in the sample."""

    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        policy.tokens = tokenizer._hf.convert_tokens_to_ids(["a", "<|assistant|>", "b"])
        _, first = await ask("chat/completions", {"messages": [user("1+1")]})
        message = first["choices"][0]["message"]
        assert message["content"] == "ab"
        await ask("chat/completions", {"messages": [user("1+1"), message, user("more")]})
        said = ["a", "<|assistant|>", "b", "<|end|>"]
        assert len(session.dialogues) == 1 and words(tokenizer, session.dialogues[0].trajectory.tokens[6:10]) == said
        _, first = await ask("completions", {"prompt": "1+1="})
        assert first["choices"][0]["text"] == "ab"
        await ask("completions", {"prompt": "1+1=ab<a>"})
        assert len(session.dialogues) == 2 and words(tokenizer, session.dialogues[1].trajectory.tokens[4:8]) == said

    served(tokenizer, work)


def test_a_route_that_is_not_there_is_named(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        for path in ("responses", "embeddings", "models"):  # the last is asked with GET
            status, answer = await ask(path, {})
            assert status == 404 and (
                f"POST /v1/{path}" in answer["error"]["message"]
                and "served: there are POST /v1/chat/comp" in answer["error"]["message"]
            )

    served(tokenizer, work)


def test_calls_marked_by_special_tokens() -> None:
    """Tool calls are found although their marks are special tokens."""
    form, tools = form_of(""), [{}]
    whole = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    [call] = answer(form, '{"name": "add", "arguments": {}}', whole, tools, 3)["tool_calls"]
    assert (call["id"], call["function"]) == ("call_3_0", {"name": "add", "arguments": "{}"})
    assert (
        answer(form, "text", "text<|x|>", tools, 3)
        == answer(form, "text", "text<|x|>", None, 3)
        == {"role": "assistant", "content": "text"}
    )


def test_keys_sizes_and_engines(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        for key in ("", "hpcrl-", "x" * 40):
            assert (await ask("tokens", {"tokens": [7]}, key))[0] == 401
        assert (await ask("tokens", b" " * (LARGEST + 1)))[0] == 413
        policy.broken = PeerError("engine-0 answered a completion without tokens")
        status, answer = await ask("tokens", {"tokens": [7]})
        assert status == 503 and "engine-0" in answer["error"]["message"] and session.broken is policy.broken
        policy.broken = None
        policy.status = ABORTED
        status, answer = await ask("tokens", {"tokens": [7]})
        assert (status, answer["error"]["code"], session.ended) == (400, "ended_early", True)

    served(tokenizer, work)


def test_calls_as_templates_read_them() -> None:
    """Arguments are objects, or JSON where the form's templates join them to text; what is no JSON stays as it is."""
    deep = "[" * 100_000
    objects, texts = form_of(""), form_of("<｜tool▁calls▁begin｜><｜tool▁sep｜>")
    for form, given, wanted in (
        (objects, '{"a": 1}', {"a": 1}),
        (objects, {"a": 1}, {"a": 1}),
        (objects, deep, deep),
        (texts, '{"a": 1}', '{"a": 1}'),
        (texts, {"a": 1}, '{"a": 1}'),
        (texts, None, "{}"),
    ):
        call = {"function": {"name": "add", "arguments": given}}
        [shown] = for_template([{"role": "assistant", "content": None, "tool_calls": [call]}], form)
        assert shown["content"] == ("" if form is objects else None)
        assert shown["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": wanted}}]
    [shown] = for_template([{"role": "developer", "content": "a", "tool_calls": None}], objects)
    assert shown == {"role": "system", "content": "a"}


def test_incomplete_template_cannot_continue(tmp_path: Path) -> None:
    """A chat that the template leaves parts out of cannot be continued."""
    tokenizer = Tokenizer(make_model(tmp_path, "{{ messages[-1]['content'] }}"))
    with pytest.raises(ValueError, match="earlier turns of the"):
        continuation(tokenizer, [user("a")], [user("b")], 1)


# ---- as slime's router


def routed(tokenizer: Tokenizer, work: Callable[[Ask, Session, Policy], Awaitable[None]]) -> None:
    """Run `work` with what asks the routes that have the key in their path, and no header."""

    async def run() -> None:
        policy, endpoint = Policy(tokenizer), Endpoint()
        session = Session(ResponseContext(SAMPLING, ("train", 1), 7), policy, tokenizer, lambda: 2**20)  # type: ignore[arg-type]
        await endpoint.start()
        key = endpoint.open(session)
        async with aiohttp.ClientSession() as http:

            async def ask(path: str, body: Any, key: str = key) -> tuple[int, dict[str, Any]]:
                async with http.post(f"{endpoint.base_url.removesuffix('/v1')}/{key}/{path}", json=body) as answer:
                    return answer.status, await answer.json()

            try:
                await work(ask, session, policy)
            finally:
                await endpoint.stop()

    asyncio.run(run())


def test_slimes_router_answers_as_sglang(tokenizer: Tokenizer) -> None:
    """Token ids or text in; text with or without what ended it, log-probs where they were asked for."""

    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        ids = tokenizer.encode(["1+1="])[0].tolist()
        params = {"temperature": 1.0, "max_new_tokens": 8, "skip_special_tokens": False, "no_stop_trim": True}
        status, by_ids = await ask("generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True})
        assert status == 200 and by_ids["text"] == "ab<|end|>" and by_ids["output_ids"] == [*policy.tokens, policy.end]
        meta = by_ids["meta_info"]
        assert [item[:2] for item in meta["output_token_logprobs"]] == [
            [-(n + 1) / 8, token] for n, token in enumerate(by_ids["output_ids"])
        ]
        assert meta["finish_reason"] == {"type": "stop", "matched": policy.end}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (4, 3, "8")
        status, by_text = await ask("generate", {"text": "1+1=", "sampling_params": {"max_new_tokens": 2}})
        assert by_text["text"] == "ab" and "output_token_logprobs" not in by_text["meta_info"]
        assert by_text["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
        assert policy.asked[0][0] == policy.asked[1][0] == ids
        policy.status = ABORTED
        status, ended = await ask("generate", {"input_ids": ids, "sampling_params": params})
        assert status == 200 and ended["meta_info"]["finish_reason"]["type"] == "abort" and session.ended

    routed(tokenizer, work)


def test_slimes_router_refuses_what_it_does_not_do(tokenizer: Tokenizer) -> None:
    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        for path, body, word in (
            ("generate", {}, "input_ids"),
            ("generate", {"text": "1", "input_ids": [7]}, "input_ids"),
            ("generate", {"text": ["1", "2"]}, "text"),
            ("generate", {"input_ids": [[7], [8]]}, "one list"),
            ("generate", {"text": "1", "image_data": ["x"]}, "image_data"),
            ("generate", {"text": "1", "stream": True}, "stream"),
            ("generate", {"text": "1", "sampling_params": {"temperature": 0.5}}, "temperature"),
            ("generate", {"text": "1", "sampling_params": {"n": 2}}, "n 2"),
            ("generate", {"text": "1", "sampling_params": {"regex": "a"}}, "regex"),
            ("inference/v1/generate", {"sampling_params": {}}, "token ids"),
        ):
            status, answer = await ask(path, body)
            assert status == 400 and word in answer["error"]["message"], (body, answer)
        assert not policy.asked
        assert (await ask("generate", {"text": "1"}, "hpcrl-other"))[0] == 401

    routed(tokenizer, work)


def test_a_key_in_the_path_proves_its_connection(tokenizer: Tokenizer) -> None:
    """A body that is larger than what a stranger may send is read."""

    async def work(ask: Ask, session: Session, policy: Policy) -> None:
        status, answer = await ask("generate", {"input_ids": [7] * 200_000, "sampling_params": {"max_new_tokens": 8}})
        assert status == 200 and answer["meta_info"]["prompt_tokens"] == 200_000

    routed(tokenizer, work)
