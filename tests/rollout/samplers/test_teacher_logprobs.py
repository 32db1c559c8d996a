"""A teacher behind an address: exact ids out, log-probs back; what it cannot say is asked again, counted, or
refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from hpcrl.config.options import Options
from hpcrl.errors import DataError, HpcrlError, PeerError, UsageError
from hpcrl.rollout import remote_server
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest
from hpcrl.rollout.samplers.teacher_logprobs import KEY, Teacher, TeacherLogprobsSampler
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED
from hpcrl.utils.waiting import Pauses
from tests.support.shares import plain_sample
from tests.support.tiny import make_tokenizer

#: what the server answers to a question about a sample; None: what a teacher would say
Script = Callable[[int, dict[str, Any]], Any]


def logprob(token: int, place: int) -> float:
    return -0.5 - 0.01 * token - 0.001 * place


def said(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM answers /v1/completions with prompt_logprobs 0: nothing of the first token."""
    entries = [
        {str(t): {"logprob": logprob(t, i), "rank": 1, "decoded_token": "x"}} for i, t in enumerate(body["prompt"])
    ]
    return {"choices": [{"text": "", "prompt_logprobs": [None, *entries[1:]]}]}


class Server:
    """A vLLM server as far as a teacher needs one, in a thread."""

    def __init__(self, tokenizer: Tokenizer, script: Script = lambda number, body: None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._tokenizer = tokenizer
        self._script = script
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": "big"}, {"id": "other"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": self._tokenizer.encode([body["prompt"]])[0].tolist(), "count": 0})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        answer = self._script(len(self.bodies) - 1, body)
        if isinstance(answer, int):
            return web.json_response({"error": "no"}, status=answer)
        return web.json_response(said(body) if answer is None else answer)


def tokenizer(directory: Path, size: int) -> Tokenizer:
    make_tokenizer(size).save_pretrained(directory)
    (directory / "config.json").write_text(f'{{"vocab_size": {size}}}')
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("student"), 128)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "PAUSES", Pauses(0.01, 0.01))


def sample(number: int = 0, prompt: int = 3, answer: int = 4) -> Sample:
    tokens = np.arange(10 + number, 10 + number + prompt + answer, dtype=np.int32)
    return plain_sample(prompt, answer, group_index=number // 4, response_index=number % 4, tokens=tokens)


def mark(server: Server, own: Tokenizer, samples: list[Sample], **options: Any) -> None:
    """Show the samples to the teacher, as of rollout 5."""

    async def go() -> None:
        values = {"opd_teacher_url": server.url + "/v1/", "rollout_batch_size": 8, "n_samples_per_prompt": 1} | options
        teacher = Teacher(Options(**values), own)
        try:
            await teacher.check()
            for i, one in enumerate(samples):
                await teacher.mark(one, 5, f"train.jsonl, line {i}")
        finally:
            await teacher.close()

    asyncio.run(go())


def wanted(one: Sample) -> list[float]:
    first = len(one.array("tokens")) - one.response_length
    return [logprob(int(token), first + i) for i, token in enumerate(one.array("tokens")[first:])]


def test_logprobs_of_own_tokens(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample gets the teacher's log-probs of its own tokens."""
    monkeypatch.setenv(KEY, "secret")
    samples = [sample(0), sample(1, 1, 6), sample(2, 5, 1)]
    with Server(own) as server:
        mark(server, own, samples)
    for one, body in zip(samples, server.bodies, strict=True):
        assert body["prompt"] == one.array("tokens").tolist()
        assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("big", 0, 1)
        assert one.array("teacher_log_probs").dtype == np.float32 and not one.teacher_error
        assert one.teacher_log_probs == pytest.approx(wanted(one))
    assert server.keys == {"Bearer secret"}


def test_what_failed_is_asked_again(own: Tokenizer) -> None:
    one = sample()
    with Server(own, lambda number, body: (503, 429)[number] if number < 2 else None) as server:
        mark(server, own, [one], opd_teacher_model="other")
    assert len(server.bodies) == 3 and server.bodies[0]["model"] == "other"
    assert one.teacher_log_probs == pytest.approx(wanted(one)) and not one.teacher_error


def broken(body: dict[str, Any], value: Any) -> dict[str, Any]:
    """A good answer with something else in place of its last entry."""
    answer = said(body)
    answer["choices"][0]["prompt_logprobs"][-1] = value(body["prompt"][-1])
    return answer


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda number, body: 400, "in 1 attempts; the last: HTTP 400: "),
        (lambda number, body: 500, "in 10 attempts; the last: HTTP 500: "),
        (lambda number, body: {"choices": []}, "no completion"),
        (lambda number, body: {"choices": [{"text": "x"}]}, "log-probs of 0 tokens for a prompt"),
        (
            lambda number, body: broken(body, lambda token: {"3": {"logprob": -1.0}}),
            "nan as the log-prob",
        ),
        (
            lambda number, body: broken(body, lambda token: {str(token): {"logprob": -9999.0}}),
            "gave -9999.0 as the log-prob",
        ),
    ],
)
def test_what_stays_wrong_pulls_nowhere_and_is_counted(own: Tokenizer, script: Script, message: str) -> None:
    one = sample()
    with Server(own, script) as server:
        mark(server, own, [one], reward_max_failed=0.5)
    assert message in one.teacher_error
    assert one.teacher_log_probs == one.rollout_log_probs


def test_too_many_failures_end_the_run(own: Tokenizer) -> None:
    with (
        Server(own, lambda number, body: 400) as server,
        pytest.raises(
            HpcrlError,
            match="2 of the 8 gradings of rollout 5.*teacher failed, more than --reward-max-failed 0.1",
        ),
    ):
        mark(server, own, [sample(0), sample(1)])


def test_a_teacher_that_is_none_is_refused(own: Tokenizer) -> None:
    with Server(own) as server, pytest.raises(UsageError, match="not serve small;.*big, other"):
        mark(server, own, [], opd_teacher_model="small")
    other: Any = SimpleNamespace(encode=lambda texts: [own.encode(texts)[0][:-1]])
    with (
        Server(other) as server,
        pytest.raises(DataError, match="the teacher at.*another vocabulary"),
    ):
        mark(server, own, [])
    with pytest.raises(PeerError, match="did not answer /v1/models: Client"):
        mark(server, own, [])  # it is gone


def test_greedy_sample_is_not_scored(own: Tokenizer) -> None:
    """The teacher scores every finished sample but the greedy one."""

    class Maker:
        async def make(self, asked: ResponseRequest) -> list[Sample]:
            return [sample(i).replace(status=ABORTED if asked.index == 1 else COMPLETED) for i in range(2)]

    async def go(server: Server) -> list[list[Sample]]:
        teacher = Teacher(Options(opd_teacher_url=server.url), own)
        await teacher.check()
        generator, group = (
            TeacherLogprobsSampler(Maker(), teacher),
            type("Group", (), {"prompt": type("P", (), {"where": "train.jsonl, line 1"})}),
        )
        found = [await generator.make(ResponseRequest(group, index, 0, 0)) for index in (0, 1, GREEDY)]  # type: ignore[arg-type]
        await teacher.close()
        return found

    with Server(own) as server:
        shown, cut, greedy = asyncio.run(go(server))
    assert [one.has("teacher_log_probs") for one in (*shown, *cut, *greedy)] == [True, True, False, False, False, False]
