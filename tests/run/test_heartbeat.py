"""Who gives no sign of life is found, and who is only slow is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import PeerError
from hpcrl.launch.attempts.attempt import _check_hosts
from hpcrl.launch.host import check_alive
from hpcrl.run.heartbeat import HeartbeatMonitor, HeartbeatWriter
from hpcrl.run.rundir import RunDir

#: a process that beats, and then does what it is told
CHILD = """
import ctypes, sys, time
from hpcrl.run.heartbeat import HeartbeatWriter
with HeartbeatWriter(sys.argv[1], sys.argv[2], every=0.05):
    time.sleep(0.3)
    exec(sys.argv[3])
"""
HOLDS = "ctypes.PyDLL(None).usleep(60_000_000)"


class TimeLimitWatcher:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def start(folder: Path, name: str, then: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), name, then])
    end = time.monotonic() + 20
    while not (folder / name).exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    return process


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait(60)


def looks(pulse: HeartbeatMonitor, seconds: float, limit: float) -> list[str]:
    """What the looks of some seconds found, until one finds something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := pulse.silent(limit):
            return [str(silent) for silent in found]
        time.sleep(0.02)
    return []


@pytest.mark.process
def test_stopped_process_is_found(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """A stopped process is found, and a living one is not reported."""
    children += [start(tmp_path, "trainer-0", "time.sleep(60)"), start(tmp_path, "trainer-1", "time.sleep(60)")]
    pulse = HeartbeatMonitor(tmp_path, look=0.1)
    assert looks(pulse, 2.5, 2.0) == []
    children[1].send_signal(signal.SIGSTOP)
    (found,) = looks(pulse, 20, 0.8)
    assert f"(process {children[1].pid}, which is stopped)" in found
    children[1].send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert looks(HeartbeatMonitor(tmp_path, look=0.1), 2.5, 2.0) == []


@pytest.mark.process
def test_an_interpreter_that_stands_still_is_found(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """Its threads live, its process sleeps: nothing in it can say so."""
    children.append(start(tmp_path, "trainer-0", HOLDS))
    (found,) = looks(HeartbeatMonitor(tmp_path, look=0.1), 20, 0.8)
    assert "gives no sign" in found


def test_who_computes_without_a_word_is_at_work(tmp_path: Path) -> None:
    """A compiler that holds the interpreter: no number comes, but the processor is used."""
    (tmp_path / "trainer-0").write_text(f"{os.getpid()} 1")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path, look=0.01, clock=clock)
    for _ in range(20):
        begun = time.process_time()
        while time.process_time() - begun < 0.05:
            pass
        clock.now += 0.03
        assert pulse.silent(0.1) == []
    for _ in range(20):
        clock.now += 0.03
        if found := pulse.silent(0.1):
            break
    assert found[0].pid == os.getpid(), "once it uses no processor any more, it is silent"


def test_suspended_watcher_blames_no_one(tmp_path: Path) -> None:
    """A watcher that was suspended itself blames no one."""
    (tmp_path / "trainer-0").write_text("1 1")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path, here=False, look=5.0, clock=clock)
    assert pulse.silent(60) == []
    clock.now = 3600.0
    assert pulse.silent(60) == []
    for clock.now in range(3605, 3660, 5):
        assert pulse.silent(60) == []
    clock.now = 3665.0
    assert [silent.name for silent in pulse.silent(60)] == ["trainer-0"]


def test_a_process_that_ended_is_not_silent(tmp_path: Path) -> None:
    with HeartbeatWriter(tmp_path, "rollout-0", every=0.05):
        pass
    assert list(tmp_path.iterdir()) == []
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    (tmp_path / "trainer-0").write_text(f"{process.pid} 1")
    (tmp_path / "trainer-1").write_text("\xff nonsense")
    (tmp_path / "trainer-2").symlink_to("/dev/zero")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path, look=0.0, clock=clock)
    for clock.now in range(100):
        assert pulse.silent(10) == []


@pytest.mark.parametrize(
    ("name", "role"), [("trainer-3", "trainer"), ("torchrun-3", "trainer"), ("rollout-0", "rollout")]
)
def test_the_host_names_who_hangs(tmp_path: Path, name: str, role: str) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    (tmp_path / "beats").mkdir()
    (tmp_path / "beats" / name).write_text("1 1")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path / "beats", here=False, look=5.0, clock=clock)
    for clock.now in range(0, 61, 5):
        check_alive(pulse, 60, rundir, "node2")
    clock.now = 65.0
    with pytest.raises(PeerError, match=rf"on node2: {name}.*sign of life for 65 s \(process 1\).*--hang-timeout"):
        check_alive(pulse, 60, rundir, "node2")
    assert rundir.failure().role == role
    assert rundir.failure().index == int(name[-1])


def test_an_engines_supervisor_is_only_said_to_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    (tmp_path / "engine-1").write_text("1 1")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path, here=False, clock=clock)
    for clock.now in range(0, 100, 5):
        check_alive(pulse, 60, rundir, "node2")
    assert "engine-1 gives no sign" in capsys.readouterr().err
    assert rundir.failure() is None


def test_the_launcher_names_a_host_that_hangs(tmp_path: Path) -> None:
    """One of the plan; a spare host is looked for when it is needed."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    (tmp_path / "beats").mkdir()
    (tmp_path / "beats" / "node3").write_text("1 1")
    clock = TimeLimitWatcher()
    pulse = HeartbeatMonitor(tmp_path / "beats", here=False, look=10.0, clock=clock)
    for clock.now in range(0, 71, 10):
        _check_hosts(pulse, ["node1", "node3"], 60, rundir)
    clock.now = 80.0
    _check_hosts(pulse, ["node1"], 60, rundir)
    clock.now = 90.0
    with pytest.raises(PeerError, match="the process of host node3.*sign of life for 90 s"):
        _check_hosts(pulse, ["node1", "node3"], 60, rundir)
    assert rundir.failure().role == "launcher"
