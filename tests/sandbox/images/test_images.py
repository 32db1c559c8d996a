"""Images that are files: the forms, whiteouts, hostile ones, and staging by many processes at once."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.run import scratch
from hpcrl.sandbox import SandboxPool
from hpcrl.sandbox.images import archives, sif, staging, streams, tree
from hpcrl.sandbox.images.staging import image_root, image_settings
from tests.support.able import needs
from tests.support.children import read_line
from tests.support.image_files import (
    archive_of,
    docker_archive,
    entry,
    folder,
    layer,
    link,
    oci_archive,
    oci_layout,
    oci_parts,
    programs,
)

BASE = layer(
    folder("etc"),
    entry("etc/motd", b"below\n"),
    entry("etc/secret", b"gone\n"),
    folder("data"),
    entry("data/one", b"1"),
    entry("data/two", b"2"),
    folder("usr/bin"),
    link("bin", "usr/bin"),
    entry("usr/bin/tool", b"#!/bin/sh\n", mode=0o4755),
    link("usr/bin/same", "usr/bin/tool", hard=True),
    folder("locked", 0o000),
)
ABOVE = layer(
    entry("data/three", b"3"),
    entry("data/.wh..wh..opq"),
    entry("etc/.wh.secret"),
    entry("bin/more", b"more"),
    link("etc/out", "/etc/passwd"),
    entry("etc/.wh..wh.plnk"),
)


def files(root: Path | str) -> dict[str, str]:
    """What each file below a directory holds, or where a link leads."""
    found = {}
    for at, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(at, name)
            said = os.readlink(path) if path.is_symlink() else "/" if path.is_dir() else path.read_text()
            found[str(path.relative_to(root))] = said
    return {name: said for name, said in found.items() if name not in staging.MOUNTED_ON}


MERGED = {
    "bin": "usr/bin",
    "data": "/",
    "data/three": "3",
    "etc/motd": "below\n",
    "etc/out": "/etc/passwd",
    "locked": "/",
    "usr": "/",
    "usr/bin": "/",
    "usr/bin/more": "more",
    "usr/bin/same": "#!/bin/sh\n",
    "usr/bin/tool": "#!/bin/sh\n",
}
FORMS: dict[str, Callable[[Path, list[bytes]], Path]] = {
    "docker": docker_archive,
    "docker in gzip": lambda path, layers: gzipped(docker_archive(path, layers)),
    "oci archive": oci_archive,
    "oci directory": lambda path, layers: oci_layout(path, layers),
}


def gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_images(form: str, tmp_path: Path) -> None:
    """Whiteouts hold for the layers below alone, links lead inside, and set-user-ID is not taken over."""
    path = FORMS[form](tmp_path / "image", [BASE, ABOVE])
    root = image_root(str(path), str(tmp_path))
    assert files(root) == MERGED
    assert stat.S_IMODE(os.lstat(f"{root}/usr/bin/tool").st_mode) == 0o755
    assert os.lstat(f"{root}/usr/bin/tool").st_ino == os.lstat(f"{root}/usr/bin/same").st_ino
    assert stat.S_IMODE(os.lstat(f"{root}/locked").st_mode) == 0o700
    assert image_root(str(path), str(tmp_path)) == root


#: what no image of Docker's says of its commands
HOSTILE: list[Any] = [{"Env": 3}, {"Env": "PATH=/x"}, {"Env": {"A": "b"}}, {"Env": [None]}, {"Env": ["A=\ud800"]}, [1]]
HOSTILE += [{"Env": ["A=\0"]}, {"Env": ["A=" + "x" * 100_000]}, {"Env": [f"{i}={'x' * 90_000}" for i in range(6)]}]
HOSTILE += [{"WorkingDir": "/a\0"}, {"WorkingDir": 3}]


@pytest.mark.parametrize("form", ["docker", "docker in gzip", "oci directory"])
def test_what_an_image_sets(form: str, tmp_path: Path) -> None:
    """Variables with = in their values, and the directory; of what is no archive nothing is said."""
    config = {"Env": ["PATH=/opt/bin:/bin", "OPTS=-a=1", "EMPTY=", "=odd"], "WorkingDir": "/srv/app/"}
    make = oci_layout if form == "oci directory" else docker_archive
    path = make(tmp_path / "image", [BASE], config)
    if form == "docker in gzip":
        gzipped(path)
    env = {"PATH": "/opt/bin:/bin", "OPTS": "-a=1", "EMPTY": ""}
    assert image_settings(str(path)) == (env, "/srv/app/")
    (tmp_path / "root").mkdir()
    for other in (str(tmp_path / "root"), "system", str(tmp_path / "none")):
        assert image_settings(other) == ({}, "")
    bare = docker_archive(tmp_path / "bare", [BASE], {"Env": None, "WorkingDir": ""})
    assert image_settings(str(bare)) == ({}, "")
    for number, wrong in enumerate(HOSTILE):
        broken = docker_archive(tmp_path / f"broken-{number}", [BASE], wrong)
        with pytest.raises(DataError, match=rf"broken-{number}: .* (cannot be read|500,000)"):
            image_settings(str(broken))


@needs("namespaces")
@pytest.mark.process
def test_a_box_with_what_its_image_sets(tmp_path: Path) -> None:
    config = {"Env": ["SAID=by the image"], "WorkingDir": "/srv"}
    path = str(docker_archive(tmp_path / "image.tar", [layer(*programs(), folder("srv"))], config))

    async def ran() -> str:
        pool = SandboxPool(warm=0)
        try:
            async with pool.box(path) as box:
                found = image_settings(path)
                return (await box.run('echo "$SAID in $PWD"', env=found.env, cwd=found.workdir)).stdout
        finally:
            await pool.close()

    assert asyncio.run(ran()) == "by the image in /srv\n"


@needs("mksquashfs")
def test_a_sif_file(tmp_path: Path) -> None:
    """The file system is mksquashfs's; the header and the one descriptor are written as the SIF specification has them.
    Files of Apptainer's own are unpacked in tests/soak/sandbox."""
    path = sif_of(tmp_path)
    root = image_root(str(path), str(tmp_path))
    assert files(root) == {"etc/motd": "of sif", "tool": "x"}
    assert stat.S_IMODE(os.lstat(f"{root}/tool").st_mode) == 0o755 and os.lstat(root).st_uid == os.getuid()
    for most in ({"most_bytes": 6}, {"most_files": 2}):
        with pytest.raises(DataError, match="more than"):
            sif.unpack_sif(path, tmp_path / "small", **most)
    whole = path.read_bytes()
    for size in (100, 700, len(whole) - 4096):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=path.name):
            image_root(str(path), str(tmp_path))
    path.write_bytes(whole[:8192] + bytes(len(whole) - 8192))
    with pytest.raises(DataError, match=path.name):
        image_root(str(path), str(tmp_path))


