"""Archives of compiled code: what is packed, and that nothing but plain files comes out of one."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import tarfile
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from hpcrl.errors import DeadlineError
from hpcrl.run.compile_cache import archive
from hpcrl.run.compile_cache.archive import HALF, CompiledFile, listing, pack, unpack
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.untrusted_files import Damaged

ODD = 1_600_000_000_123_456_789  #: nanoseconds that no float holds


def fill(directory: Path) -> Path:
    """A directory of compiled code of a few files."""
    for name, data in {
        "inductor/ab/code.so": os.urandom(3000),
        "triton/X/kernel.cubin": b"kernel",
        "triton/X/empty": b"",
        "vllm/torch_compile_cache/deep/model": b"m" * 5000,
        "inductor/locks/a.lock": b"",
        "triton/tmp.pid_1_2/half": b"half",
        "hf-modules/modeling.py": b"the model's own",
        "elsewhere": b"of nobody",
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (directory / "triton/X/kernel.cubin").chmod(0o755)
    os.utime(directory / "triton/X/kernel.cubin", ns=(1_600_000_000 * 10**9, ODD))
    (directory / "inductor/link").symlink_to("/etc/passwd")
    return directory


NAMES = {"inductor/ab/code.so", "triton/X/kernel.cubin", "triton/X/empty", "vllm/torch_compile_cache/deep/model"}


def packed(directory: Path) -> bytes:
    out = io.BytesIO()
    pack(directory, listing(directory), out, Deadline(60))
    return out.getvalue()


def of(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """An archive of members as nobody packs them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                about = tarfile.TarInfo(member[0])
                about.size = len(member[1])
                tar.addfile(about, io.BytesIO(member[1]))
    return out.getvalue()


def made(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    about.type, about.linkname = kind, target
    return about


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}


def test_what_is_packed_comes_out(tmp_path: Path) -> None:
    """Compiled code alone is packed; it comes out bit for bit, with its times, for its owner alone."""
    source = fill(tmp_path / "a")
    target = tmp_path / "b"
    target.mkdir()
    found = unpack(io.BytesIO(packed(source)), target, Deadline(60))
    assert set(found) == set(listing(source)) == NAMES == files(target)
    assert found == listing(source) == listing(target)
    for name in NAMES:
        path = target / name
        assert path.read_bytes() == (source / name).read_bytes()
        assert path.stat().st_mode & 0o777 == (0o700 if name.endswith("cubin") else 0o600)
        assert path.parent.stat().st_mode & 0o077 == 0
    assert (target / "triton/X/kernel.cubin").stat().st_mtime_ns == ODD


def test_same_code_same_archive(tmp_path: Path) -> None:
    source = fill(tmp_path / "a")
    assert packed(source) == packed(source)


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A file that a process may have in use is never replaced."""
    source = fill(tmp_path / "a")
    target = tmp_path / "b"
    (target / "triton/X").mkdir(parents=True)
    (target / "triton/X/kernel.cubin").write_bytes(b"in use")
    unpack(io.BytesIO(packed(source)), target, Deadline(60))
    assert (target / "triton/X/kernel.cubin").read_bytes() == b"in use"
    assert files(target) == NAMES


@pytest.mark.parametrize(
    "what",
    [
        ("../out", b"x"),
        ("triton/../../out", b"x"),
        ("/tmp/hpcrl-out", b"x"),
        ("triton//a", b"x"),
        ("elsewhere/a", b"x"),
        ("triton", b"x"),
        made("triton/a", tarfile.SYMTYPE, "/etc/passwd"),
        made("triton/a", tarfile.LNKTYPE, "inductor/good"),
        made("triton/a", tarfile.DIRTYPE),
        made("triton/a", tarfile.FIFOTYPE),
        made("triton/a", tarfile.CHRTYPE),
        ("inductor/good", b"again"),
    ],
    ids=lambda what: str(getattr(what, "type", "") or what[0]),
)
def test_nothing_but_plain_files_comes_out(tmp_path: Path, what: tarfile.TarInfo | tuple[str, bytes]) -> None:
    """With a link, a name that leads out, or anything but a file, nothing of an archive is placed."""
    target = tmp_path / "b"
    target.mkdir()
    with pytest.raises(Damaged):
        unpack(io.BytesIO(of(("inductor/good", b"good"), what)), target, Deadline(60))
    assert not list(target.iterdir()) and files(tmp_path) == set()


@pytest.mark.parametrize("where", [0, 30, 300, -9, -4])
def test_damage_is_found_before_a_file_is_placed(tmp_path: Path, where: int) -> None:
    """Truncated or with another byte anywhere: nothing is placed."""
    data = packed(fill(tmp_path / "a"))
    target = tmp_path / "b"
    target.mkdir()
    changed = bytearray(data)
    changed[where] ^= 0x55
    for bad in (data[:where], bytes(changed), b"", data[:1000]):
        with pytest.raises(Damaged):
            unpack(io.BytesIO(bad), target, Deadline(60))
        assert not list(target.iterdir())


def test_any_tar_is_an_archive_or_an_error(tmp_path: Path) -> None:
    """Whatever stands in its headers, a tar is unpacked below the directory, or refused by one of three errors."""
    tar = bytearray(gzip.decompress(of(("triton/a", b"one"), ("inductor/b/c", bytes(700)))))
    draw = random.Random(7)
    for number in range(400):
        changed = tar.copy()
        for _ in range(draw.randint(1, 4)):
            header = draw.choice([0, 1024])
            changed[header + draw.randrange(345)] = draw.choice([0, 0x2F, 0x2E, 0x30, 0x35, 0x80, 0xFF])
            fields = changed[header : header + 148] + b" " * 8 + changed[header + 156 : header + 512]
            changed[header + 148 : header + 156] = b"%06o\0 " % sum(fields)
        (target := tmp_path / f"{number}/in").mkdir(parents=True)
        with contextlib.suppress(Damaged, OSError):
            unpack(io.BytesIO(gzip.compress(bytes(changed), 1)), target, Deadline(60))
        assert [path.name for path in target.parent.iterdir()] == ["in"]
        assert {path.name for path in target.iterdir()} <= set(archive.FOLDERS)
        assert not any(path.is_symlink() or path.stat().st_nlink > 1 + path.is_dir() * 9 for path in target.rglob("*"))


def test_no_more_is_unpacked_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small archive of much, or of many files, is refused."""
    bomb = gzip.decompress(of(("triton/zeros", bytes(1 << 20))))
    with pytest.raises(Damaged, match="bytes"):
        unpack(io.BytesIO(gzip.compress(bomb)), tmp_path, Deadline(60), most=1 << 19)
    monkeypatch.setattr(archive, "MOST_FILES", 2)
    with pytest.raises(Damaged, match="files"):
        unpack(io.BytesIO(of(*((f"triton/{i}", b"") for i in range(3)))), tmp_path, Deadline(60))
    assert not list(tmp_path.iterdir())


