"""Archives of compiled code: what is packed, and that nothing but plain files comes out of one."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import tarfile
from pathlib import Path

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.run.compile_cache import archive
from hpcrl.run.compile_cache.archive import listing, pack, unpack
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


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory of archives, with one of `fill`."""
    assert pack(fill(tmp_path / "a"), tmp_path / "kept", "shape") is not None
    return tmp_path / "kept"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (place := tmp_path / "b").mkdir()
    return place


def put(kept: Path, data: bytes) -> None:
    (kept / "shape.tar.gz").write_bytes(data)


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


def test_what_is_packed_comes_out(tmp_path: Path, kept: Path, target: Path) -> None:
    """Compiled code alone is packed; it comes out bit for bit, with its times in seconds, for its owner alone."""
    found = unpack(target, kept, "shape")
    assert set(found) == set(listing(tmp_path / "a")) == NAMES == files(target)
    for name in NAMES:
        path, source = target / name, tmp_path / "a" / name
        assert path.read_bytes() == source.read_bytes() and path.stat().st_mtime == int(source.stat().st_mtime)
        assert path.stat().st_mode & 0o100 == (0o100 if name.endswith("cubin") else 0)
    assert [path.stat().st_mode & 0o777 for path in (kept, *kept.iterdir())] == [0o700, 0o600]


def test_same_code_same_archive(tmp_path: Path, kept: Path) -> None:
    pack(tmp_path / "a", kept, "again")
    assert (kept / "again.tar.gz").read_bytes() == (kept / "shape.tar.gz").read_bytes()


def test_what_is_there_stays(kept: Path, target: Path) -> None:
    """A folder that a process may have in use is never replaced."""
    (target / "triton/X").mkdir(parents=True)
    (target / "triton/X/kernel.cubin").write_bytes(b"in use")
    unpack(target, kept, "shape")
    assert (target / "triton/X/kernel.cubin").read_bytes() == b"in use"
    assert {name for name in NAMES if not name.startswith("triton")} < files(target)


@pytest.mark.parametrize(
    "what",
    [
        ("../out", b"x"),
        ("triton/../../out", b"x"),
        made("triton/a", tarfile.SYMTYPE, "/etc/passwd"),
        made("triton/a", tarfile.SYMTYPE, "../../../out"),
        made("triton/a", tarfile.LNKTYPE, "/etc/passwd"),
        made("triton/a", tarfile.FIFOTYPE),
        made("triton/a", tarfile.CHRTYPE),
    ],
    ids=lambda what: str(getattr(what, "type", "") or what[0]),
)
def test_nothing_comes_out_elsewhere(
    tmp_path: Path, kept: Path, target: Path, what: tarfile.TarInfo | tuple[str, bytes]
) -> None:
    """With a link or a name that leads out, or a device, nothing of an archive is placed."""
    before = files(tmp_path) - {"kept/shape.tar.gz"}
    put(kept, of(("inductor/good", b"good"), what))
    with pytest.raises(Damaged, match="damaged, and removed"):
        unpack(target, kept, "shape")
    assert not list(target.iterdir()) and files(tmp_path) == before


@pytest.mark.parametrize("where", [0, 30, 300, -9, -4])
def test_damage_is_found_before_a_file_is_placed(kept: Path, target: Path, where: int) -> None:
    """Truncated or with another byte anywhere: nothing is placed."""
    data = (kept / "shape.tar.gz").read_bytes()
    changed = bytearray(data)
    changed[where] ^= 0x55
    for bad in (data[:where], bytes(changed), b"", data[:1000]):
        put(kept, bad)
        (kept / "shape.tar.gz").chmod(0o600)
        with pytest.raises(Damaged):
            unpack(target, kept, "shape")
        assert not list(target.iterdir()) and not list(kept.iterdir())


def test_any_tar_is_an_archive_or_an_error(tmp_path: Path, kept: Path) -> None:
    """Whatever stands in its headers, a tar is unpacked below the directory, or refused by one of two errors."""
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
        put(kept, gzip.compress(bytes(changed), 1))
        (kept / "shape.tar.gz").chmod(0o600)
        with contextlib.suppress(Damaged, OSError):
            unpack(target, kept, "shape")
        assert [path.name for path in target.parent.iterdir()] == ["in"]
        assert {path.name for path in target.iterdir()} <= set(archive.FOLDERS)


@pytest.mark.parametrize("what", ["changed", "gone", "new"])
def test_nothing_is_written_if_a_file_changes(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A file that is written, removed or added while others are packed: no archive, and nothing of it is left."""
    path = tmp_path / "a/triton/X/kernel.cubin"
    before = (kept / "shape.tar.gz").stat().st_ino

    def interfere(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if what == "gone":
            path.unlink(missing_ok=True)
        else:
            (path if what == "changed" else path.with_name("other")).write_bytes(b"other code")
        return member

    monkeypatch.setattr(archive, "_plain", interfere)
    assert pack(tmp_path / "a", kept, "shape") is None
    assert [path.stat().st_ino for path in kept.iterdir()] == [before]


def test_bounds(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much is not packed; archives that were used longest ago go first; what a killed process left goes."""
    for number, name in enumerate(("old.tar.gz", ".left.tar.gz", ".at-work.tar.gz")):
        (kept / name).write_bytes(bytes(10_000))
        os.utime(kept / name, (1, 1) if number < 2 else None)
    size = (kept / "shape.tar.gz").stat().st_size
    monkeypatch.setattr(archive, "MOST_KEPT", 2 * size + 10_000)
    pack(tmp_path / "a", kept, "new")
    assert {path.name for path in kept.iterdir()} == {"shape.tar.gz", "new.tar.gz", ".at-work.tar.gz"}
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    with pytest.raises(HpcrlError, match="an archive may have"):
        pack(tmp_path / "a", kept, "new")
