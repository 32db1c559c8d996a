"""A host that has sandboxes and nothing else, with its real process: what becomes of it is no error of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.launch.attempts.retries import FailedAttempt, reason_to_end
from hpcrl.plan import Host, make_plan
from hpcrl.run.peers import SandboxPeer, newest
from hpcrl.run.role import read_options
from hpcrl.run.rundir import STOP, RunDir
from hpcrl.transport.auth import make_keys
from tests.support.able import needs
from tests.support.runs import REPO, alive

pytestmark = [pytest.mark.process, needs("namespaces")]


def until(done: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """An attempt over a host with trainer and engine, and one with sandboxes, whose address is this machine's."""
    options = Options(
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        custom_generate_function_path="m.f",
        sandbox_on="nodes",
        hang_timeout=600,
    )
    found = RunDir.create(tmp_path / "run")
    found.make_attempt()
    found.options_file.write_text(options.model_dump_json())
    plan = make_plan(options, [Host("a", 2), Host("b", 0, "127.0.0.1", "lo")], "r")
    found.plan_file.write_bytes(msgspec.json.encode(plan))
    make_keys(found, 1)
    return found


@pytest.fixture
def host(rundir: RunDir) -> Iterator[subprocess.Popen[str]]:
    words = [str(rundir.root), "--attempt", "0", "--host", "b"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcrl.launch.host", *words],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: newest(rundir, SandboxPeer, 0))
        yield process
    finally:
        process.terminate()
        process.wait(60)


def test_a_server_that_is_killed_is_started_again(rundir: RunDir, host: subprocess.Popen[str]) -> None:
    """Twice; the host ends with the run, and nothing is an error."""
    for incarnation in range(3):
        until(lambda incarnation=incarnation: newest(rundir, SandboxPeer, 0).incarnation == incarnation)
        peer = newest(rundir, SandboxPeer, 0)
        assert peer is not None
        if incarnation < 2:
            os.kill(peer.pid, signal.SIGKILL)
    rundir.request_end()
    assert host.wait(60) == 0 and rundir.failure() is None
    until(lambda: not alive(peer.pid))


def test_a_kind_that_cannot_be_had_is_final(rundir: RunDir) -> None:
    """It names the host, and no other attempt would do better."""
    options = read_options(rundir).model_copy(update={"sandbox_kind": "bwrap"})
    rundir.options_file.write_text(options.model_dump_json())
    words = [str(rundir.root), "--attempt", "0", "--index", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.sandbox.nodes.main", *words],
        env=os.environ | {"PYTHONPATH": str(REPO), "PATH": "/nowhere"},
        timeout=60,
    )
    failure = rundir.failure()
    assert done.returncode == 1 and failure is not None and failure.message.startswith("host b: no sandbox can be made")
    assert reason_to_end([FailedAttempt(failure, 0, False)], 4, 1)


def test_a_host_that_is_told_to_end_stops_no_run(rundir: RunDir, host: subprocess.Popen[str]) -> None:
    """As Slurm tells all processes of a step."""
    peer = newest(rundir, SandboxPeer, 0)
    assert peer is not None
    for pid in (host.pid, peer.pid):
        os.kill(pid, signal.SIGTERM)
    assert host.wait(60) == 0
    assert rundir.failure() is None and STOP not in rundir.signs()
