"""The client of the engines: balance, retries, deadlines, and answers that are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from hpcrl.config.options import Options
from hpcrl.errors import DataError, DeadlineError, HpcrlError, PeerError
from hpcrl.plan import Place, Plan
from hpcrl.queue.auth import http_key, make_keys
from hpcrl.rollout.engines import engine_pool
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.generate import Completion, Generator, Sampling, seed_of
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampler import Asked
from hpcrl.rollout.samplers.single_turn import SingleTurnSampler
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.sample import COMPLETED, TRUNCATED
from tests.support.fake_engine import CUT, FakeEngine, Script, good, hang

SAMPLING = Sampling(temperature=1.0, max_tokens=8, stop=(), stop_token_ids=(1,))
PROMPT = np.asarray([3, 20, 21], np.int32)


class Bench:
    """Fake engines, a run directory in which they are published, and one job against them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self.stack = path, stack
        self.engines: list[FakeEngine] = []

    def run(
        self, job: Callable[[Generator, EnginePool], Any], *scripts: Script | None, model_len: int | None = None, **options: Any
    ) -> Any:
        rundir = RunDir.create(self.path / "run")
        rundir.begin()
        make_keys(rundir, 1)
        self.engines = [self.stack.enter_context(FakeEngine(script, http_key(rundir))) for script in scripts]
        for index, engine in enumerate(self.engines):
            publish(rundir, EnginePeer(host="127.0.0.1", port=engine.port, model_len=model_len), index)
        places = tuple(Place("node7", (i,)) for i in range(len(scripts)))
        plan = Plan("test", 0, (Place("node7", (0,)),), places, Place("node7", ()))

        async def go() -> Any:
            pool = EnginePool(rundir, plan, Options(**({"request_timeout": 5} | options)))
            try:
                await pool.connect()
                return await job(Generator(pool, 128), pool)
            finally:
                await pool.close()

        return asyncio.run(go())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path, stack)


async def one(generator: Generator, pool: EnginePool) -> Completion:
    return await generator.complete(PROMPT, SAMPLING, 11, version=4)


def many(count: int) -> Callable[[Generator, EnginePool], Any]:
    async def job(generator: Generator, pool: EnginePool) -> list[Completion]:
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
    assert found.versions.tolist() == [4] * len(found.tokens), "an engine that says nothing answers under the version of the call"
    assert found.status == {"stop": COMPLETED, "length": TRUNCATED}[choice["finish_reason"]]


def test_versions_are_the_engines_own(bench: Bench) -> None:
    def spans(engine: FakeEngine, count: int, body: dict[str, Any]) -> dict[str, Any]:
        answer = good(body)
        n = len(answer["choices"][0]["token_ids"])
        answer["choices"][0]["weight_versions"] = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": n}]
        return answer

    found = bench.run(one, spans)
    assert found.versions.tolist() == [2] + [3] * (len(found.tokens) - 1)


def test_the_context_bounds_the_response(bench: Bench) -> None:
    bench.run(one, None, model_len=5)
    assert bench.engines[0].bodies[0]["sampling_params"]["max_tokens"] == 2


def test_a_prompt_that_fills_the_context_is_an_error(bench: Bench) -> None:
    with pytest.raises(DataError, match="prompt of 3 tokens leaves no room in the engine's context of 3"):
        bench.run(one, None, model_len=3)


def test_requests_are_spread_and_bounded(bench: Bench) -> None:
    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.01)

    found = bench.run(many(60), slow, slow, rollout_server_concurrency=5)
    assert len(found) == 60
    assert [e.most_in_flight for e in bench.engines] == [5, 5]
    assert sum(len(e.bodies) for e in bench.engines) == 60
    assert min(len(e.bodies) for e in bench.engines) >= 10


def test_the_least_loaded_engine_is_next(bench: Bench) -> None:
    async def slow(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    bench.run(many(10), slow, slow)
    assert [len(e.bodies) for e in bench.engines] == [5, 5]


def test_a_turn_that_is_not_taken_goes_to_the_next(bench: Bench) -> None:
    async def job(generator: Generator, pool: EnginePool) -> None:
        engine = await pool._take()
        first, second = asyncio.create_task(pool._take()), asyncio.create_task(pool._take())
        await asyncio.sleep(0.01)
        pool._give_back(engine)
        first.cancel()
        assert await asyncio.wait_for(second, 2) is engine

    bench.run(job, None, rollout_server_concurrency=1)


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

    async def job(generator: Generator, pool: EnginePool) -> list[Any]:
        asked = (generator.complete(PROMPT, SAMPLING, seed, 4) for seed in range(20))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)

    found = bench.run(job, dies, rollout_server_concurrency=1)
    assert len(found) == 20 and all(isinstance(e, PeerError) for e in found)


def test_a_passing_trouble_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "PAUSE", 0.001)

    def shaky(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return [CUT, web.json_response({"error": "try later"}, status=503), None][min(count, 2)]

    bench.run(one, shaky)
    assert len(bench.engines[0].bodies) == 3
    assert len({str(body) for body in bench.engines[0].bodies}) == 1, "the same request, with the same seed"


def test_a_lasting_trouble_ends_after_a_few_attempts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "PAUSE", 0.001)
    broken = lambda *_: web.json_response({"error": "no CUDA memory"}, status=500)  # noqa: E731
    with pytest.raises(PeerError, match="engine-0 on node7 failed a request 4 times.*no CUDA memory"):
        bench.run(one, broken)