def sif_of(tmp_path: Path) -> Path:
    """A SIF file of a small root."""
    source = tmp_path / "source"
    (source / "etc").mkdir(parents=True)
    (source / "etc" / "motd").write_text("of sif")
    (source / "tool").write_text("x")
    (source / "tool").chmod(0o4755)
    os.mkfifo(source / "pipe")
    subprocess.run(
        ["mksquashfs", source, tmp_path / "squash", "-quiet", "-no-progress"],
        check=True,
        timeout=60,
        capture_output=True,
    )
    data = (tmp_path / "squash").read_bytes()
    head = sif._HEADER.pack(b"#!run\n", sif.MAGIC, b"01", b"02", b"", 0, 0, 0, 1, 128, 585, 4096, len(data))
    extra = sif._PARTITION.pack(1, 2)
    one = sif._DESCRIPTOR.pack(0x4004, 1, 1, 1, 0, 8192, len(data), len(data), 0, 0, 0, 0, b"squashfs", extra)
    path = tmp_path / "one.sif"
    path.write_bytes((head + one).ljust(8192, b"\0") + data)
    return path


def test_a_sif_file_and_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both that could unpack it."""
    extra = sif._PARTITION.pack(1, 2)
    one = sif._DESCRIPTOR.pack(0x4004, 1, 1, 1, 0, 4096, 10, 10, 0, 0, 0, 0, b"", extra)
    head = sif._HEADER.pack(b"", sif.MAGIC, b"01", b"02", b"", 0, 0, 0, 1, 128, 585, 4096, 10)
    (tmp_path / "one.sif").write_bytes((head + one).ljust(5000, b"\0"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HpcrlError, match="unsquashfs nor apptainer"):
        image_root(str(tmp_path / "one.sif"), str(tmp_path))


#: each is refused as a whole, and writes nothing outside
HOSTILE = {
    "climbs": [entry("../out", b"x")],
    "climbs from below": [folder("a"), entry("a/../../out", b"x")],
    "hard link out": [link("a", "../../../../etc/passwd", hard=True)],
    "hard link to nothing": [link("a", "/etc/passwd", hard=True)],
    "hard link to a directory": [folder("d"), link("a", "d", hard=True)],
    "whiteout of above": [entry(".wh...", b"")],
    "ring of links": [link("a", "b"), link("b", "a"), entry("a/x", b"x")],
    "long name": [entry("n" * 300, b"x")],
    "long path": [entry("d/" * 3000 + "x", b"x")],
    "large header": [entry("a", b"x", pax_headers={"comment": "c" * (40 << 20)})],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers(name: str, tmp_path: Path) -> None:
    place = tmp_path / "below"
    place.mkdir()
    with pytest.raises(DataError, match="image"):
        image_root(str(docker_archive(place / "image", [layer(*HOSTILE[name])])), str(place))
    kept = {one.name for one in place.iterdir()}
    assert kept == {"image", f"hpcrl-images-{os.getuid()}"} and [one.name for one in tmp_path.iterdir()] == ["below"]
    assert not list((place / f"hpcrl-images-{os.getuid()}").glob("image-*[!k]"))


def test_what_leads_out_lands_inside(tmp_path: Path) -> None:
    """Absolute names and links are the image's own; devices and pipes are left out."""
    (tmp_path / "out").mkdir()
    members = [
        entry("/etc/x", b"x"),
        link("up", "../../../../.."),
        entry(f"up{tmp_path}/out/y", b"y"),
        link("away", str(tmp_path / "out")),
        entry("away/z", b"z"),
        link("file", str(tmp_path / "target")),
        entry("file", b"new"),
        entry("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("dev/sda", type=tarfile.BLKTYPE, devmajor=8),
        entry("pipe", type=tarfile.FIFOTYPE),
    ]
    root = Path(image_root(str(docker_archive(tmp_path / "image", [layer(*members)])), str(tmp_path)))
    assert not list((tmp_path / "out").iterdir()) and not (tmp_path / "target").exists()
    inside = Path(f"{root}{tmp_path}/out")
    assert sorted(one.name for one in inside.iterdir()) == ["y", "z"] and (root / "file").read_text() == "new"
    assert list((root / "dev").iterdir()) == [] and not (root / "pipe").exists()


def test_bombs(tmp_path: Path) -> None:
    """Bytes and files of an image are bounded, however small the file that holds them."""
    zeros = layer(entry("zeros", bytes(8 << 20)))
    for made in (tree.ImageTree(tmp_path, most_bytes=1 << 20), tree.ImageTree(tmp_path, most_files=0)):
        with pytest.raises(DataError, match="more"):
            made.add(streams.Forward(Bytes(zeros), 1 << 30))
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packed.compress(bytes(64 << 20)) + packed.flush()
    with pytest.raises(DataError, match="more than"):
        streams.Forward(Bytes(bomb), 1 << 20).finish()
    assert len(bomb) < 1 << 17


class Bytes:
    """Bytes to read from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int, /) -> bytes:
        found, self._data = self._data[:size], self._data[size:]
        return found


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "digest": (lambda path: docker_archive(path, [BASE], **{"0/layer.tar": ABOVE}), "digest"),
    "lacks a layer": (lambda path: docker_archive(path, [BASE], **{"manifest.json": b'[{"Config": "config.json", "Layers": ["none"]}]'}), "none"),
    "two images": (lambda path: docker_archive(path, [BASE], **{"manifest.json": b"[{}, {}]"}), "2 images"),
    "no JSON": (lambda path: docker_archive(path, [BASE], **{"manifest.json": b"["}), "JSON"),
    "odd JSON": (lambda path: docker_archive(path, [BASE], **{"manifest.json": b'[{"Config": 3}]'}), "Layers"),
    "other machine": (lambda path: oci_archive(path, [BASE], "s390x"), "0 images"),
    "no image": (lambda path: archive_of(path, {"etc/motd": b"x"}), "docker export"),
    "zstd": (lambda path: docker_archive(path, [b"\x28\xb5\x2f\xfd" + BASE]), "zstd"),
    "cut off": (lambda path: cut(docker_archive(path, [BASE])), "image"),
    "cut gzip": (lambda path: cut(gzipped(docker_archive(path, [BASE]))), "image"),
    "digest is a path": (
        lambda path: archive_of(
            path, oci_parts([BASE]) | {"index.json": b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}'}
        ),
        "SHA-256",
    ),
}  # fmt: skip


def cut(path: Path) -> Path:
    os.truncate(path, path.stat().st_size // 3)
    return path


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archives(name: str, tmp_path: Path) -> None:
    """One clear error, and nothing that looks like an image is left."""
    make, word = DAMAGED[name]
    with pytest.raises(DataError, match=word) as found:
        image_root(str(make(tmp_path / "image")), str(tmp_path))
    assert str(tmp_path / "image") in str(found.value)
    assert not list((tmp_path / f"hpcrl-images-{os.getuid()}").glob("image-*[!k]"))


def test_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no image")
    for path, said in (("/", "system"), (tmp_path, "without bin and usr"), (tmp_path / "none", "is not on ")):
        with pytest.raises(UsageError, match=said):
            image_root(str(path))
    os.mkfifo(tmp_path / "pipe")
    for path in ("relative", tmp_path / "none", tmp_path / "text", tmp_path / "pipe", "/dev/null"):
        with pytest.raises(UsageError, match=str(path)):
            image_root(str(path), str(tmp_path))
    (tmp_path / "bin").mkdir()
    assert image_root(str(tmp_path)) == os.path.realpath(tmp_path)


def test_an_image_that_changes(tmp_path: Path) -> None:
    """Another file of the same name is another image."""
    path = tmp_path / "image"
    first = image_root(str(docker_archive(path, [BASE])), str(tmp_path))
    second = image_root(str(docker_archive(path, [BASE, ABOVE])), str(tmp_path))
    assert first != second and files(second) == MERGED


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error that names the directory; nothing is left of it."""
    path = docker_archive(tmp_path / "image", [BASE])
    monkeypatch.setattr(tree.ImageTree, "_write", full)
    with pytest.raises(HpcrlError, match="hpcrl-images") as found:
        image_root(str(path), str(tmp_path))
    assert "TMPDIR" in found.value.hint and "No space left" in found.value.what
    monkeypatch.undo()
    assert files(image_root(str(path), str(tmp_path)))["etc/motd"] == "below\n"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STAGE = """
import sys
from hpcrl.sandbox.images import staging, tree
count = []
before = tree.ImageTree.add
def add(self, layer):
    count.append(1)
    before(self, layer)
tree.ImageTree.add = add
sys.stdin.readline()
print(staging.image_root(sys.argv[1], sys.argv[2]), len(count), flush=True)
sys.stdin.readline()
"""


@pytest.mark.process
def test_many_processes_stage_once(tmp_path: Path) -> None:
    """One of six unpacks, all have the same directory; a sweep removes it when the last has ended, and not before."""
    path = docker_archive(tmp_path / "image", [layer(*(entry(f"d{n}/f", bytes(1000)) for n in range(500)))])
    left = tmp_path / f"hpcrl-images-{os.getuid()}"
    left.mkdir(mode=0o700)
    users = [
        subprocess.Popen(
            [sys.executable, "-c", STAGE, path, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    try:
        for user in users:
            user.stdin.write("\n")
            user.stdin.flush()
        said = [read_line(user).split() for user in users]
        assert len({place for place, _ in said}) == 1 and sorted(count for _, count in said) == ["0"] * 5 + ["1"]
        assert not scratch._abandoned(left)
        for user in users[1:]:
            user.kill()
            user.wait(60)
        assert not scratch._abandoned(left)
    finally:
        for user in users:
            user.kill()
            user.communicate(timeout=60)
    assert scratch._abandoned(left)
    scratch._remove(left)
    assert not left.exists()


def test_a_killed_process_leaves_no_half(tmp_path: Path) -> None:
    """What it had begun is removed, and the image is unpacked again."""
    path = docker_archive(tmp_path / "image", [BASE])
    root = Path(image_root(str(path), str(tmp_path)))
    half = root.with_name(f"{root.name}.part-99")
    root.rename(half)
    (half / "etc" / "motd").write_text("half")
    assert (Path(image_root(str(path), str(tmp_path))) / "etc" / "motd").read_text() == "below\n"
    assert not half.exists()


def test_a_directory_of_another_user(tmp_path: Path) -> None:
    """One that others can write to is not used."""
    place = tmp_path / f"hpcrl-images-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(HpcrlError, match="hpcrl-images"):
        image_root(str(docker_archive(tmp_path / "image", [BASE])), str(tmp_path))


def test_a_swept_directory_is_made_again(tmp_path: Path) -> None:
    """In the same process, which held the one before."""
    path = docker_archive(tmp_path / "image", [BASE])
    root = image_root(str(path), str(tmp_path))
    shutil.rmtree(tmp_path / f"hpcrl-images-{os.getuid()}")
    assert image_root(str(path), str(tmp_path)) == root and os.path.isdir(root)
    assert not scratch._abandoned(staging._shared(str(tmp_path)))


def test_headers_of_an_outer_archive(tmp_path: Path) -> None:
    """None makes this process take memory."""
    path = tmp_path / "image"
    path.write_bytes(layer(entry("a", b"x", pax_headers={"comment": "c" * (40 << 20)})))
    with pytest.raises(DataError, match="at once"):
        archives.unpack_archive(path, tree.ImageTree(tmp_path))
