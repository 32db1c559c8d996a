"""The client of the engines: balance, retries, deadlines, and answers that are none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import DataError, DeadlineError, HpcrlError, PeerError, UsageError
from hpcrl.plan import Location, Plan
from hpcrl.rollout.engines import engine_client
from hpcrl.rollout.engines.completion import Completion, Sampling, seed_of
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import RATIO, SLACK, EnginePool, PooledEngine
from hpcrl.rollout.evaluation.evaluator import sampling_of
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampler import ResponseRequest, SingleTurnSampler
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import make_keys
from hpcrl.transport.token_frames import SampleAnswer, encode
from hpcrl.utils.sample_parts import ABORTED, COMPLETED, TRUNCATED
from hpcrl.utils.waiting import Pauses
from tests.support.fake_engine import CUT, FakeEngine, Script, good, hang, keys_of, until_aborted

SAMPLING = Sampling(temperature=1.0, max_tokens=8, stop=(), stop_token_ids=(1,))
PROMPT = np.asarray([3, 20, 21], np.int32)


class Bench:
    """Fake engines, a run directory in which they are published, and one job against them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.stack = stack
        self.engines: list[FakeEngine] = []

    def run(
        self,
        job: Callable[[EngineClient, EnginePool], Any],
        *scripts: Script | None,
        model_len: int | None = None,
        **options: Any,
    ) -> Any:
        rundir = RunDir.create(self.path / "run")
        rundir.make_attempt()
        make_keys(rundir, 1)
        self.engines = [self.stack.enter_context(FakeEngine(script, keys_of(rundir))) for script in scripts]
        for index, engine in enumerate(self.engines):
            publish(rundir, EnginePeer(host="127.0.0.1", port=engine.port, model_len=model_len), index)
        places = tuple(Location("node7", (i,)) for i in range(len(scripts)))
        plan = Plan("test", 0, (Location("node7", (0,)),), places, Location("node7", ()))

        async def go() -> Any:
            pool = EnginePool(rundir, plan, Options(**({"request_timeout": 60, "attempts": 1} | options)))
            try:
                await pool.connect()
                return await job(EngineClient(pool, 128), pool)
            finally:
                await pool.close()

        return asyncio.run(go())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path, stack)


def bare_pool(engines: int, limit: int) -> EnginePool:
    """A pool of engines that nobody talks to."""
    plan: Any = SimpleNamespace(engines=(), external=())
    pool = EnginePool(SimpleNamespace(), plan, Options(rollout_server_concurrency=limit))  # type: ignore[arg-type]
    for index in range(engines):
        pool._welcome(PooledEngine(index, "host", "http://host", "log", number=index))
    return pool


async def one(generator: EngineClient, pool: EnginePool) -> Completion:
    return await generator.complete(PROMPT, SAMPLING, 11, version=4)


def many(count: int) -> Callable[[EngineClient, EnginePool], Any]:
    async def job(generator: EngineClient, pool: EnginePool) -> list[Completion]:
        return list(await asyncio.gather(*(generator.complete(PROMPT, SAMPLING, seed, 4) for seed in range(count))))

    return job


def test_a_good_answer(bench: Bench) -> None:
    found = bench.run(one, None)
    (body,) = bench.engines[0].bodies
    assert body["token_ids"] == [3, 20, 21]
    expected = {
        "n": 1,
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": [1],
        "detokenize": False,
        "logprobs": 0,
        "seed": 11,
    }
    assert body["sampling_params"] == expected
    choice = good(body)["choices"][0]
    assert found.tokens.tolist() == choice["token_ids"] and found.tokens.dtype == np.int32
    assert found.logprobs.tolist() == [np.float32(c["logprob"]) for c in choice["logprobs"]["content"]]
    assert found.versions.tolist() == [4] * len(found.tokens), (
        "an engine that says nothing answers under the version of the call"
    )
    assert found.status == {"stop": COMPLETED, "length": TRUNCATED}[choice["finish_reason"]]


