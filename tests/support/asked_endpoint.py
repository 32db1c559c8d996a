"""An endpoint with one response, asked over HTTP, in front of a policy that says what a test wants; and a model of each
form of tool calls, with a chat template of that form.

The tokenizer writes `add` and the marks of a form in one token each.  The policy says every character of its own, so
what it said is not what encoding its text again would give.
"""

from __future__ import annotations

import asyncio
import json
import re
import string
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from hpcrl.rollout.endpoint.server import Endpoint
from hpcrl.rollout.endpoint.session import ResponseContext, Session
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from tests.support.two_ways import Policy

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


@dataclass
class AskedEndpoint:
    """The endpoint's address and key, its session, and the policy behind it."""

    url: str
    key: str
    session: Session
    policy: Policy
    http: aiohttp.ClientSession
    endpoint: Endpoint = field(repr=False)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The request, to use with `async with`; the key as a bearer's unless other headers are given."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        sent = headers or {"Authorization": f"Bearer {self.key}"}
        return self.http.post(f"{self.url}{path}", data=data, headers=sent)

    async def ask(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """(status, answer)."""
        async with self.post(path, body, **headers) as answer:
            return answer.status, await answer.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """The server-sent events of an answer: (name, data), of text that is not JSON as it is."""
        async with self.post(path, body | {"stream": True}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream", await answer.text()
            return list(parsed(await answer.text()))


def parsed(text: str) -> Iterator[tuple[str, Any]]:
    """The events in a text; a comment has the name ":"."""
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            yield ":", block
            continue
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        yield lines.get("event", ""), json.loads(data) if data.startswith("{") else data


def asked(tokenizer: Tokenizer, work: Callable[[AskedEndpoint], Awaitable[None]], policy: Policy | None = None) -> None:
    """Run `work` against an endpoint with one session."""

    async def run() -> None:
        speaker, endpoint = policy or Policy(tokenizer), Endpoint()
        making = ResponseContext(Sampling(1.0, 4000, (), tuple(sorted(tokenizer.eos_ids))), ("train", 1), 7)
        session = Session(making, speaker, tokenizer, lambda: 2**20)  # type: ignore[arg-type]
        await endpoint.start()
        key = endpoint.open(session)
        async with aiohttp.ClientSession() as http:
            try:
                url = endpoint.base_url.removesuffix("/v1")
                await work(AskedEndpoint(url, key, session, speaker, http, endpoint))
            finally:
                await endpoint.stop()

    asyncio.run(run())


# ---- a model of each form


class FormModel(NamedTuple):
    """A form of calls as a model writes it.

    Attributes:
        template: a chat template of that form.
        said: a turn that calls `add` with a = 1 and b = "x y".
        end: what ends that turn.
        told: what the template writes between it and the next turn when the tool has answered "3".
    """

    template: str
    said: str
    end: str
    told: str


_OPENED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}"
_TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
_USUAL = _TURN + "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}" + _OPENED
_ANSWERED = "<|tool|>3<|end|><|assistant|>"

FORMS = {
    "hermes": FormModel(
        _TOOLS
        + "<tool_call>{}</tool_call><|end|>{% endif %}"
        + _USUAL.replace(
            "CALL", "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
        ),
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>',
        "<|end|>",
        _ANSWERED,
    ),
    "qwen3_coder": FormModel(
        _TOOLS
        + "<tool_call><function=f><parameter=p></parameter></function></tool_call><|end|>{% endif %}"
        + _USUAL.replace(
            "CALL",
            "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
            "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function></tool_call>",
        ),
        "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
        "</function>\n</tool_call>",
        "<|end|>",
        _ANSWERED,
    ),
    "glm4_moe": FormModel(  # a turn is ended by the role that speaks next
        _TOOLS
        + "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>{% endif %}"
        + _TURN
        + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}{% endfor %}" + _OPENED,
        "Well.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x y</arg_value>\n</tool_call>",
        "<|tool|>",
        "3<|assistant|>",
    ),
    "deepseek_v3": FormModel(  # the answer of a tool opens the next turn
        "{% for m in messages %}{% if m.role == 'tool' %}<|tool|>{{ m.content }}<｜tool▁outputs▁end｜>{% else %}"
        "<|{{ m.role }}|>{{ m.content }}{% if 'tool_calls' in m %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments "
        "+ '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>{% endif %}",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x y"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<|end|>",
        "<|tool|>3<｜tool▁outputs▁end｜>",
    ),
    "kimi_k2": FormModel(  # the answer of a tool names the call as the model has
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}{{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}<|end|>{% endfor %}" + _OPENED,
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": "x y"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|end|>",
        "<|tool|>functions.add:0\n3<|end|><|assistant|>",
    ),
    "minimax_m2": FormModel(  # a tool's answer behind a turn that called none is refused
        _TOOLS
        + '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call><|end|>{% endif %}'
        + "{% for m in messages %}{% if m.role == 'tool' and not (loop.previtem.tool_calls or loop.previtem.role == 'tool') "
        "%}{{ raise_exception('no call') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<minimax:tool_call><invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
        '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke>'
        "</minimax:tool_call>{% endfor %}<|end|>{% endfor %}" + _OPENED,
        'Well.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">x y</parameter>\n</invoke>\n</minimax:tool_call>',
        "<|end|>",
        _ANSWERED,
    ),
}

_MARK = re.compile(r"<[|｜][^|｜<>]+[|｜]>")


def form_model(path: Path, name: str) -> Tokenizer:
    """A tokenizer with the template of that form; the marks of calls are special tokens of Kimi's model alone."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    form = FORMS[name]
    marks = sorted(set(_MARK.findall(form.template + form.said)) - set(ROLES) - {"<|end|>"})
    letters = ["add", *(c for c in string.printable if c not in "\r\x0b\x0c")]
    words = {word: i for i, word in enumerate(["<|unk|>", "<|end|>", *ROLES, *marks, *letters])}
    inner = Fast(models.WordLevel(words, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"add|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", unk_token="<|unk|>", additional_special_tokens=list(ROLES)
    )
    fast.add_tokens([AddedToken(mark, special=name == "kimi_k2", normalized=False) for mark in marks])
    fast.chat_template = form.template
    fast.save_pretrained(path)
    ends = [words["<|end|>"], *(words[role] for role in ROLES[1:] if form.end != "<|end|>")]
    config = {"vocab_size": len(words), "max_position_embeddings": 4096, "eos_token_id": ends}
    (path / "config.json").write_text(json.dumps(config))
    return Tokenizer(path)


def spoken(tokenizer: Tokenizer, text: str, end: str = "<|end|>") -> Policy:
    """A policy that says a text, a token for each mark and for each other character."""
    policy = Policy(tokenizer, re.findall(rf"{_MARK.pattern}|[\s\S]", text))
    policy.end = tokenizer._hf.convert_tokens_to_ids(end)
    return policy
