"""Run directories, hostile or damaged: what looks at runs neither hangs nor crashes, and does nothing to others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.cli.stop import stop
from hpcrl.doctor.selftest.registry import Results
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch import probe
from hpcrl.launch.attempts.progress import check_headway, position
from hpcrl.launch.broken_hosts import broken_hosts
from hpcrl.launch.node_checks.all_nodes import REPORT, gather
from hpcrl.launch.node_checks.records import ALL, NodeRecord, all_records
from hpcrl.plan import Host
from hpcrl.report.run_files import Run, load_json
from hpcrl.report.timeline.reading import read_tracks
from hpcrl.run.engine_files import EngineReports, read_views
from hpcrl.run.peers import EnginePeer, PublishedRecords, find
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import Damaged, count_of, open_regular, parse_json, read_json, read_regular, touch
from hpcrl.utils.waiting import Deadline
from tests.support.ledger_account import account

DEEP = "[" * 200_000
HUGE = "1" + "0" * 400


def make(root: Path, name: str = "victim") -> Path:
    """A run directory that looks as if it were at work."""
    path = root / name
    (path / "attempts" / "0" / "peers").mkdir(parents=True)
    (path / "logs" / "attempt-0").mkdir(parents=True)
    (path / "recipe.json").write_text(json.dumps({"identity": "x", "path": "r.toml"}))
    (path / "recipe.toml").write_text("")
    (path / "options.json").write_text("{}")
    (path / "state.json").write_text(
        json.dumps({"phase": "running", "time": time.time(), "host": "elsewhere", "pid": 1})
    )
    return path


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def to(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return link


def holding(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


ROW = '{"rollout_id": 3, "train/loss": 1, "perf/step_time": %s, "time": %s}\n'
HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{
        f"{name} a FIFO": (name, fifo)
        for name in ("state.json", "job.json", "recipe.toml", "metrics.jsonl", "lock", "options.json")
    },
    **{
        f"{name} endless": (name, to("/dev/zero"))
        for name in ("state.json", "job.json", "metrics.jsonl", "lock", "recipe.toml")
    },
    **{
        f"{name} deep": (name, holding(DEEP))
        for name in ("state.json", "job.json", "metrics.jsonl", "attempts/0/plan.json")
    },
    "recipe.toml deep": ("recipe.toml", holding("a = " + DEEP)),
    "metrics deep": ("metrics.jsonl", holding(DEEP + "\n")),
    "metrics huge": ("metrics.jsonl", holding(ROW % (HUGE, HUGE))),
    "metrics infinite": ("metrics.jsonl", holding(ROW % ("Infinity", "-Infinity"))),
    "metrics far": ("metrics.jsonl", holding(ROW % ("1e300", "1e300"))),
    "metrics digits": ("metrics.jsonl", holding('{"rollout_id": ' + "9" * 5000 + "}\n")),
    "attempt of superscripts": ("attempts/\u00b2", Path.mkdir),
    "logs of superscripts": ("logs/attempt-\u00b2", Path.mkdir),
    "attempt of many digits": ("attempts/" + "9" * 200, Path.mkdir),
    "state of another kind": ("state.json", holding("[]")),
    "state at the end of time": ("state.json", holding('{"phase": "running", "time": 1e300, "ends": 1e300}')),
    "state with escapes": (
        "state.json",
        holding(json.dumps({"phase": "failed", "time": 1, "message": "\x1b]0;x\x07\u202eevil\x9b2J"})),
    ),
    "log a FIFO": ("logs/attempt-0/trainer-0.log", fifo),
    "log endless": ("logs/attempt-0/trainer-0.log", to("/dev/zero")),
    "error of another kind": ("attempts/0/error.json", holding('{"role": 1}')),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_who_looks_at_it_is_neither_stopped_nor_misled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    good = make(tmp_path / "runs", "good")
    bad = make(tmp_path / "runs", "bad")
    place, spoil = HOSTILE[name]
    spoil(bad / place)
    assert main(["status"]) == 0
    shown = capsys.readouterr()
    assert str(good.name) in shown.out and "bad" in shown.out
    for command in (["status", str(bad)], ["logs", str(bad)], ["runs"], ["stop", str(bad)], ["cancel", str(bad)]):
        assert main(command) in (0, 1, 2), command
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert strip_control(text, lines=True) == text
        assert "Traceback" not in text


#: file in a run (or another) directory -> what reads it
READERS: dict[str, Callable[[Path], object]] = {
    "attempts/0/engines.json": lambda root: read_views(root / "attempts" / "0"),
    "attempts/0/hosts.json": lambda root: load_json(root / "attempts/0/hosts.json", list[Host], []),
    "attempts/0/hosts/a.json": lambda root: probe.gather(RunDir(root, 0), ["a"], 0.0),
    "attempts/0/peers/engine-0.json": lambda root: (
        find(RunDir(root, 0), EnginePeer),
        EngineReports(RunDir(root, 0)).new(),
    ),
    "broken-hosts.json": broken_hosts,
    "headway.json": lambda root: check_headway(root, 1),
    "checkpoints/latest_checkpointed_iteration.txt": position,
    "options.json": lambda root: read_options(RunDir(root, 0)),
    "recipe.toml": lambda root: Run(root).planned,
    "ledger/attempt-0.jsonl": account,
    "timeline/trainer-0.jsonl": lambda root: read_tracks(root / "timeline/trainer-0.jsonl", 0),
    "results/loss.json": lambda root: Results(root).read(),
    f"a{REPORT}": lambda root: gather(root, 1, Deadline(0.0)),
    "records/a.json": lambda root: PublishedRecords(root / "records", NodeRecord).poll(),
    f"records/all{ALL}": lambda root: all_records(root / "records", 1, 0.0),
    "keys/http.key": lambda root: http_key(RunDir(root, 0), 0),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("spoil", [fifo, to("/dev/zero"), holding(DEEP)], ids=["FIFO", "endless", "deep"])
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_a_file_of_a_run_comes_back(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    """With what it can do without the file, or with an error of ours."""
    root = make(tmp_path)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    spoil(root / name)
    with contextlib.suppress(HpcrlError, OSError):
        READERS[name](root)


def test_a_stop_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bad, other = make(tmp_path, "bad"), tmp_path / "not-there"
    (bad / "stop").symlink_to(other)
    with pytest.raises(HpcrlError, match="already stopping|cannot write"):
        stop([str(bad)])
    assert not other.exists()


def test_a_linked_lock_is_nobodys(tmp_path: Path) -> None:
    """The lock of another run must not make its launcher this one's."""
    from hpcrl.cli.find_run import owner

    other, bad = make(tmp_path, "other"), make(tmp_path, "bad")
    with (other / "lock").open("w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        assert owner(other).pid == os.getpid()
        (bad / "lock").symlink_to(other / "lock")
        assert owner(bad) is None


def test_damaged_and_stale_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged first error is an error, and a stale one is read again."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    path = rundir.here / "error.json"
    for text in ("", "{", DEEP, '{"role": 1}', "\udcff".encode(errors="surrogateescape").decode("latin-1")):
        path.write_text(text)
        with pytest.raises(PeerError, match=r"attempt has failed, and.*error\.json is damaged"):
            rundir.check()
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(PeerError, match="the attempt has failed"):
        rundir.check()

    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("hpcrl.run.rundir.read_json", stale)
    rundir.check()


def test_careful_reading(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("[1]")
    assert read_regular(path, 3) == b"[1]" and read_json(path, list[int]) == [1]
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_regular(path, 2)
    with pytest.raises(Damaged):
        read_json(path, dict)
    for wrong in (DEEP.encode(), b"{", b"\xff", b"9" * 5000):
        with pytest.raises(Damaged):
            parse_json(wrong)
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "."):
        with pytest.raises(OSError):  # noqa: PT011
            open_regular(tmp_path / name)
        with pytest.raises(OSError):  # noqa: PT011
            touch(tmp_path / name)
    touch(path)
    assert path.read_text() == "[1]"
    assert [count_of(name) for name in ("12", "", "-1", "\u00b2", "1" * 10)] == [12, None, None, None, None]


def test_command_error_is_escaped(tmp_path: Path) -> None:
    """An error of a command cannot send escape codes to the terminal."""
    word = "\x1b[31m\x9b\u202ex\x07"
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl", "status", word], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2 and "is no run x" in done.stderr