def test_versions_are_the_engines_own(bench: Bench) -> None:
    def spans(engine: FakeEngine, count: int, body: dict[str, Any]) -> dict[str, Any]:
        answer = good(body)
        n = len(answer["choices"][0]["token_ids"])
        answer["choices"][0]["weight_versions"] = [
            {"version": "2", "start": 0, "end": 1},
            {"version": "3", "start": 1, "end": n},
        ]
        return answer

    found = bench.run(one, spans)
    assert found.versions.tolist() == [2] + [3] * (len(found.tokens) - 1)


def test_the_context_bounds_the_response(bench: Bench) -> None:
    bench.run(one, None, model_len=5)
    assert bench.engines[0].bodies[0]["sampling_params"]["max_tokens"] == 2


def test_a_prompt_that_fills_the_context_is_an_error(bench: Bench) -> None:
    with pytest.raises(DataError, match="prompt of 3 tokens leaves no room.*3"):
        bench.run(one, None, model_len=3)


def test_requests_are_spread_and_bounded(bench: Bench) -> None:
    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)  # all five of an engine come meanwhile

    found = bench.run(many(60), slow, slow, rollout_server_concurrency=5)
    assert len(found) == 60
    assert [e.most_in_flight for e in bench.engines] == [5, 5]
    assert sum(len(e.bodies) for e in bench.engines) == 60
    assert min(len(e.bodies) for e in bench.engines) >= 10


def test_the_least_loaded_engine_is_next(bench: Bench) -> None:
    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        prompts = [np.asarray([3, 20 + i], np.int32) for i in range(24)]
        await asyncio.gather(*(generator.complete(prompt, SAMPLING, 1, 4) for prompt in prompts))

    bench.run(job, slow, slow)
    assert [len(e.bodies) for e in bench.engines] == [12, 12]


def test_who_waits_no_more_is_passed_over(bench: Bench) -> None:
    held = threading.Event()

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        first, second, third = (asyncio.create_task(generator.complete(PROMPT, SAMPLING, seed, 4)) for seed in range(3))
        while bench.engines[0].in_flight < 1:
            await asyncio.sleep(0.01)
        second.cancel()
        held.set()
        await asyncio.wait_for(asyncio.gather(first, third), 20)
        assert [body["sampling_params"]["seed"] for body in bench.engines[0].bodies] == [0, 2]

    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        while not held.is_set():
            await asyncio.sleep(0.01)

    bench.run(job, slow, rollout_server_concurrency=1)


