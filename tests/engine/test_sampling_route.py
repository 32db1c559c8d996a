"""Our own route in a real engine: the same samples as by vLLM's, ended early, gone on from; refusals; clients that go
away."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.engine.membership.http import request_json
from hpcrl.errors import PeerError
from hpcrl.rollout.engines.completion import Completion, Sampling, seed_of
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.transport.token_frames import ABORT, GENERATE
from hpcrl.utils.sample_parts import ABORTED, COMPLETED, TRUNCATED
from tests.support.engines import CLOSE, PROMPT, Engines, Side
from tests.support.forked_engines import Nursery
from tests.support.tiny import make_model

pytestmark = pytest.mark.vllm
TOKENS = np.asarray(PROMPT, np.int32)
Job = Callable[[EngineClient, EnginePool], Any]


def sampling(count: int, **fields: Any) -> Sampling:
    return Sampling(temperature=fields.pop("temperature", 1.0), max_tokens=count, stop=(), stop_token_ids=(), **fields)


def endless(count: int, **fields: Any) -> Sampling:
    """The same, and nothing ends it before."""
    return sampling(count, min_tokens=count, **fields)


@pytest.fixture(scope="module")
def side(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """One engine that samples from likely tokens only, which the log-probs must not show."""
    root = tmp_path_factory.mktemp("lean")
    model = make_model(root / "model", tied=True)
    engines = nursery.engines(root / "run", model, rollout_top_p=0.7)
    side = Side(engines, model)
    yield side
    side.close()
    assert engines.stop() == [0]


def run(engines: Engines, job: Job) -> Any:
    """`job` as the rollout process does it."""

    async def go() -> Any:
        pool = EnginePool(engines.rundir, engines.plan, engines.options)
        try:
            await pool.connect()
            return await asyncio.wait_for(job(EngineClient(pool, 128), pool), 60)
        finally:
            await pool.close()

    return asyncio.run(go())


def group(how: Sampling, count: int = 6, version: int = 0) -> Job:
    async def job(generator: EngineClient, pool: EnginePool) -> list[Completion]:
        return list(await asyncio.gather(*(generator.complete(TOKENS, how, seed_of(i), version) for i in range(count))))

    return job


def by_vllms_route(side: Side, how: Sampling, count: int = 6) -> list[tuple[list[int], bytes, str]]:
    """(tokens, float32 log-probs, why it ended) of the same samples, each asked for over vLLM's own route."""
    found = []
    for i in range(count):
        params = how.params(how.max_tokens) | {"seed": seed_of(i)}
        body = {"model": "policy", "token_ids": TOKENS.tolist(), "sampling_params": params}
        choice = request_json(side.engines.address(), "POST", "/inference/v1/generate", 60, body)["choices"][0]
        logprobs = np.asarray([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
        found.append((choice["token_ids"], logprobs.tobytes(), choice["finish_reason"]))
    return found


def test_group_equals_vllms_route(side: Side) -> None:
    """A group equals what vLLM's own route gives, bit for bit."""
    if side.version == 0:
        side.step()
    for how in (
        sampling(24),
        sampling(24, top_p=0.7),
        sampling(24, top_k=5),
        sampling(24, min_p=0.2),
        sampling(5, min_tokens=3),
    ):
        found = run(side.engines, group(how))
        reasons = {COMPLETED: "stop", TRUNCATED: "length"}
        ours = [(c.tokens.tolist(), c.logprobs.tobytes(), reasons[c.status]) for c in found]
        assert ours == by_vllms_route(side, how)
        assert len({c.tokens.tobytes() for c in found}) > 1, "samples of a group differ"
        assert {int(v) for c in found for v in c.versions} == {side.version}


def ranks(side: Side, tokens: np.ndarray) -> list[int]:
    """How many tokens were likelier, for each."""
    with torch.no_grad():
        rows = side.reference.model(torch.tensor([[*PROMPT, *tokens.tolist()]])).logits[0, len(PROMPT) - 1 : -1]
    return [int((row > row[token]).sum()) for row, token in zip(rows, tokens.tolist(), strict=True)]


def test_logprobs_of_the_whole_distribution(side: Side) -> None:
    """Log-probs are of the whole distribution, whatever it is sampled from."""
    for cut, most in ({"top_p": 0.7}, 127), ({"top_k": 5}, 4), ({"min_p": 0.9}, 60):
        for found in run(side.engines, group(sampling(24, **cut), 4)):
            ours = side.reference.logprobs(PROMPT, found.tokens.tolist())
            assert np.abs(found.logprobs - ours).max() <= CLOSE
            assert max(ranks(side, found.tokens)) <= most


def test_an_evaluation_has_no_logprobs(side: Side) -> None:
    (found,) = run(side.engines, group(endless(8, logprobs=False, temperature=0.0), 1))
    assert not found.logprobs.any() and len(found.logprobs) == len(found.tokens) == 8


def test_aborted_prefix_is_of_the_same_response(side: Side) -> None:
    """And it goes on, with the versions of each part, from the exact tokens; an evaluation is left alone."""
    if side.version == 0:
        side.step()
    whole = run(side.engines, group(endless(900), 4))

    async def job(generator: EngineClient, pool: EnginePool) -> None:
        for _ in range(5):  # on a loaded machine a request can end before the abort: then the next try counts
            before = await asyncio.to_thread(sampled, side)
            asked = [asyncio.create_task(generator.complete(TOKENS, endless(900), seed_of(i), 0)) for i in range(4)]
            held = asyncio.create_task(
                generator.complete(TOKENS, endless(60, logprobs=False, evaluation=True), seed_of(9), 0)
            )
            while await asyncio.to_thread(sampled, side) < before + 20:
                await asyncio.sleep(0.01)
            await generator.abort()
            parts = await asyncio.gather(*asked)
            assert (await held).status == TRUNCATED, "the evaluation ran to its end"
            if all(part.status == ABORTED for part in parts):
                break
        for part, full in zip(parts, whole, strict=True):
            assert part.status == ABORTED and len(part.tokens) < 900
            count = len(part.tokens)
            assert part.tokens.tolist() == full.tokens[:count].tolist()
            assert part.logprobs.tobytes() == full.logprobs[:count].tobytes()
            assert part.versions.tolist() == [side.version] * count
        assert max(len(part.tokens) for part in parts) > 0
        begun = max(parts, key=lambda part: len(part.tokens))
        more = await generator.complete(TOKENS, endless(len(begun.tokens) + 20), 5, 0, begun=begun)
        assert len(more.tokens) == len(begun.tokens) + 20 and more.status == TRUNCATED
        assert more.tokens[: len(begun.tokens)].tolist() == begun.tokens.tolist()
        ours = side.reference.logprobs(PROMPT, more.tokens.tolist())
        assert np.abs(more.logprobs - ours).max() <= CLOSE

    run(side.engines, job)


def sampled(side: Side) -> float:
    """Tokens that the engine has sampled since it started."""
    address = side.engines.address()
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {address.key}"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def test_who_waits_no_more_is_not_worked_for(side: Side) -> None:
    async def job(generator: EngineClient, pool: EnginePool) -> None:
        before = sampled(side)
        asked = [asyncio.create_task(generator.complete(TOKENS, endless(900), seed_of(i), 0)) for i in range(6)]
        while await asyncio.to_thread(sampled, side) < before + 20:
            await asyncio.sleep(0.01)
        assert pool.engines[0].in_flight == 6
        for task in asked[:2]:
            task.cancel()
        for _ in range(200):
            if pool.engines[0].in_flight == 4:
                break
            await asyncio.sleep(0.02)
        assert pool.engines[0].in_flight == 4, "some of a group"
        for task in asked:
            task.cancel()
        last = -1.0
        while (now := await asyncio.to_thread(sampled, side)) != last:
            last = now
            await asyncio.sleep(0.3)
        assert 0 < now - before < 6 * 900, "the engine still worked for nobody"

    run(side.engines, job)


@pytest.mark.parametrize(
    ("prompt", "how", "words"),
    [
        ([5, 100000], sampling(4), "out of vocabulary"),
        ([5] * 2000, sampling(4), "maximum model length|longer than|max_model_len|context length"),
        ([5], sampling(4, top_p=-0.5), "top_p"),
        ([5], sampling(4, temperature=-1.0), "temperature"),
    ],
)
def test_what_vllm_refuses_is_an_error_in_its_words(side: Side, prompt: list[int], how: Sampling, words: str) -> None:
    async def job(generator: EngineClient, pool: EnginePool) -> None:
        with pytest.raises(PeerError, match=rf"engine-0 on .* refused {GENERATE}: HTTP 400: .*({words})"):
            await generator.complete(np.asarray(prompt, np.int32), how, 1, 0)

    run(side.engines, job)


def test_malformed_bodies_and_missing_keys(side: Side) -> None:
    """Malformed bodies, and callers without the key."""
    address = side.engines.address()

    def status(path: str, method: str, key: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
            return connection.getresponse().status
        finally:
            connection.close()

    for path in (GENERATE, ABORT):
        assert status(path, "POST", "0" * 64, b"\x90") == 401
        assert status(path, "POST", address.key, b"\xc1") == 400
        assert status(path, "GET", address.key, b"") == 405
    assert request_json(address, "GET", "/health", 10) is None, "the engine lives"
