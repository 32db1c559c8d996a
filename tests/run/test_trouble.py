"""What goes wrong with machines: full and read-only file systems, memory that the kernel takes back, hardware, and what
the killed leave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.run import scratch as scratch_module
from hpcrl.run.exit_status import NOT_MEMORY, MemoryWatch, how_it_ended
from hpcrl.run.role import RoleContext, act
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.run.scratch import Scratch, sweep, swept
from hpcrl.run.storage_errors import WORDS, describe, retry_while_passing, write_obstacle
from tests.support.able import require
from tests.support.children import read_line

# ---- file systems


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    require("mounts")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True, timeout=240)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=240)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return filler
    return filler


def test_full_and_read_only_file_systems(small: Path) -> None:
    """A full and a read-only file system are named as such."""
    assert not write_obstacle(small) and list(small.iterdir()) == [], "a probe leaves nothing"
    filler = fill(small)
    assert "space left on device; 0.0 MB are free)" in write_obstacle(small)
    with pytest.raises(HpcrlError, match="cannot write.*/a:.*file system is full.*; free space"):
        write_atomic(small / "a", b"x" * 8192)
    assert not (small / "a").exists() and [path.name for path in small.iterdir() if path.name.startswith(".")] == []
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True, timeout=240)
    assert "read-only (Read-only file system)" in write_obstacle(small)
    with pytest.raises(HpcrlError, match="read-only.*;.*mounted for writing"):
        write_atomic(small / "a", b"x")
    with pytest.raises(UsageError, match="--run-dir.*:.*file system is read-only"):
        RunDir.create(small / "run")


def test_a_disk_that_is_full_for_a_moment_ends_nothing(small: Path) -> None:
    filler = fill(small)
    child = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.7); os.unlink({str(filler)!r})"])
    write_atomic(small / "a", b"x" * 8192, patience=30)
    assert (small / "a").read_bytes() == b"x" * 8192
    assert child.wait(10) == 0


def test_only_what_may_pass_is_tried_again() -> None:
    tries: list[int] = []

    def fail(number: int) -> None:
        tries.append(number)
        raise OSError(number, os.strerror(number))

    for number, again in ((errno.EACCES, False), (errno.ENOENT, False), (errno.ESTALE, True)):
        tries.clear()
        with pytest.raises(OSError, match=os.strerror(number)):
            retry_while_passing(lambda number=number: fail(number), 2.0)
        assert (len(tries) > 1) == again


@pytest.mark.parametrize("number", sorted(WORDS))
def test_what_the_system_says_stands_beside_ours(number: int) -> None:
    said = describe(OSError(number, os.strerror(number), "/some/where"))
    assert os.strerror(number) in said and not said.startswith(os.strerror(number))


def test_a_role_says_what_the_system_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()

    def body() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/shm/x")

    assert act("rollout", RoleContext(rundir, None, None, 0), 0, body) == 1  # type: ignore[arg-type]
    failure = rundir.failure()
    assert failure is not None
    assert failure.message.startswith("/dev/shm/x: ")
    assert "(Too many open files)" in failure.message and failure.message.endswith("ulimit -Hn")


@pytest.mark.parametrize("error", [RuntimeError("Connection reset by peer"), PeerError("Connection reset by peer")])
def test_secondary_error_waits_for_the_first(tmp_path: Path, error: Exception) -> None:
    """A secondary error waits for the process that knows the cause, and no longer."""
    first, second = (RunDir.create(tmp_path / name) for name in ("first", "second"))

    def body() -> None:
        raise error

    def end(rundir: RunDir, late: float) -> str:
        assert act("trainer", RoleContext(rundir, None, None, 0), 0, body, late=lambda _: late) == 1  # type: ignore[arg-type]
        return str(rundir.failure())

    for rundir in (first, second):
        rundir.make_attempt()
    knows = threading.Timer(0.5, first.fail, ("launcher", 0, "host node2 was killed"))
    knows.start()
    begun = time.monotonic()
    assert "host node2 was killed" in end(first, 60.0) and time.monotonic() - begun < 30
    assert "Connection reset by peer" in end(second, 0.3), "nobody knows better"


def test_the_launchers_word_replaces_an_echo(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    rundir.fail("trainer", 0, "Connection closed by peer")
    rundir.correct("host node2 does not answer (trainer-0: Connection closed by peer)")
    assert str(rundir.failure()) == "host node2 does not answer (trainer-0: Connection closed by peer)"


# ---- memory


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys, as a process in cgroup `own` sees them."""
    for name, text in {"proc/self/cgroup": own, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "events"),
    [
        ("0::/slurm/job_7/step_0\n", "sys/fs/cgroup/slurm/job_7/memory.events"),
        ("4:memory:/slurm/job_7/step_0\n0::/\n", "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control"),
    ],
)
def test_a_kill_in_a_cgroup_above_is_ours(tmp_path: Path, own: str, events: str) -> None:
    root = tree(tmp_path, own, {events: "oom 0\noom_kill 3\n", "proc/vmstat": "oom_kill 3\n"})
    watch = MemoryWatch(root)
    assert watch.sees and not watch.describe_kills()
    assert how_it_ended(-9, watch) == f"was killed by SIGKILL ({NOT_MEMORY})"
    (root / events).write_text("oom 1\noom_kill 4\n")
    (root / "proc/vmstat").write_text("oom_kill 4\n")
    said = "out of memory: the kernel killed 1 process: ask for more memory"
    assert watch.describe_kills() == said and said in how_it_ended(-9, watch) and said in how_it_ended(137, watch)
    assert said not in how_it_ended(-15, watch), "of a SIGTERM somebody else is the cause"


