"""Compiled code of a role: unpacked before it starts, packed by one, and never a reason to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hpcrl.config.options import Options
from hpcrl.engine import main
from hpcrl.engine.main import EngineSupervisor
from hpcrl.errors import PeerError
from hpcrl.run import gpu_environment
from hpcrl.run.compile_cache import role_cache
from hpcrl.run.compile_cache.role_cache import ALSO, DEFAULT, KeptCode, kept_directory
from hpcrl.run.gpu_environment import CACHES
from hpcrl.run.rundir import RunDir

Node = Callable[..., KeptCode]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A role on a node whose temporary directory has the path of every node's; `new`: that is empty."""
    (place := tmp_path / "node").mkdir()
    for name, value in {"LAST": 60.0, "QUIET": 0.0}.items():
        monkeypatch.setattr(role_cache, name, value)
    monkeypatch.setattr(gpu_environment.tempfile, "gettempdir", lambda: str(place))
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")

    def start(
        new: bool = True, run: str = "runs/first", base: dict[str, str] | None = None, keep: bool = True, **values: Any
    ) -> KeptCode:
        if new:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        options = Options(hf_checkpoint=str(model), **values)
        return KeptCode(options, RunDir(tmp_path / run), "engine", (0,), base or {}, place, keep)

    return start


def compiles(code: KeptCode, **files: bytes) -> None:
    """Put files where a role's libraries would, and have them packed."""
    for name, data in files.items():
        path = Path(code.variables["TRITON_CACHE_DIR"]) / name / "kernel"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    code.watch(compiled=True)
    code.finish()
    assert code._thread is None or not code._thread.is_alive()


def has(code: KeptCode) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in Path(code.variables["TRITON_CACHE_DIR"]).glob("*/kernel")}


