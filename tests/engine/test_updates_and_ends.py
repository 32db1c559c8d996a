"""Real engines: what they serve before, during and after weight updates, what they refuse, and how they die."""

from __future__ import annotations

import asyncio
import http.client
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.engine.membership.http import Address, HttpError, request_json
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.plan import Location, Plan
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers import teacher_logprobs
from hpcrl.run.peers import EnginePeer, peer_file
from hpcrl.sample import Sample
from hpcrl.utils.waiting import Deadline, poll
from hpcrl.weights.comparison import Differs
from hpcrl.weights.pieces.elements import PieceValues
from tests.support.engines import CLOSE, LONG, PROMPT, SMALL, Engines, Pairs, Reference, Side, generate, raw_push
from tests.support.runs import gone
from tests.support.tiny import make_model

pytestmark = pytest.mark.vllm


def started(root: Path, *more: Any, **values: Any) -> Iterator[Side]:
    model = make_model(root / "model", tied=True)
    engines = Engines(
        root / "run", model, *more, check_weight_update_equal=True, update_weight_buffer_size=SMALL, **values
    )
    side = Side(engines, model)
    yield side
    side.close()
    engines.stop()


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """One engine with shared memory."""
    yield from started(tmp_path_factory.mktemp("shm"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Two engines over sockets, whose repairs can be broken."""
    yield from started(tmp_path_factory.mktemp("pair"), 2, module="tests.support.breakable", weight_transfer="gloo")


# ---- what is served


def test_an_engine_tells_the_run_about_itself(shm: Side) -> None:
    found = shm.engines.wait()
    assert (found.host, found.model_len) == ("127.0.0.1", 1024)
    assert shm.engines.key not in peer_file(shm.engines.rundir.here, EnginePeer, 0).read_text()


def test_logprobs_equal_transformers(shm: Side) -> None:
    """Log-probs are those of transformers before and after updates."""
    assert shm.distance() <= CLOSE
    old = shm.reference.pairs()
    metrics = shm.step()
    after = generate(shm.engines.address(), PROMPT, 24)
    assert shm.reference.distance(PROMPT, after) <= CLOSE
    assert [span["version"] for span in after["weight_versions"]] == [str(shm.version)]
    assert metrics["perf/update_weights_bytes"] >= sum(t.numel() * 4 for _, t in old)
    assert 0 < metrics["perf/update_weights_pause_time"] <= metrics["perf/update_weights_time"]
    shm.reference.back_to(old)
    assert shm.distance() > 0.1, "the comparison would not see an update that did nothing"
    shm.push(old)
    assert shm.distance() <= CLOSE


def test_logprobs_are_at_the_sampling_temperature(shm: Side) -> None:
    assert shm.distance(temperature=0.7) <= CLOSE


def test_an_engine_can_be_a_teacher(shm: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-probs of a student's tokens are those of transformers."""
    address = shm.engines.address()
    monkeypatch.setenv(teacher_logprobs.KEY, shm.engines.key)
    answer = np.asarray([40, 7, 90, 33, 1, 64], np.int32)
    sample = Sample(tokens=np.asarray([*PROMPT, *answer], np.int32), response_length=len(answer))

    async def go() -> None:
        options = Options(opd_teacher_url=f"http://{address.host}:{address.port}", rollout_batch_size=8)
        asked = teacher_logprobs.Teacher(options, Tokenizer(shm.engines.options.hf_checkpoint or ""))
        await asked.check()
        await asked.mark(sample, 0, "here")
        await asked.close()

    asyncio.run(go())
    assert sample.teacher_error == ""
    wanted = shm.reference.logprobs(PROMPT, answer.tolist())
    assert max(abs(a - b) for a, b in zip(sample.teacher_log_probs, wanted, strict=True)) <= CLOSE


def test_the_models_own_sampling_defaults_are_not_used(shm: Side) -> None:
    """Without a top-k from generation_config.json many different tokens must appear in many samples."""
    first = {generate(shm.engines.address(), PROMPT, 1, seed=i)["token_ids"][0] for i in range(60)}
    assert len(first) > 20


def test_requests_in_flight_continue(shm: Side) -> None:
    """Requests in flight are kept and continue with the new weights."""
    shm.step()
    old = Reference(Path(shm.engines.options.hf_checkpoint or ""))
    answers: list[dict[str, Any]] = []
    for _ in range(5):  # on a loaded machine a request can end before the update begins: then the next try counts
        old.back_to(shm.reference.pairs())
        with ThreadPoolExecutor(4) as pool:
            waiting = begin_four(shm, pool)
            shm.step()
            answers = [future.result(120) for future in waiting]
        if all(len(answer["weight_versions"]) == 2 for answer in answers):
            break
    assert all(len(answer["weight_versions"]) == 2 for answer in answers), (
        "the update came before or after, not between"
    )
    for i, answer in enumerate(answers):
        prompt, spans = [*PROMPT, 30 + i], answer["weight_versions"]
        assert len(answer["token_ids"]) == 950
        assert [span["version"] for span in spans] == [str(shm.version - 1), str(shm.version)]
        cut = spans[1]["start"]
        before, after = (model.logprobs(prompt, answer["token_ids"]) for model in (old, shm.reference))
        assert max(abs(a - b) for a, b in zip(answer["logprobs"][:cut], before[:cut], strict=True)) <= CLOSE
        assert max(abs(a - b) for a, b in zip(answer["logprobs"][cut:], after[cut:], strict=True)) <= CLOSE


def begin_four(shm: Side, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
    """Four requests for 950 tokens each, once the engine works on them."""
    address = shm.engines.address()
    begun = metric(address, "generation_tokens_total")
    waiting = [pool.submit(generate, address, [*PROMPT, 30 + i], 950, seed=i) for i in range(4)]
    assert poll(lambda: metric(address, "generation_tokens_total") >= begun + 8, Deadline(60), 0.0)
    return waiting


def test_the_prefix_cache_does_not_outlive_an_update(shm: Side) -> None:
    assert shm.distance(LONG) <= CLOSE
    hits = metric(shm.engines.address(), "prefix_cache_hits_total")
    assert shm.distance(LONG) <= CLOSE
    assert metric(shm.engines.address(), "prefix_cache_hits_total") > hits, "the prompt is too short for the cache"
    shm.step()
    assert shm.distance(LONG) <= CLOSE


def metric(address: Address, name: str) -> float:
    """One of vLLM's counters."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {address.key}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\S* (\S+)$", text, re.M))


def test_same_seeds_same_bits(shm: Side) -> None:
    """The same seeds give the same bits, whatever else is running."""
    address = shm.engines.address()

    def sample(number: int) -> tuple[list[int], list[float]]:
        answer = generate(address, PROMPT[: 8 + number % 9], 24, seed=1000 + number)
        return answer["token_ids"], answer["logprobs"]

    with ThreadPoolExecutor(24) as many:
        crowded = list(many.map(sample, range(24)))
        backwards = list(many.map(sample, reversed(range(24))))[::-1]
    assert crowded == [sample(i) for i in range(24)]
    assert crowded == backwards
    assert len({tuple(ids) for ids, _ in crowded}) == 24


# ---- what is refused


def without_last(pairs: Pairs) -> Pairs:
    return pairs[:-1]


def without_v(pairs: Pairs) -> Pairs:
    """vLLM itself does not notice: the fused matrix counts as loaded once q and k are."""
    return [(n, t) for n, t in pairs if n != "model.layers.1.self_attn.v_proj.weight"]


def with_unknown(pairs: Pairs) -> Pairs:
    return [*pairs, ("model.layers.0.mlp.bogus.weight", torch.zeros(3))]


def with_bias(pairs: Pairs) -> Pairs:
    """vLLM itself ignores biases that it does not know."""
    return [*pairs, ("model.layers.0.self_attn.o_proj.bias", torch.zeros(64))]


def with_head(pairs: Pairs) -> Pairs:
    return [*pairs, ("lm_head.weight", pairs[0][1])]


def with_wrong_shape(pairs: Pairs) -> Pairs:
    return [(n, t[:, :5].contiguous() if n.endswith("1.mlp.down_proj.weight") else t) for n, t in pairs]


def with_wrong_dtype(pairs: Pairs) -> Pairs:
    return [(n, t.double() if n == "model.norm.weight" else t) for n, t in pairs]


def with_twice(pairs: Pairs) -> Pairs:
    return [*pairs, pairs[3]]


FAULTS = [
    (without_last, "1 tensors are missing,.*model.norm.weight"),
    (without_v, "the first is model.layers.1.self_attn.v_proj.weight"),
    (with_unknown, "the model has no model.layers.0.mlp.bogus.weight"),
    (with_bias, "the model has no model.layers.0.self_attn.o_proj.bias"),
    (with_head, "lm_head.weight is tied to model.embed_tokens.weight"),
    (with_wrong_shape, r"down_proj.weight is float32\[64, 5\], the model needs float32\[64, 192\]"),
    (with_wrong_dtype, r"model.norm.weight is float64\[64\], the model needs float32\[64\]"),
    (with_twice, "came twice"),
]


def test_refused_update_changes_nothing(shm: Side) -> None:
    """A refused update changes nothing, and the next one is exact."""
    before = shm.reference.pairs()
    for spoil, message in FAULTS:
        new = shm.reference.step(77)
        shm.reference.back_to(before)
        with pytest.raises(HttpError, match=message):
            raw_push(shm.engines, spoil(new))
        assert shm.distance() <= CLOSE, spoil.__name__
    shm.step()
    assert shm.distance() <= CLOSE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(directory="/nowhere"), "cannot be read.*update-weight-disk-dir"),
        (lambda info: info["files"].update({"../outside.safetensors": "00"}), "outside of its directory"),
        (lambda info: info["files"].update(dict.fromkeys(info["files"], "00")), "differs from what"),
        (lambda info: info["files"].popitem(), "tensors are missing"),
        (lambda info: info.update(bucket=1), "bucket"),
    ],
)
def test_a_malformed_update_changes_nothing(shm: Side, change: Any, message: str) -> None:
    with pytest.raises(HttpError, match=message):
        raw_push(shm.engines, shm.reference.pairs(), change)
    assert shm.distance() <= CLOSE


def test_unstarted_or_incomplete_update(shm: Side) -> None:
    """An update that was not started or not completed is refused."""
    address = shm.engines.address()
    for path in ("/update_weights", "/finish_weight_update"):
        with pytest.raises(HttpError):
            request_json(
                address,
                "POST",
                path,
                60,
                {"update_info": {"directory": "/nowhere", "files": {}}} if "update_w" in path else None,
            )
    request_json(address, "POST", "/start_weight_update", 60)
    with pytest.raises(HttpError, match="before its last tensor"):
        request_json(address, "POST", "/finish_weight_update", 60)
    assert shm.distance() <= CLOSE
    assert shm.sender.fleet is not None
    with pytest.raises(PeerError, match="already active"):
        shm.step()  # vLLM believes for ever that the update goes on; but a refused one is given up
    shm.step()
    assert shm.distance() <= CLOSE


@pytest.mark.parametrize(
    ("side", "spoil"),
    [
        ("shm", without_v),
        ("shm", with_unknown),
        ("shm", with_head),
        ("shm", with_wrong_shape),
        ("shm", with_twice),
        ("pair", with_unknown),
    ],
)
def test_sender_refuses_unneeded_tensors(side: str, spoil: Any, request: pytest.FixtureRequest) -> None:
    """The sender refuses tensors that the engines do not need."""
    fleet: Side = request.getfixturevalue(side)
    pairs = fleet.reference.pairs()
    with pytest.raises(HpcrlError, match="engines"):
        fleet.push(
            spoil(pairs if side == "shm" else pairs[-3:])
        )  # over gloo: in the first round, before anything is sent
    for i in range(len(fleet.engines.processes)):
        assert request_json(fleet.engines.address(i), "GET", "/is_paused", 60) == {"is_paused": False}
        assert fleet.distance(index=i) <= CLOSE


def test_a_tensor_that_changed_on_its_way_is_noticed(shm: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    shm.step()
    write = PieceValues.write
    names: list[str] = []

    def tampered(self: PieceValues, name: str, area: Any, out: torch.Tensor) -> None:
        write(self, name, area, out)
        if name.endswith("v_proj.weight") and not names:
            names.append(name)
            out.view(-1)[5] += 1

    monkeypatch.setattr(PieceValues, "write", tampered)
    with pytest.raises(Differs, match="after the update 1 tensors are not what.*sent") as caught:
        shm.step()
    monkeypatch.undo()
    assert names[0] in str(caught.value)
    assert request_json(shm.engines.address(), "GET", "/is_paused", 60) == {"is_paused": True}
    shm.step()
    assert shm.distance() <= CLOSE


def test_every_route_asks_for_the_key(shm: Side) -> None:
    routes = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", shm.engines.log_file().read_text())
    assert {"/health", "/metrics", "/pause", "/resume", "/collective_rpc", "/update_weights", "/v1/completions"} <= {
        p for p, _ in routes
    }
    address = shm.engines.address()
    for path, methods in [
        *routes,
        ("/no/such/route", "GET"),
        ("/docs", "GET"),
        ("/ping", "GET"),
        ("/invocations", "POST"),
    ]:
        for method in methods.split(", "):
            for key in ("", "Bearer ", f"Bearer {address.key[:-1]}", f"Bearer {address.key}0"):
                assert status(address, method, re.sub(r"\{\w+\}", "x", path), key) == 401, (method, path, key)
    assert status(address, "GET", "/health", f"Bearer {address.key}") == 200
    assert (
        status(address, "OPTIONS", "/pause", "", {"Origin": "http://x", "Access-Control-Request-Method": "POST"}) == 401
    )
    assert status(
        address, "GET", "/v1/realtime", "", {"Upgrade": "websocket", "Connection": "Upgrade", **WEBSOCKET}
    ) in (
        401,
        403,
    )
    assert address.key not in shm.engines.log_file().read_text()


WEBSOCKET = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}


def status(address: Address, method: str, path: str, key: str, more: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request(method, path, headers=({"Authorization": key} if key else {}) | (more or {}))
        return connection.getresponse().status
    finally:
        connection.close()


# ---- two engines in a gloo group


def test_two_engines_get_the_same_weights_over_gloo(pair: Side) -> None:
    assert all(pair.distance(index=i) <= CLOSE for i in (0, 1))
    for _ in range(2):
        pair.step()
        assert all(pair.distance(index=i) <= CLOSE for i in (0, 1))


def test_a_head_that_stays_stale_is_noticed(pair: Side) -> None:
    fleet = pair.sender.fleet
    assert fleet is not None
    fleet.call("breaking", "break_repairs")
    with pytest.raises(Differs, match=r"engine-0 on 127.0.0.1: after the update 1 tensors .*: lm_head.weight"):
        pair.step()
    fleet.call("mending", "mend_repairs")
    pair.step()
    assert all(pair.distance(index=i) <= CLOSE for i in (0, 1))


def test_update_refused_half_way(pair: Side) -> None:
    """Over sockets the first rounds are loaded before the trainer's last tensor is seen."""
    pairs = pair.reference.step(5)
    with pytest.raises(HpcrlError, match=r"model.extra.weight is not a tensor"):
        pair.push([*pairs, ("model.extra.weight", torch.zeros(64))])
    pair.step()
    assert all(pair.distance(index=i) <= CLOSE for i in (0, 1))


def test_no_engine_resumes_after_a_refusal(pair: Side) -> None:
    """The one that took it has the new weights, but would call them by the old version."""
    fleet = pair.sender.fleet
    assert fleet is not None
    second = EngineBroadcast(fleet.rundir, fleet.engines[1:], 60)
    second.call("spoiling", "forget", "model.norm.weight")  # in the last round
    with pytest.raises(PeerError, match=r"engine-1 on 127.0.0.1: the weight update failed: "):
        pair.step()
    second.call("mending", "remember")
    pair.step()
    assert all(pair.distance(index=i) <= CLOSE for i in (0, 1))


# ---- how they die


def test_core_death_during_update_ends_the_run(pair: Side) -> None:
    """vLLM answers a pending call never, and its server ends with exit code 0."""
    engines, core = pair.engines, pair.engines.core(1)
    pids = engines.pids(1)
    core.suspend()
    killer = threading.Timer(1.0, lambda: core.send_signal(signal.SIGKILL))
    killer.start()
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"engine-1.*pausing"):
        pair.step()
    assert time.monotonic() - begin < 30
    code, message = engines.ended(1)
    assert code != 0
    assert "engine 1 on 127.0.0.1" in message
    assert re.search("died|exit code", message)
    assert gone(pids)


def test_killed_supervisor_leaves_nothing(pair: Side) -> None:
    """A supervisor that is killed takes all of its processes with it."""
    pids = pair.engines.pids(0)
    scratch = variables(pids[1])["TMPDIR"]
    assert len(pids) >= 3
    pair.engines.processes[0].kill()
    assert gone(pids)
    shutil.rmtree(scratch)  # an empty directory of sockets is all that a killed supervisor leaves


def test_sigterm_ends_an_engine_and_leaves_nothing(shm: Side) -> None:
    pids = shm.engines.pids()
    names = variables(pids[1])
    shared = shared_files(pids)
    assert shm.engines.stop() == [0]
    assert gone(pids, 30)
    assert not Path(names["TMPDIR"]).exists()
    assert not [path for path in shared if Path(path).exists()]
    assert shm.engines.key not in " ".join(names.values())
    assert shm.engines.rundir.failure() is None


def variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    return dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry)


def shared_files(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.mark.timeout(600)
def test_an_engine_that_cannot_start_says_why(tmp_path: Path, model: Path) -> None:
    cases = {
        "value": ({"vllm": {"load_format": "nothing"}}, "engine 0 on 127.0.0.1: .*(nothing|load_format|load-format)"),
        "memory": ({"vllm": {"kv_cache_memory_bytes": 2**50}}, "engine 0 on 127.0.0.1: .*memory"),
        "length": ({"rollout_max_context_len": 10**6}, "engine 0 on 127.0.0.1: .*max_model_len"),
        "late": (
            {"engine_start_timeout": 2.0},
            "engine 0 on 127.0.0.1 did not answer within --engine-start-timeout 2 s",
        ),
    }
    runs = {name: Engines(tmp_path / name, **({"model": model} | values)) for name, (values, _) in cases.items()}
    try:
        for name, (_, pattern) in cases.items():
            code, message = runs[name].ended(seconds=240)
            assert code != 0, name
            assert re.search(pattern, message), f"{name}: {message}"
            assert "\n" not in message
    finally:
        for engines in runs.values():
            engines.stop()


def test_foreign_host_cannot_be_bound(tmp_path: Path, model: Path) -> None:
    """An engine cannot bind an address of another host."""
    engines = Engines(tmp_path / "run", model, engine_start_timeout=60)
    engines.stop()
    place = Location("192.0.2.1", (1,))
    engines.write(Plan("test", 0, (Location("192.0.2.1", (0,)),), (place,), place))
    engines.processes = [engines._start(0)]
    code, message = engines.ended()
    assert code != 0
    assert "engine 0 on 192.0.2.1 cannot bind a port" in message


def test_engine_stopped_during_start(tmp_path: Path, model: Path) -> None:
    """An engine that is stopped while it starts leaves nothing behind."""
    engines = Engines(tmp_path / "run", model)
    deadline = time.monotonic() + 120
    while len(pids := engines.pids()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert engines.stop() == [0]
    assert gone(pids, 30)


def test_engine_hanging_during_start(tmp_path: Path, model: Path) -> None:
    """An engine that hangs while it starts is not waited for."""
    engines = Engines(tmp_path / "run", model, rollout_health_check_timeout=1)
    deadline = time.monotonic() + 120
    while not (server := psutil.Process(engines.processes[0].pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server[0].send_signal(signal.SIGSTOP)
    code, message = engines.ended()
    assert code != 0
    assert (
        message
        == f"engine 0 on 127.0.0.1 hangs: its process {server[0].pid} has been stopped for 1 s (--rollout-health-check-timeout)"
    )
    assert gone([server[0].pid], 30)