def test_a_host_without_memory_is_told_from_a_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", {"proc/vmstat": "pgfault 1\noom_kill 0\n"})
    watch = MemoryWatch(root)
    (root / "proc/vmstat").write_text("pgfault 1\noom_kill 2\n")
    assert "killed 2 processes" in watch.describe_kills()
    nothing = MemoryWatch(tmp_path / "nothing")
    assert not nothing.sees and how_it_ended(-9, nothing) == how_it_ended(-9), (
        "where nothing can be read nothing is claimed"
    )


def test_a_process_that_the_kernel_really_kills(tmp_path: Path) -> None:
    """In a cgroup of 64 MB, where one can be made."""
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    group = Path("/sys/fs/cgroup/memory") / line.rpartition(":")[2].lstrip("/") / f"hpcrl-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        pytest.skip("no cgroup of version 1 can be made here")
    code = (
        "import os, sys, subprocess; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()));"
        "from hpcrl.run.exit_status import MemoryWatch; from hpcrl.run.exit_status import how_it_ended;"
        "watch = MemoryWatch(); done = subprocess.run([sys.executable, '-c', 'x = bytearray(200 << 20)']);"
        "print(how_it_ended(done.returncode, watch))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(group)], capture_output=True, text=True, timeout=60, check=False
        )
        assert "SIGKILL (out of memory" in done.stdout, done
    finally:
        group.rmdir()


# ---- what the killed leave


MAKER = (
    "import sys, time; from hpcrl.run.scratch import Scratch; s = Scratch('engine'); "
    "s.name([__import__('pathlib').Path(sys.argv[1])]); print(s.path, flush=True); time.sleep(100)"
)


def test_scratch_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of killed processes are removed, and no others."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(scratch_module, "SHORT", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)
    shared = Path(f"/dev/shm/psm_hpcrl_test_{os.getpid()}")
    shared.write_text("x")
    child = subprocess.Popen([sys.executable, "-c", MAKER, str(shared)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    theirs = Path(read_line(child).strip())
    mine = Scratch("host")
    foreign, keep = tmp_path / "hpcrl-something", tmp_path / "other"
    foreign.mkdir()
    keep.mkdir()
    (tmp_path / "hpcrl-link").symlink_to(keep)
    assert theirs.parent == tmp_path and sweep() == [], "whoever lives keeps his"
    with swept():
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert not theirs.exists() and not shared.exists()
    assert mine.path.exists() and foreign.exists() and keep.exists()
    mine.remove()
    assert not mine.path.exists()


def test_directory_filled_during_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters a directory while it is removed is removed the next time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(scratch_module, "SHORT", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)
    made = Scratch("engine")
    (made.path / "beats").mkdir()
    rmtree = scratch_module.shutil.rmtree

    def late(path: str, ignore_errors: bool) -> None:
        """A process that has not noticed yet that all is over."""
        rmtree(path, ignore_errors=ignore_errors)
        (made.path / "socket").touch()

    monkeypatch.setattr(scratch_module.shutil, "rmtree", late)
    made.remove()
    assert (made.path / "socket").exists()
    monkeypatch.undo()
    monkeypatch.setattr(scratch_module, "SHORT", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert sweep() == [made.path] and not made.path.exists()


CUT = {
    "before it is held": "scratch.fcntl.flock = die",
    "before it has its name": "scratch.Path.rename = die",
    "at once": "",
}


@pytest.mark.parametrize("moment", CUT)
def test_kill_while_making_a_directory(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed while making a directory leaves it to the next removal."""
    die = "import os; from hpcrl.run import scratch\ndef die(*_): os.kill(os.getpid(), 9)\n"
    ended = subprocess.run(
        [sys.executable, "-c", f"{die}{CUT[moment]}\nscratch.Scratch('torchrun'); die()"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=240,
    )
    (left,) = tmp_path.iterdir()
    assert ended.returncode == -signal.SIGKILL and left.name.startswith("hpcrl-torchrun-")
    monkeypatch.setattr(scratch_module, "SHORT", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if moment != "at once":  # a maker that lives might be about to lock it, until HELD_AFTER
        young = time.time() + 60
        os.utime(left / scratch_module.NEW, (young, young))
        assert sweep() == [] and left.exists()
        os.utime(left / scratch_module.NEW, (young - 120, young - 120))
    assert sweep() == [left] and not left.exists(), "as soon as its maker is gone"