def test_an_engine_that_dies_hands_over(bench: Bench) -> None:
    def dies(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        engine.healthy = False
        return CUT

    found = bench.run(many(40), dies, None, rollout_server_concurrency=4)
    assert len(found) == 40
    seeds = sorted(body["sampling_params"]["seed"] for body in bench.engines[1].bodies)
    assert seeds == list(range(40)), "the living engine answers all, each once"
    assert 1 <= len(bench.engines[0].bodies) <= 4, "nothing more goes to the dead one"


def test_the_last_dead_engine_is_named(bench: Bench) -> None:
    def dies(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        engine.healthy = False
        return CUT if len(engine.bodies) % 2 else web.json_response({"error": "EngineCore died"}, status=500)

    with pytest.raises(PeerError) as caught:
        bench.run(many(9), dies, dies, rollout_server_concurrency=2)
    assert "no engine is left: engine-0 on node7 died" in str(caught.value)
    assert "engine-1 on node7 died" in str(caught.value) and "engine-1.log" in str(caught.value)


def test_waiting_requests_hear_that_no_engine_is_left(bench: Bench) -> None:
    async def dies(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.05)
        engine.healthy = False
        return CUT

    async def job(generator: EngineClient, pool: EnginePool) -> list[Any]:
        asked = (generator.complete(PROMPT, SAMPLING, seed, 4) for seed in range(20))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)

    found = bench.run(job, dies, rollout_server_concurrency=1)
    assert len(found) == 20 and all(isinstance(e, PeerError) for e in found)


def test_a_passing_trouble_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PAUSES", Pauses(0.001, 0.001))

    def shaky(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return [CUT, web.json_response({"error": "try later"}, status=503), None][min(count, 2)]

    bench.run(one, shaky)
    assert len(bench.engines[0].bodies) == 3
    assert len({str(body) for body in bench.engines[0].bodies}) == 1, "the same request, with the same seed"


def test_a_lasting_trouble_ends_after_a_few_attempts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PAUSES", Pauses(0.001, 0.001))
    broken = lambda *_: web.json_response({"error": "no CUDA memory"}, status=500)  # noqa: E731
    with pytest.raises(PeerError, match="engine-0 on node7 failed a request 4 times.*no CUDA memory"):
        bench.run(one, broken)


def test_a_refused_request_is_not_tried_again(bench: Bench) -> None:
    refuse = lambda *_: web.json_response({"error": "Token id 5000 is out of vocabulary"}, status=400)  # noqa: E731
    with pytest.raises(
        PeerError, match=r"engine-0 on node7 refused (/inference/v1|/hpcrl)/generate: HTTP 400.*out of vocabulary"
    ):
        bench.run(one, refuse)
    assert len(bench.engines[0].bodies) == 1


def test_a_slow_engine_meets_the_deadline(bench: Bench) -> None:
    with pytest.raises(DeadlineError, match=r"engine-0 on node7 did not answer .* within --request-timeout 0.2 s"):
        bench.run(one, hang, request_timeout=0.2)


def test_a_cancelled_request_leaves_its_engine(bench: Bench) -> None:
    async def job(generator: EngineClient, pool: EnginePool) -> None:
        tasks = [asyncio.create_task(generator.complete(PROMPT, SAMPLING, seed, 4)) for seed in range(6)]
        while bench.engines[0].in_flight < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [e.in_flight for e in pool.engines] == [0]
        for _ in range(100):
            if bench.engines[0].in_flight == 0:
                return
            await asyncio.sleep(0.02)
        pytest.fail("the engine still works for nobody")

    bench.run(job, hang, rollout_server_concurrency=2)


def test_an_engine_that_never_comes_up_is_named(bench: Bench, tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    plan = Plan("test", 0, (), (Location("node7", (0,)),), Location("node7", ()))
    with pytest.raises(
        DeadlineError, match=r"engine-0 on node7.*not come up within --engine-start-timeout 0 s; see.*engine-0\.log"
    ):
        asyncio.run(EnginePool(rundir, plan, Options(engine_start_timeout=0.2)).connect())
    rundir.fail("engine", 0, "no such model")
    with pytest.raises(PeerError, match="engine-0: no such model"):
        asyncio.run(EnginePool(rundir, plan, Options(engine_start_timeout=60)).connect())


def broken(**fields: Any) -> Script:
    """A good answer with some fields of its choice replaced."""

    def script(engine: FakeEngine, count: int, body: dict[str, Any]) -> dict[str, Any]:
        answer = good(body)
        choice = answer["choices"][0]
        choice.update({key: value(choice) if callable(value) else value for key, value in fields.items()})
        return answer

    return script


def content(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def make(choice: dict[str, Any]) -> dict[str, Any]:
        change(choice["logprobs"]["content"])
        return choice["logprobs"]

    return make


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda *_: web.Response(body=b"\xff<html>"), "no completion"),
        (broken(token_ids=[5, 128]), "token id 128, outside the model's vocabulary"),
        (broken(token_ids=[-1]), "token id -1"),
        (broken(token_ids=[]), "without tokens"),
        (broken(finish_reason="tool_calls"), "no completion"),
        (broken(logprobs=None), "log-probs that are not"),
        (broken(logprobs=content(lambda c: c.pop())), "log-probs that are not"),
        (broken(logprobs=content(lambda c: c[0].update(logprob=-9999.0))), "log-prob -9999.0 for token"),
        (broken(weight_versions=[{"version": "default", "start": 0, "end": 1}]), "weights 'default'"),
        (broken(weight_versions=[{"version": "3", "start": 1, "end": 2}]), "weight versions that do"),
        (
            broken(weight_versions=lambda c: [{"version": "3", "start": 0, "end": len(c["token_ids"]) + 1}]),
            "weight versions that do",
        ),
        (
            broken(weight_versions=[{"version": "3", "start": 0, "end": 0}, {"version": "4", "start": 0, "end": 1}]),
            "weight versions for 1 of its",
        ),
        (broken(token_ids=[5] * 9), "9 tokens, where 8 at most were asked"),
        (broken(finish_reason="abort", token_ids=[]), "aborted one request 3 times"),
    ],
)
def test_garbage_is_an_error_that_names_the_engine(bench: Bench, script: Script, words: str) -> None:
    with pytest.raises(HpcrlError) as caught:
        bench.run(one, script)
    assert "engine-0 on node7" in str(caught.value) and words in str(caught.value), str(caught.value)


def answer(**fields: Any) -> bytes:
    """An answer of three good tokens with some fields of its choice replaced."""
    tokens = np.asarray([5, 6, 7], "<i4").tobytes()
    logprobs = np.asarray([-1, -2, -3], "<f4").tobytes()
    return encode(SampleAnswer(**({"reason": "stop", "tokens": tokens, "logprobs": logprobs} | fields)))


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "no completion: ValidationError"),
        (b"", "no completion"),
        (answer()[:-1], "no completion"),
        (answer() + b"\x00", "no completion"),
        (answer(tokens=b"12345"), "buffer size must be"),
        (answer(tokens=ints(5, 128, 6)), "token id 128, outside the model's vocabulary"),
        (answer(tokens=ints(5, -1, 6)), "token id -1"),
        (answer(tokens=b"", logprobs=b""), "without tokens"),
        (answer(tokens=ints(*[5] * 9), logprobs=floats(*[-1] * 9)), "9 tokens, where 8 at most were asked"),
        (answer(reason="tool_calls"), "no completion"),
        (answer(logprobs=b""), "log-probs that are not"),
        (answer(logprobs=floats(-1, -2)), "log-probs that are not"),
        (answer(logprobs=floats(-1, -9999.0, -2)), "log-prob -9999.0 for token 6 at position 1"),
        (answer(logprobs=floats(-1, float("nan"), -2)), "log-prob nan for token 6 at position 1"),
        (answer(spans=[("default", 0, 3)]), "weights 'default'"),
        (answer(spans=[("3", 0, 2)]), "weight versions for 2 of its 3 tokens"),
        (answer(spans=[("3", 0, 2), ("4", 2, 4)]), "weight versions that do"),
    ],
)
def test_malformed_answers_name_the_engine(bench: Bench, data: bytes, words: str) -> None:
    """Bytes that are not an answer are an error that names the engine."""

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        with pytest.raises(PeerError) as caught:
            await one(generator, pool)
        assert "engine-0 on node7 answered" in str(caught.value) and words in str(caught.value), str(caught.value)
        assert pool.engines[0].in_flight == 0

    bench.run(job, lambda *_: data)


