"""The directory of archives: whose it has to be, one writer's archive or another's, and its bound."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from hpcrl.run.compile_cache import store
from hpcrl.run.compile_cache.store import ABANDONED, ArchiveDirectory, identity
from hpcrl.utils.untrusted_files import Damaged


def put(archives: ArchiveDirectory, shape: str, data: bytes) -> str:
    return archives.put(shape, lambda out: out.write(data))


def read(archives: ArchiveDirectory, shape: str) -> bytes:
    with archives.open(shape) as file:
        return file.read()


def test_an_archive_is_whole_and_its_owners_alone(tmp_path: Path) -> None:
    """What is put is read; another one takes its place; nothing else is left, and other users can read none of it."""
    place = tmp_path / "not/there/yet"
    with pytest.raises(FileNotFoundError):
        ArchiveDirectory(place)
    old = os.umask(0)
    try:
        with ArchiveDirectory(place, make=True) as archives:
            with pytest.raises(FileNotFoundError):
                archives.open("engine-1")
            put(archives, "engine-1", b"first")
            made = put(archives, "engine-1", b"second")
            with archives.open("engine-1") as file:
                assert file.read() == b"second" and identity(os.fstat(file.fileno())) == made
    finally:
        os.umask(old)
    assert [(path.name, path.stat().st_mode & 0o777) for path in place.iterdir()] == [("engine-1.tar.gz", 0o600)]
    assert place.stat().st_mode & 0o777 == 0o700 and place.parent.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("what", ["open to a group", "a link", "a file", "of another user"])
def test_directory_of_others_is_refused(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in which another user could have put code is not used."""
    place = tmp_path / "kept"
    if what == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
    elif what == "a file":
        place.touch()
    else:
        place.mkdir(mode=0o700)
        if what == "open to a group":
            place.chmod(0o770)
        else:
            mine = os.getuid()
            monkeypatch.setattr(store.os, "getuid", lambda: mine + 1)
    with pytest.raises((Damaged, OSError)):
        ArchiveDirectory(place, make=True)


@pytest.mark.parametrize("what", ["writable by a group", "readable by all", "a link", "a pipe", "of another user"])
def test_archive_of_others_is_refused(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that another user could have written is not read, and no pipe is waited for."""
    place = tmp_path / "kept"
    with ArchiveDirectory(place, make=True) as archives:
        put(archives, "engine-1", b"code")
        file = place / "engine-1.tar.gz"
        if what in ("a link", "a pipe"):
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere") if what == "a link" else os.mkfifo(file, 0o600)
        elif what == "of another user":
            mine = os.getuid()
            monkeypatch.setattr(store.os, "getuid", lambda: mine + 1)
        else:
            file.chmod(0o620 if what == "writable by a group" else 0o604)
        with pytest.raises((Damaged, OSError)):
            archives.open("engine-1")


def test_failed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    """A writer that fails, as on a full disk, leaves the old archive and no half of the new one."""

    def fail(out: BinaryIO) -> None:
        out.write(b"half")
        raise OSError("no space")

    with ArchiveDirectory(tmp_path / "kept", make=True) as archives:
        put(archives, "engine-1", b"old")
        with pytest.raises(OSError, match="no space"):
            archives.put("engine-1", fail)
        assert read(archives, "engine-1") == b"old"
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_full_file_system_leaves_what_was_there(tmp_path: Path) -> None:
    """The same with a real limit on the size of files."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with ArchiveDirectory(tmp_path / "kept", make=True) as archives:
        put(archives, "engine-1", b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                put(archives, "engine-1", bytes(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert read(archives, "engine-1") == b"old"


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes write one shape at once: each reader sees one archive or the other, whole."""
    meet = threading.Barrier(2, timeout=30)

    def write(data: bytes, out: BinaryIO) -> None:
        out.write(data[: len(data) // 2])
        meet.wait()
        out.write(data[len(data) // 2 :])

    datas = [bytes([number]) * 100_000 for number in (1, 2)]
    names = iter(["node-a", "node-b"])
    monkeypatch.setattr(store.socket, "gethostname", lambda: next(names))
    with ArchiveDirectory(tmp_path / "kept", make=True) as archives:
        threads = [
            threading.Thread(target=archives.put, args=("engine-1", lambda out, data=data: write(data, out)))
            for data in datas
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert read(archives, "engine-1") in datas
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_those_used_longest_ago_go(tmp_path: Path) -> None:
    """Beyond the bound the archives used longest ago go, never the newest; so does what killed writers have left."""
    place = tmp_path / "kept"
    with ArchiveDirectory(place, make=True, most=3500) as archives:
        for number, shape in enumerate(("engine-a", "engine-b", "trainer-c")):
            put(archives, shape, bytes(1000))
            os.utime(place / f"{shape}.tar.gz", (1000 + number, 1000))
        archives.used("engine-a")
        long_ago = time.time() - ABANDONED - 5
        for name in (".engine-a.tar.gz.n.1", ".engine-a.tar.gz.n.2", "notes", ".notes"):
            (place / name).touch(mode=0o600)
            if not name.endswith("2"):
                os.utime(place / name, (long_ago, long_ago))
        (place / ".engine-a.tar.gz.n.2").write_bytes(bytes(9000))  # being written: no archive yet
        put(archives, "engine-d", bytes(1000))
        assert {path.name for path in place.iterdir()} == {
            *("engine-a.tar.gz", "engine-d.tar.gz", "trainer-c.tar.gz", ".engine-a.tar.gz.n.2", "notes", ".notes")
        }
        os.utime(place / ".engine-a.tar.gz.n.2", (long_ago, long_ago))
        archives.trim("engine-a")
        assert not (place / ".engine-a.tar.gz.n.2").exists() and (place / "engine-d.tar.gz").exists()
        put(archives, "engine-e", bytes(9000))
        assert {path.name for path in place.glob("[a-z]*.gz")} == {"engine-e.tar.gz"}