def test_deadline_and_what_a_killed_process_left(tmp_path: Path) -> None:
    """Nothing is placed after the deadline; the next who unpacks removes what a killed process has left, and
    not what another one is at, as where no lock can be held."""
    data = packed(fill(tmp_path / "a"))
    target = tmp_path / "b"
    for name, age in (("killed", archive.ABANDONED + 5), ("at work", 0)):
        (half := target / f"{HALF}{name}").mkdir(parents=True)
        os.utime(half, (0, time.time() - age))
    with pytest.raises(DeadlineError):
        unpack(io.BytesIO(data), target, Deadline(0))
    with pytest.raises(DeadlineError):
        pack(tmp_path / "a", listing(tmp_path / "a"), io.BytesIO(), Deadline(0))
    assert [path.name for path in target.iterdir()] == [f"{HALF}at work"]


def test_files_that_go_meanwhile_are_left_out(tmp_path: Path) -> None:
    source = fill(tmp_path / "a")
    found = listing(source)
    assert pack(source, found | {"triton/gone": CompiledFile(1, 1)}, io.BytesIO(), Deadline(60)) == found


@pytest.mark.parametrize("what", ["before it is read", "while it is read", "its time alone"])
def test_files_that_change_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A file that is written in its place after it was listed, or while it is read, is not packed half written."""
    source = fill(tmp_path / "a")
    found = listing(source)
    path = source / "triton/X/kernel.cubin"
    if what == "while it is read":
        real = archive._seen

        def seen(file: BinaryIO) -> CompiledFile:
            first = real(file)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                path.write_bytes(b"KERNEL")
            return first

        monkeypatch.setattr(archive, "_seen", seen)
    else:
        path.write_bytes(b"half" if what == "before it is read" else b"KERNEL")
    taken = pack(source, found, io.BytesIO(), Deadline(60))
    assert "triton/X/kernel.cubin" not in taken and set(taken) < NAMES


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links are refused, files are moved, and still not in place of one that is there."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("no links here")

    data = packed(fill(tmp_path / "a"))
    (target := tmp_path / "b/triton/X").mkdir(parents=True)
    (target / "kernel.cubin").write_bytes(b"in use")
    monkeypatch.setattr(archive.os, "link", refuse)
    unpack(io.BytesIO(data), tmp_path / "b", Deadline(60))
    assert files(tmp_path / "b") == NAMES and (target / "kernel.cubin").read_bytes() == b"in use"


@pytest.mark.parametrize("told", ["1.5", "9" * 30, "nan"])
def test_bad_time_is_damage(tmp_path: Path, told: str) -> None:
    """A time that is no whole number of nanoseconds is one of the errors."""
    about = made("triton/a", tarfile.REGTYPE)
    about.pax_headers = {archive.TIME: told}
    with pytest.raises(Damaged):
        unpack(io.BytesIO(of(about)), tmp_path, Deadline(60))
    assert not list(tmp_path.iterdir())