def test_what_fails_of_a_group_is_asked_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was answered."""
    monkeypatch.setattr(engine_client, "PAUSES", Pauses(0.001, 0.001))

    def one_fails(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return web.Response(status=500, text="EngineGenerateError: later") if count == 3 else None

    found = bench.run(many(8), one_fails)
    assert len(bench.engines[0].bodies) == 9
    for seed, completion in enumerate(found):
        params = {"max_tokens": 8, "seed": seed, "logprobs": 0}
        expected = good({"token_ids": PROMPT.tolist(), "sampling_params": params})["choices"][0]
        assert completion.tokens.tolist() == expected["token_ids"]


def test_some_of_a_group_may_be_given_up(bench: Bench) -> None:
    async def job(generator: EngineClient, pool: EnginePool) -> None:
        asked = [asyncio.create_task(generator.complete(PROMPT, SAMPLING, seed, 4)) for seed in range(4)]
        await in_flight(bench.engines, 4)
        asked[1].cancel()
        while pool.engines[0].in_flight > 3:
            await asyncio.sleep(0.01)
        await generator.abort()
        assert [task.result().status for task in asked if not task.cancelled()] == [ABORTED] * 3

    bench.run(job, until_aborted)


def test_too_few_tokens_for_the_limit_are_an_error(bench: Bench) -> None:
    short = broken(finish_reason="length", token_ids=[5], logprobs={"content": [{"token_id": 5, "logprob": -1.0}]})
    with pytest.raises(PeerError, match="engine-0 on node7 answered 1 tokens as the longest.*8 were asked for"):
        bench.run(one, short, model_len=50)


def test_an_aborted_sample_is_begun_again(bench: Bench) -> None:
    def abort_once(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return broken(finish_reason="abort")(engine, count, body) if count == 0 else None

    found = bench.run(one, abort_once)
    assert found.tokens.tolist() == good(bench.engines[0].bodies[1])["choices"][0]["token_ids"]


# ---- how it is sampled


def test_sampling_is_as_the_options_say() -> None:
    tokenizer: Any = SimpleNamespace(eos_ids=frozenset({1, 9}))
    options = Options(
        rollout_top_p=0.9,
        rollout_top_k=20,
        rollout_stop=["END"],
        rollout_stop_token_ids=[5],
        rollout_max_response_len=64,
    )
    params = Sampling.from_options(options, tokenizer).params(60, begun=4)
    assert params == {
        "n": 1,
        "temperature": 1.0,
        "max_tokens": 60,
        "stop_token_ids": [1, 5, 9],
        "detokenize": True,
        "stop": ["END"],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "top_p": 0.9,
        "top_k": 20,
        "logprobs": 0,
    }
    plain = Sampling.from_options(Options(), tokenizer).params(10)
    assert not {"top_p", "top_k", "min_p", "min_tokens", "stop", "skip_special_tokens"} & set(plain)


def test_evaluations_own_sampling() -> None:
    """An evaluation's own sampling options override the rollout's."""
    tokenizer: Any = SimpleNamespace(eos_ids=frozenset({1}))

    def of(options: Options) -> Sampling:
        (held,) = eval_sets(options)
        return sampling_of(held, options, tokenizer)

    held = {"rm_type": "random", "eval_interval": 1, "eval_prompt_data": ["a", "a.jsonl"]}
    same = of(Options(rollout_top_p=0.9, rollout_top_k=7, **held))
    assert (same.top_p, same.top_k, same.min_p, same.min_tokens, same.logprobs, same.evaluation) == (
        0.9,
        7,
        0.0,
        0,
        False,
        True,
    )
    options = Options(
        rollout_top_p=0.9,
        eval_top_p=1.0,
        eval_top_k=3,
        eval_min_new_tokens=6,
        eval_temperature=0.0,
        eval_max_response_len=9,
        **held,
    )
    own = of(options)
    assert (own.top_p, own.top_k, own.min_tokens, own.temperature, own.max_tokens) == (1.0, 3, 6, 0.0, 9)
    assert own.params(9)["min_tokens"] == 6 and own.params(7, begun=2)["min_tokens"] == 4
    assert "min_tokens" not in own.params(2, begun=7) and "logprobs" not in own.params(9)


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.9}, {"rollout_top_k": 5}])
def test_temperature_with_truncated_sampling(cut: dict[str, float]) -> None:
    """A temperature with truncated sampling is refused."""
    base = {
        "hf_checkpoint": "m",
        "prompt_data": "p",
        "num_rollout": 1,
        "rm_type": ["random"],
        "n_samples_per_prompt": 2,
    }
    base |= {"rollout_num_gpus": 1}
    check_options(Options(**base, **cut))
    with pytest.raises(UsageError, match="--rollout-temperature 0.8 with --rollout-top-p or --rollout-top-k"):
        check_options(Options(**base, **cut, rollout_temperature=0.8))


# ---- ends before the end


async def in_flight(engines: list[FakeEngine], count: int) -> None:
    while sum(engine.in_flight for engine in engines) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("deaf", [0, 1])
def test_abort_spares_evaluations(bench: Bench, deaf: int) -> None:
    """A request that the engine has not seen yet, or does not end at the first word, is told again."""

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        bench.engines[0].deaf = deaf
        asked = [asyncio.create_task(generator.complete(PROMPT, SAMPLING, seed, 4)) for seed in range(5)]
        held_out = asyncio.create_task(generator.complete(PROMPT, replace(SAMPLING, evaluation=True), 9, 4))
        await in_flight(bench.engines, 4)
        await asyncio.wait_for(generator.abort(), 20)
        found = await asyncio.wait_for(asyncio.gather(*asked), 20)
        assert [c.status for c in found] == [ABORTED] * 5
        for seed, completion in enumerate(found[:4]):
            body = next(b for b in bench.engines[0].bodies if b["sampling_params"]["seed"] == seed)
            choice = good(body)["choices"][0]
            assert completion.tokens.tolist() == choice["token_ids"][:1]
            assert completion.logprobs.tolist() == [np.float32(choice["logprobs"]["content"][0]["logprob"])]
            assert completion.versions.tolist() == [4]
        assert len(found[4].tokens) == 0, "it still waited for its turn"
        assert not held_out.done()
        held_out.cancel()
        again = asyncio.create_task(generator.complete(PROMPT, SAMPLING, 77, 4))
        await asyncio.sleep(0.1)
        assert not again.done(), "what is asked for afterwards is not touched"

    bench.run(job, until_aborted, rollout_server_concurrency=4)


def test_abort_of_nothing_is_over_at_once(bench: Bench) -> None:
    bench.run(lambda generator, pool: asyncio.wait_for(generator.abort(), 20), None)


def test_abort_waits_for_no_dead_engine(bench: Bench) -> None:
    async def job(generator: EngineClient, pool: EnginePool) -> None:
        asked = asyncio.create_task(generator.complete(PROMPT, SAMPLING, 1, 4))
        await in_flight(bench.engines, 1)
        aborting = asyncio.create_task(generator.abort())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(bench.engines[0].die)
        await asyncio.wait_for(aborting, 20)
        assert (await asked).status == ABORTED

    bench.run(job, hang)


def test_engine_that_ignores_an_abort(bench: Bench) -> None:
    """An engine that does not end an aborted request is named."""

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        asked = asyncio.create_task(generator.complete(PROMPT, SAMPLING, 1, 4))
        await in_flight(bench.engines, 1)
        pool.request_timeout = 0.3
        with pytest.raises(
            DeadlineError, match=r"engine-0 on node7 did not end 1 aborted samples within --request-timeout 0.3 s"
        ):
            await generator.abort()
        asked.cancel()

    bench.run(job, hang)


def test_a_response_goes_on_from_its_exact_tokens(bench: Bench) -> None:
    begun = Completion(
        np.asarray([7, 8], np.int32), np.asarray([-0.5, -1.5], np.float32), np.asarray([2, 3], np.int32), ABORTED
    )

    async def job(generator: EngineClient, pool: EnginePool) -> Completion:
        return await generator.complete(PROMPT, SAMPLING, 11, 4, begun=begun)

    found = bench.run(job, None)
    (body,) = bench.engines[0].bodies
    assert body["token_ids"] == [3, 20, 21, 7, 8]
    assert body["sampling_params"]["max_tokens"] == 6
    assert body["sampling_params"]["seed"] == seed_of(11, 2), "the noise of the first tokens is not used twice"
    more = good(body)["choices"][0]["token_ids"]
    assert found.tokens.tolist() == [7, 8, *more] and found.tokens.dtype == np.int32
    assert found.logprobs.tolist()[:2] == [-0.5, -1.5] and found.logprobs.dtype == np.float32
    assert found.versions.tolist() == [2, 3] + [4] * len(more)
    assert found.status == (TRUNCATED if len(more) == 6 else COMPLETED)


def test_full_length_response_needs_no_engine(bench: Bench) -> None:
    """A response that has reached its limit needs no engine."""
    full = Completion(np.full(8, 7, np.int32), np.zeros(8, np.float32), np.zeros(8, np.int32), ABORTED)
    found = bench.run(lambda generator, pool: generator.complete(PROMPT, SAMPLING, 1, 4, begun=full), None)
    assert found.status == TRUNCATED and found.tokens.tolist() == [7] * 8 and not bench.engines[0].bodies


# ---- which engine


def test_group_stays_on_one_engine(bench: Bench) -> None:
    """A group goes to one engine unless others would be idle."""

    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        prompts = [np.asarray([3, 20 + i], np.int32) for i in range(6)]
        await asyncio.gather(*(generator.complete(p, SAMPLING, seed, 4) for p in prompts for seed in range(4)))

    bench.run(job, slow, slow, slow)
    assert [len(e.bodies) for e in bench.engines] == [8, 8, 8]
    for engine in bench.engines:
        assert len({str(body["token_ids"]) for body in engine.bodies}) == 2, "two whole groups each"


def test_key_stays_with_its_engine(bench: Bench) -> None:
    """A key stays with its engine unless that is much busier."""

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        for turn in range(6):
            prompt = np.asarray([3] * (turn + 1), np.int32)
            keys = ["a", "b"]
            await asyncio.gather(*(generator.complete(prompt, SAMPLING, 1, 4, affinity=key) for key in keys))
            await generator.complete(PROMPT, SAMPLING, 2, 4)
        assert {pool._homes["a"].index, pool._homes["b"].index} == {0, 1}
        home = pool._homes["a"]
        pool._move(home, SLACK + 1)
        await generator.complete(PROMPT, SAMPLING, 3, 4, affinity="a")
        assert pool._homes["a"] is not home, "it is too busy: the key moves"
        pool.registry.suspect(home.index, home.incarnation, "died")
        pool.refresh()
        await generator.complete(PROMPT, SAMPLING, 3, 4, affinity="b")
        assert pool._homes["b"] is not home

    bench.run(job, None, None)
    turns = [[len(b["token_ids"]) for b in e.bodies if set(b["token_ids"]) == {3}] for e in bench.engines]
    assert turns == [[1, 2, 3, 4, 5, 6]] * 2


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 64))
@settings(deadline=None)
def test_engines_differ_by_the_slack_at_most(groups: list[int], engines: int, limit: int) -> None:
    pool = bare_pool(engines, limit)
    for key, count in enumerate(groups):
        found = [pool.assign_engine(key) for _ in range(count)]
        loads = [e.in_flight for e in pool.engines]
        assert max(loads) <= limit and max(loads) <= max(min(loads) + SLACK, RATIO * min(loads) + 1)
        assert len({engine for engine in found if engine}) <= 1 + count // SLACK or max(loads) == limit
        if None in found:
            assert min(loads) == limit
            break
    assert sum(loads) == pool.loads.total
    for engine in pool.engines:
        for _ in range(engine.in_flight):
            pool.give_back(engine)
    assert pool.loads.total == 0 and pool.loads[pool.loads.least()] == 0


def test_seeds_are_fixed_and_differ() -> None:
    assert seed_of("train", 42, 0, 0, 0) == seed_of("train", 42, 0, 0, 0) == 5589328799674078161
    seeds = {seed_of("train", 42, r, g, i) for r in range(20) for g in range(20) for i in range(8)}
    assert len(seeds) == 20 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_requests_have_their_own_noise(bench: Bench) -> None:
    """Two prompts of 8 samples in two rollouts over 4 engines, each of which deals its own seeds alike if left to
    it."""
    prompt = Prompt("p", PROMPT)
    tokenizer: Any = SimpleNamespace(eos_ids=(1,), decode=lambda tokens, stops, skip: "text")

    class Grading:
        def tally(self, *_: Any) -> None: ...

        async def grade(self, *_: Any) -> None: ...

    async def job(generator: EngineClient, pool: EnginePool) -> list[int]:
        sampler = SingleTurnSampler(Options(), tokenizer, generator, Grading())
        groups = [Group(number, prompt) for number in range(2)]
        await asyncio.gather(
            *(sampler.make(ResponseRequest(g, i, r, 0)) for r in range(2) for g in groups for i in range(8))
        )
        return [len(engine.bodies) for engine in bench.engines]

    assert sum(counts := bench.run(job, None, None, None, None)) == 32 and min(counts) > 0
    seeds = [body["sampling_params"]["seed"] for engine in bench.engines for body in engine.bodies]
    assert len(set(seeds)) == 32
    wanted = {seed_of("train", Options().rollout_seed, r, g, i) for r in range(2) for g in range(2) for i in range(8)}
    assert set(seeds) == wanted, "whichever engine answers"