def test_a_refused_request_is_not_tried_again(bench: Bench) -> None:
    refuse = lambda *_: web.json_response({"error": "Token id 5000 is out of vocabulary"}, status=400)  # noqa: E731
    with pytest.raises(PeerError, match=r"engine-0 on node7 refused /inference/v1/generate: HTTP 400.*out of vocabulary"):
        bench.run(one, refuse)
    assert len(bench.engines[0].bodies) == 1


def test_a_slow_engine_meets_the_deadline(bench: Bench) -> None:
    with pytest.raises(DeadlineError, match=r"engine-0 on node7 did not answer .* within --request-timeout 0.2 s"):
        bench.run(one, hang, request_timeout=0.2)


def test_a_cancelled_request_leaves_its_engine(bench: Bench) -> None:
    async def job(generator: Generator, pool: EnginePool) -> None:
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
    rundir.begin()
    plan = Plan("test", 0, (), (Place("node7", (0,)),), Place("node7", ()))
    with pytest.raises(
        DeadlineError, match=r"engine-0 on node7 did not come up within --engine-start-timeout 0 s; see .*engine-0\.log"
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
        (lambda *_: {}, "no completion"),
        (lambda *_: {"choices": []}, "no completion"),
        (lambda *_: [1], "no completion"),
        (lambda *_: web.Response(body=b"\xff<html>"), "no completion"),
        (broken(token_ids=[5, 128]), "token id 128, outside the model's vocabulary of 128"),
        (broken(token_ids=[-1]), "token id -1"),
        (broken(token_ids=["5"]), "no completion"),
        (broken(token_ids=[]), "without tokens"),
        (broken(finish_reason="tool_calls"), "no completion"),
        (broken(logprobs=None), "log-probs that are not those"),
        (broken(logprobs=content(lambda c: c.pop())), "log-probs that are not those"),
        (broken(logprobs=content(lambda c: c[0].update(token_id=7777))), "log-probs that are not those"),
        (broken(logprobs=content(lambda c: c[0].update(logprob=-9999.0))), "log-prob -9999.0 for token"),
        (broken(logprobs=content(lambda c: c[-1].update(logprob=1e39))), "log-prob 1e+39 for token"),
        (broken(weight_versions=[{"version": "default", "start": 0, "end": 1}]), "weights called 'default'"),
        (broken(weight_versions=[{"version": "3", "start": 1, "end": 2}]), "weight versions that do not cover"),
        (
            broken(weight_versions=lambda c: [{"version": "3", "start": 0, "end": len(c["token_ids"]) + 1}]),
            "weight versions that do not cover",
        ),
        (
            broken(weight_versions=[{"version": "3", "start": 0, "end": 0}, {"version": "4", "start": 0, "end": 1}]),
            "weight versions for 1 of its",
        ),
        (broken(finish_reason="abort", token_ids=[]), "aborted one request 3 times"),
    ],
)
def test_garbage_is_an_error_that_names_the_engine(bench: Bench, script: Script, words: str) -> None:
    with pytest.raises(HpcrlError) as caught:
        bench.run(one, script)
    assert "engine-0 on node7" in str(caught.value) and words in str(caught.value), str(caught.value)


def test_an_aborted_sample_is_begun_again(bench: Bench) -> None:
    def abort_once(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        return broken(finish_reason="abort")(engine, count, body) if count == 0 else None

    found = bench.run(one, abort_once)
    assert found.tokens.tolist() == good(bench.engines[0].bodies[1])["choices"][0]["token_ids"]


def test_seeds_are_fixed_and_differ() -> None:
    assert seed_of("train", 42, 0, 0, 0) == seed_of("train", 42, 0, 0, 0) == 5589328799674078161
    seeds = {seed_of("train", 42, r, g, i) for r in range(20) for g in range(20) for i in range(8)}
    assert len(seeds) == 20 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_no_two_requests_share_their_noise_without_deterministic_mode_either(bench: Bench) -> None:
    """Two prompts of 8 samples in two rollouts over 4 engines, each of which deals its own seeds alike if left to it."""
    prompt = Prompt(1, "p", PROMPT)
    tokenizer: Any = SimpleNamespace(eos_ids=(1,), decode=lambda tokens, stops: "text")
    file: Any = SimpleNamespace(path="file")

    class Grading:
        def tally(self, *_: Any) -> None: ...

        async def grade(self, *_: Any) -> None: ...

    async def job(generator: Generator, pool: EnginePool) -> list[int]:
        sampler = SingleTurnSampler(Options(), file, tokenizer, generator, Grading())
        groups = [Group(number, prompt) for number in range(2)]
        await asyncio.gather(*(sampler.make(Asked(g, i, r, 0)) for r in range(2) for g in groups for i in range(8)))
        return [len(engine.bodies) for engine in bench.engines]

    assert sum(counts := bench.run(job, None, None, None, None)) == 32 and min(counts) > 0
    seeds = [body["sampling_params"]["seed"] for engine in bench.engines for body in engine.bodies]
    assert len(set(seeds)) == 32
    wanted = {seed_of("train", Options().rollout_seed, r, g, i) for r in range(2) for g in range(2) for i in range(8)}
    assert set(seeds) == wanted, "whichever engine answers"
