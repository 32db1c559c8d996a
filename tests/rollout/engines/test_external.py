"""Engines that the run has not started: found, watched, back again; and whose keys open what."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.engine.membership.registry import Registry
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.launch.standalone_engine import borrow, prepare
from hpcrl.plan import Location, Plan
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.engines import external
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.external import ExternalEngine
from hpcrl.run.engine_files import end_of
from hpcrl.run.peers import EnginePeer, peer_file
from hpcrl.run.role import RoleContext, read_plan
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import borrowed_key, http_key, key_of_engine, make_keys
from tests.support.runs import unused_port

HERE = Location("127.0.0.1", (0,))
_REALMS = itertools.count(1)


class Served:
    """A server that answers what an engine's does.  core: whether its engine core answers; late: it says once that a
    call is late; model: what it serves; realm: the name of its key, each time another; told: keys that it was told,
    answered: those that it took; guard: whether it looks at them."""

    def __init__(self, key: str, port: int = 0) -> None:
        self.core = True
        self.late = False
        self.model = "policy"
        self.realm = f"{next(_REALMS):032x}"
        self.told = set[str | None]()
        self.answered = set[str]()
        self.guard = True
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.told.add(self.headers["Authorization"])
                given = self.headers["Authorization"]
                if not given or (served.guard and given != f"Bearer {key_of_engine(key.encode(), served.realm)}"):
                    return self.say(401, b'{"error": "key"}')
                served.answered.add(given)
                if self.path == external.CORE and served.late:
                    served.late = False
                    return self.say(external.LATE, b'{"error": "/update_weights for 9 s, of 8"}')
                if self.path == external.CORE and not served.core:
                    time.sleep(0.2)
                    return None
                return self.say(200, b'{"data": [{"id": "%s", "max_model_len": 64}]}' % served.model.encode())

            def say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status == 401:
                    self.send_header("WWW-Authenticate", f'Bearer realm="{served.realm}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serving(key: str, port: int = 0) -> Iterator[Served]:
    served = Served(key, port)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "POLL", 0.02)


def run_with(path: Path, *addresses: str, **values: float) -> RoleContext:
    """A run that has these engines, and the keys of `path`/keys."""
    plan = Plan("run", 0, (HERE,), (HERE,), HERE, addresses)
    options = Options(
        rollout_external_engine_keys=str(path / "keys"), rollout_external_engine_addrs=list(addresses), **values
    )
    rundir = RunDir.create(path / "run")
    rundir.make_attempt()
    make_keys(rundir, 1)
    return RoleContext(rundir, options, plan, 0)


async def until(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_it_comes_is_gone_and_comes_back(tmp_path: Path, fast: None) -> None:
    port = unused_port()
    context = run_with(tmp_path, f"127.0.0.1:{port}", attempts=3, rollout_health_check_timeout=2.0)
    (context.rundir.keys / "engine-1.key").write_text("k" * 64)
    pool = EnginePool(context.rundir, context.plan, context.options, registry=Registry(1))
    member = pool.registry.members[1]

    def state() -> str:
        pool.poll_engines()
        return f"{member.state} {member.incarnation}"

    async def go() -> None:
        watching = asyncio.create_task(ExternalEngine(context, 1, f"127.0.0.1:{port}").keep())
        await asyncio.sleep(0.1)
        assert state() == "starting 0"
        with serving("k" * 64, port):
            await until(lambda: state() == "joining 0")
            assert pool.registry.members[1].address.port == port and pool.registry.members[1].model_len == 64
        await until(lambda: state() == "ended 0")
        assert "there is no listener" in member.why
        with serving("k" * 64, port) as served:
            await until(lambda: state() == "joining 1")
            served.late = True
            await until(lambda: state() == "joining 2")
            end = end_of(context.rundir, 1, 1)
            assert end and "busy with /update_weights for 9 s, of 8 (--update-timeout)" in end.why
            served.core = False
            await until(lambda: state() == "gone 2")
            assert "no sign of life" in member.why, "a core that answers nothing is a hung engine"
            await asyncio.wait_for(watching, 5)
        await pool.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("key", "model", "wrong", "message"),
    [
        ("k" * 64, "llama", UsageError, "does not serve 'policy'.*hpcrl engines serve"),
        ("x" * 64, "policy", UsageError, "not take the keys.*--rollout-external-engine-keys"),
        (None, "policy", DeadlineError, "did not answer within --engine-start-timeout 1 s .there is no listener"),
    ],
)
def test_what_is_no_engine_for_this_run_ends_it(
    tmp_path: Path, fast: None, key: str | None, model: str, wrong: type[HpcrlError], message: str
) -> None:
    with serving(key or "") as served:
        served.model = model
        if key is None:
            served.close()
        context = run_with(tmp_path, f"127.0.0.1:{served.port}", engine_start_timeout=0.5)
        (context.rundir.keys / "engine-1.key").write_text("k" * 64)
        with pytest.raises(wrong, match=message.replace("1 s", "0 s")):
            asyncio.run(ExternalEngine(context, 1, f"127.0.0.1:{served.port}").keep())


def test_keys_are_shared_by_pairs_only(tmp_path: Path) -> None:
    """What `hpcrl engines serve` starts with, and what the run borrows."""
    keys = tmp_path / "keys"
    addresses = ("127.0.0.1:8100", "127.0.0.1:8101")
    served = [prepare(Options(hf_checkpoint="m"), address, keys) for address in addresses]
    context = run_with(tmp_path, *addresses)
    lent = borrow(context.rundir, context.plan, context.options)
    assert lent is not None
    ours = [borrowed_key(context.rundir, 1 + number, "0.0") for number in range(2)]
    assert ours == [http_key(rundir, 0) for rundir in served] and len(set(ours)) == 2
    for rundir in served:
        assert read_plan(rundir).external and oct(rundir.root.stat().st_mode)[-3:] == "700"
    other = run_with(tmp_path / "other", *addresses)
    options = context.options
    with pytest.raises(UsageError, match="run uses the engines"):
        borrow(other.rundir, other.plan, options)
    lent.close()
    again = borrow(other.rundir, other.plan, options)
    assert again is not None
    again.close()
    make_keys(context.rundir, 1)
    assert http_key(context.rundir, 1) not in ours, "keys of an earlier attempt are not kept"


def test_an_engine_served_again_has_another_key(tmp_path: Path, fast: None) -> None:
    """Who listens at its address meanwhile is told a key that opens nothing afterwards, whatever realm it names."""
    port = unused_port()
    with serving("k" * 64, port) as first:
        context = run_with(tmp_path, f"127.0.0.1:{port}", attempts=3, rollout_health_check_timeout=2.0)
        (context.rundir.keys / "engine-1.key").write_text("k" * 64)

        async def go() -> None:
            watching = asyncio.create_task(ExternalEngine(context, 1, f"127.0.0.1:{port}").keep())
            await until(peer_file(context.rundir.here, EnginePeer, 1, 0).exists)
            first.close()
            with serving("s" * 64, port) as stranger:  # it looks at no key, and names the realm that it has heard
                stranger.realm = first.realm
                stranger.guard = False
                await until(lambda: any(stranger.told))
            with serving("k" * 64, port) as again:
                await until(lambda: any(again.answered))
            told = {key for key in stranger.told if key}
            assert told == {f"Bearer {http_key(context.rundir, 1, 0)}"} and not told & again.answered
            await cancel(watching)

        asyncio.run(go())


def test_keys_that_are_not_there_are_missed_by_name(tmp_path: Path) -> None:
    context = run_with(tmp_path, "127.0.0.1:8100")
    with pytest.raises(UsageError, match="--rollout-external-engine-keys .*keys: No such file"):
        borrow(context.rundir, context.plan, context.options)
    assert borrow(context.rundir, Plan("run", 0, (HERE,), (HERE,), HERE), context.options) is None


def test_unreachable_trainer_is_refused(tmp_path: Path) -> None:
    """An engine elsewhere is refused where it could not reach the trainer."""
    context = run_with(tmp_path, "10.0.0.5:8100")
    with pytest.raises(UsageError, match="10.0.0.5:8100:.*machine alone and listens.*127.0.0.1"):
        borrow(context.rundir, context.plan, context.options)