def test_next_run_on_another_node_has_the_code(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a run has compiled is there when the next begins on an empty node, and says so; the archive stays as it
    is from then on."""
    first = node()
    assert has(first) == {} and "nothing kept" in capfd.readouterr().err
    compiles(first, a=b"1", b=b"2")
    assert "2 files, 0.0 MiB, packed" in capfd.readouterr().err
    second = node(run="runs/second")
    assert has(second) == {"a": b"1", "b": b"2"} and second.where == first.where
    assert "2 files, 0.0 MiB, unpacked" in capfd.readouterr().err
    [archive] = (tmp_path / "runs" / DEFAULT).iterdir()
    before = archive.stat().st_ino
    compiles(second, c=b"3")
    assert archive.stat().st_ino == before and has(node()) == {"a": b"1", "b": b"2"}
    assert has(node(new=False)) == {"a": b"1", "b": b"2"} and "from an earlier start" in capfd.readouterr().err
    for name, value in second.variables.items():
        assert value == ALSO.get(name, str(second.where and second.where.here / CACHES.get(name, "")))


def test_nothing_is_packed_while_files_change(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was written just now is not packed, also at the end of a role; once it has settled it is."""
    monkeypatch.setattr(role_cache, "QUIET", 600.0)
    monkeypatch.setattr(role_cache, "LAST", 2.0)
    code = node()
    (path := Path(code.variables["TRITON_CACHE_DIR"]) / "a/kernel").parent.mkdir(parents=True)
    path.write_bytes(b"half")
    code.watch(compiled=True)
    code.finish()
    assert code._thread and code._thread.is_alive() and not (tmp_path / "runs").exists()
    os.utime(path, (1, 1))
    code._thread.join(60)
    assert "1 files, 0.0 MiB, packed" in capfd.readouterr().err and has(node()) == {"a": b"half"}


def test_unused_directories_of_the_node_go(node: Node) -> None:
    """A role removes other shapes' directories that none has begun to use for long."""
    where = node().where
    assert where
    gone, fresh = (where.here.parent / f"engine-{letter * 24}" for letter in "ab")
    for path in (gone, fresh):
        path.mkdir(mode=0o700)
    os.utime(gone, (1, 1))
    os.utime(where.here, (1, 1))
    node(new=False)
    assert [path.exists() for path in (gone, fresh, where.here)] == [False, True, True]


def test_code_with_which_a_role_died_goes(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After a role that had code of earlier starts died before it was up, neither archive nor node has it; one that had
    none removes nothing."""
    first = node()
    compiles(first, a=b"1")
    first.discard()
    second = node()
    assert has(second) == {"a": b"1"}
    capfd.readouterr()
    second.discard()
    assert "before it was up" in capfd.readouterr().err
    assert not list((tmp_path / "runs" / DEFAULT).iterdir()) and has(node(new=False)) == {}


@pytest.mark.parametrize(
    ("status", "up", "discarded"), [(-11, False, 1), (1, False, 1), (-11, True, 0), (-15, False, 0), (None, False, 0)]
)
def test_engine_that_dies_early_discards_code(
    monkeypatch: pytest.MonkeyPatch, status: int | None, up: bool, discarded: int
) -> None:
    """An engine whose server dies before it was ever up discards kept code; one that was up, or was ended from outside,
    does not."""
    engine = EngineSupervisor.__new__(EngineSupervisor)
    names = ("context", "memory", "log", "standing", "made", "code")
    vars(engine).update({name: MagicMock() for name in names})
    vars(engine).update(name="engine 0", died=False, stopped=threading.Event(), shared=set(), child=MagicMock())
    engine.child.poll.return_value = status
    engine.standing.longest.return_value = None
    engine.context.options.rollout_health_check_timeout = 60.0
    for name in ("leftovers", "descendants", "end_processes", "end_descendants"):
        monkeypatch.setattr(main, name, lambda *_: set())
    monkeypatch.setattr(main, "was_up", lambda *_: up)
    monkeypatch.setattr(main.psutil, "Process", MagicMock())
    monkeypatch.setattr(main, "how_it_ended", lambda *_: "died")
    with contextlib.suppress(PeerError):
        engine._check_child()
    engine.end()
    assert engine.code.discard.call_count == discarded and not engine.code.finish.called


def test_directory_named_after_the_job(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the node's directory has the job's number, no archive is made that the next job could not use, which is
    said."""
    (place := tmp_path / "job.471100").mkdir()
    monkeypatch.setattr(gpu_environment.tempfile, "gettempdir", lambda: str(place))
    code = node(base={"SLURM_JOB_ID": "471100"})
    assert code.where is None and set(code.variables) == set(CACHES)
    assert capfd.readouterr().err.count("another path in each job") == 1
    assert node(base={"SLURM_JOB_ID": "4711"}).where


def test_another_shape_is_not_used(node: Node) -> None:
    compiles(node(), a=b"1")
    assert has(node(bf16=False)) == {} and has(node()) == {"a": b"1"}


def test_none_keeps_nothing(node: Node, tmp_path: Path) -> None:
    """Where nothing is kept, or all places are the user's, nothing is read or written."""
    compiles(node(), a=b"1")
    shutil.rmtree(tmp_path / "runs")
    off = node(keep=False)
    assert off.where is None and set(off.variables) == set(CACHES)
    own = node(base=dict.fromkeys(CACHES, "/mine"))
    assert own.where is None and own.variables == {}
    for code in (off, own):
        code.watch()
        code.finish()
    assert not (tmp_path / "runs").exists()


def test_directory_of_archives(tmp_path: Path) -> None:
    """Next to the run, and of a stage next to its run."""
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    assert kept_directory(run) == tmp_path / "runs" / DEFAULT and DEFAULT.endswith(f"-{os.getuid()}")
    (run / "recipe.json").touch()
    assert kept_directory(run) == kept_directory(run / "stage") == tmp_path / "runs" / DEFAULT


# ---- what goes wrong is a note


@pytest.mark.parametrize("how", ["cut off", "another byte", "empty", "a link", "open to a group", "directory open"])
def test_bad_archive_is_one_line(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    """A damaged archive is said in a line, and removed; one that others could have written is not used.  The run
    compiles for itself, and where it may it packs that."""
    compiles(node(), a=b"1" * 5000)
    kept = tmp_path / "runs" / DEFAULT
    archive = next(kept.iterdir())
    data = archive.read_bytes()
    if how == "cut off":
        os.truncate(archive, len(data) - 9)
    elif how == "another byte":
        archive.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    elif how == "empty":
        os.truncate(archive, 0)
    elif how == "a link":
        archive.rename(tmp_path / "elsewhere")
        archive.symlink_to(tmp_path / "elsewhere")
    else:
        (archive if how == "open to a group" else kept).chmod(0o770)
    capfd.readouterr()
    code = node()
    said = [line for line in capfd.readouterr().err.splitlines() if "compile cache" in line]
    assert has(code) == {} and len(said) == 1 and "note:" in said[0]
    assert archive.exists() is (how not in ("cut off", "another byte", "empty"))
    compiles(code, b=b"2")
    if how in ("cut off", "another byte", "empty"):
        assert "removed" in said[0] and has(node()) == {"b": b"2"}
    else:
        assert has(node()) == {}


def test_directory_that_cannot_be_written(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A place where no directory of archives can be made costs a note, not the run."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / DEFAULT).touch()
    code = node()
    compiles(code, a=b"1")
    assert capfd.readouterr().err.count("note: compile cache") == 2


def test_full_file_system(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No room for the archive: a note, and nothing of it is left."""
    import resource
    import signal

    code = node()
    (path := Path(code.variables["TRITON_CACHE_DIR"]) / "a/kernel").parent.mkdir(parents=True)
    path.write_bytes(os.urandom(1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        code.watch(compiled=True)
        code.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "note: compile cache" in capfd.readouterr().err
    assert not list((tmp_path / "runs" / DEFAULT).iterdir())
