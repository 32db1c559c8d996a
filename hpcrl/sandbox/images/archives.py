"""What a Docker archive (`docker save`) or an OCI layout, a directory or an archive of one, says of its layers.

The forms are those of the OCI image specification (image-layout.md, image-index.md, manifest.md, config.md) and of the
Docker image specification 1.2 (manifest.json).  An archive is trusted in nothing: its own names lead to its own members
alone, and what a layer unpacks to is compared with the digest that the image's configuration has of it.

Invariant: a tree is whole, digest by digest, or `DataError` was raised.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol, cast

from hpcrl.errors import DataError
from hpcrl.sandbox.images.streams import AT_ONCE, Forward, Slice
from hpcrl.sandbox.images.tree import MOST_BYTES, ImageTree

_TEXT = 16 << 20  #: bytes of a manifest or a configuration
_WORD, _SETTINGS = 100_000, 500_000  #: bytes of a variable (the kernel's bound is 131,072), characters of all of them
_MEMBERS = 200_000  #: of an archive of layers
_LAYERS = 1000
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_AGAIN = "save the image again"


class _Blobs(Protocol):
    """Where the parts of an image are."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> contextlib.AbstractContextManager[Slice]: ...


class _Folder:
    """An OCI layout that is a directory; links in it are not followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return os.path.isfile(self._path / name)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Slice]:
        path = self._path / name
        with contextlib.closing(_opened(path)) as file:
            yield Slice(file, 0, os.fstat(file.fileno()).st_size)


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW)))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", _AGAIN) from error


class _Bounded:
    """A file as tarfile reads the headers of: none of them may ask for more than AT_ONCE bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= AT_ONCE:
            raise DataError(f"an archive asks for {size:,} bytes at once", _AGAIN)
        return self._file.read(size)


class _Archive:
    """The members of a tar archive that are files; a link leads to another member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        links = {}
        with tarfile.TarFile(fileobj=cast(IO[bytes], _Bounded(file))) as archive:
            for count, member in enumerate(archive):
                archive.members = []
                if count >= _MEMBERS:
                    raise DataError(f"the archive has more than {_MEMBERS:,} members", "it is no image")
                name = posixpath.normpath(member.name)
                if member.isreg() and not member.issparse():
                    self._places[name] = (member.offset_data, member.size)
                elif member.issym() or member.islnk():
                    base = posixpath.dirname(name) if member.issym() else ""
                    links[name] = posixpath.normpath(posixpath.join(base, member.linkname))
        for name, target in links.items():  # of layers that are there twice
            if target in self._places:
                self._places.setdefault(name, self._places[target])

    def has(self, name: str) -> bool:
        return posixpath.normpath(name) in self._places

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Slice]:
        found = self._places.get(posixpath.normpath(name))
        if found is None:
            raise DataError(f"the image lacks its part {name[:200]!r}", _AGAIN)
        yield Slice(self._file, *found)


def is_layout(path: Path) -> bool:
    """Whether a directory is an OCI layout, rather than an unpacked root."""
    return os.path.isfile(path / "oci-layout") and os.path.isfile(path / "index.json")


class ImageSettings(NamedTuple):
    """What an image sets for every command, and no file of it holds.

    Attributes:
        workdir: an absolute path, "" where it names none.
    """

    env: dict[str, str] = {}  # noqa: RUF012  a default of a tuple's, which nothing changes
    workdir: str = ""


def layout_settings(path: Path) -> ImageSettings:
    """`Env` and `WorkingDir` of an OCI layout that is a directory; raises as `unpack_layout`."""
    return _settings(_Folder(path))


def archive_settings(path: Path) -> ImageSettings:
    """The same of an archive; raises as `unpack_archive`."""
    with _archive(path) as blobs:
        return _settings(blobs)


def unpack_layout(path: Path, tree: ImageTree) -> None:
    """Unpack the image of an OCI layout that is a directory.

    Raises:
        DataError: if it is damaged, hostile, or holds not just one image for this machine.
        OSError: if it cannot be read, or there is no room.
    """
    _unpack(_Folder(path), tree)


def unpack_archive(path: Path, tree: ImageTree) -> None:
    """The same of a tar archive, of a layout or of `docker save`; gzip may have compressed it as a whole."""
    with _archive(path) as blobs:
        _unpack(blobs, tree)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[_Archive]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(_opened(path)))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            file = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
        try:
            blobs = _Archive(file)
        except (tarfile.TarError, EOFError, ValueError, gzip.BadGzipFile) as error:
            raise DataError(f"it cannot be read as an archive: {error}", _AGAIN) from error
        yield blobs


def _settings(blobs: _Blobs) -> ImageSettings:
    said, _ = _described(blobs)
    found = said.get("config") or {}
    if not isinstance(found, dict):
        raise _unreadable(TypeError(f"{str(found)[:100]!r} is no table"))
    pairs = [_text(pair).partition("=") for pair in _list(found.get("Env"))]
    if sum(len(name) + len(value) for name, _, value in pairs) > _SETTINGS:
        raise DataError(
            f"the image sets variables of more than {_SETTINGS:,} characters", "give them to commands alone"
        )
    workdir = _text(found.get("WorkingDir") or "")
    return ImageSettings({name: value for name, _, value in pairs if name}, workdir if workdir[:1] == "/" else "")


def _list(found: Any) -> list[Any]:
    if found is None or isinstance(found, list):
        return found or []
    raise _unreadable(TypeError(f"{str(found)[:100]!r} is no list"))


def _text(found: Any) -> str:
    """What can be a word of a command, or its variable."""
    try:
        if isinstance(found, str) and "\0" not in found and len(found.encode()) < _WORD:
            return found
    except UnicodeEncodeError as error:
        raise _unreadable(error) from error
    raise _unreadable(TypeError(f"{str(found)[:100]!r} is no text of a command"))


def _described(blobs: _Blobs) -> tuple[dict[str, Any], list[str]]:
    """(the configuration, the layers' names) of the image."""
    try:
        if blobs.has("manifest.json"):
            config, layers = _of_docker(blobs)
        elif blobs.has("index.json"):
            config, layers = _of_layout(blobs)
        else:
            raise DataError(
                "it is an archive, but of no image: manifest.json and index.json are lacking",
                "unpack what `docker export` has written, and give the directory",
            )
        return dict(_read(blobs, config)), layers
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> DataError:
    return DataError(f"what the image says of itself cannot be read: {error!r}", _AGAIN)


def _unpack(blobs: _Blobs, tree: ImageTree) -> None:
    said, layers = _described(blobs)
    try:
        digests = said["rootfs"]["diff_ids"]
        count = len(digests)
    except (KeyError, TypeError) as error:
        raise _unreadable(error) from error
    if len(layers) != count or count > _LAYERS:
        raise DataError(f"the image has {len(layers)} layers and digests of {count}", _AGAIN)
    for name, digest in zip(layers, digests, strict=True):
        with blobs.open(name) as part:
            layer = Forward(part, MOST_BYTES)
            tree.add(layer)
            if f"sha256:{layer.finish()}" != digest:
                raise DataError(f"the image's layer {name[-64:]} is not what its digest says", _AGAIN)


def _of_docker(blobs: _Blobs) -> tuple[str, list[str]]:
    """(the configuration's, the layers') names."""
    found = _read(blobs, "manifest.json")
    if len(found) != 1:
        raise DataError(f"the archive has {len(found)} images", "save one alone: docker save -o FILE NAME")
    return str(found[0]["Config"]), [str(name) for name in found[0]["Layers"]]


def _of_layout(blobs: _Blobs) -> tuple[str, list[str]]:
    manifests = _read(blobs, "index.json")["manifests"]
    for _ in range(4):  # an index may lead to another
        one = _chosen(manifests)
        found = _read(blobs, _blob(one["digest"]))
        if "manifests" not in found:
            return _blob(found["config"]["digest"]), [_blob(layer["digest"]) for layer in found["layers"]]
        manifests = found["manifests"]
    raise DataError("the image's index leads from one to the next", _AGAIN)


def _chosen(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The one image for this machine."""
    mine = _ARCHITECTURES.get(os.uname().machine, os.uname().machine)
    said = [one.get("platform", {}).get("architecture", mine) for one in manifests]
    fit = [one for one, platform in zip(manifests, said, strict=True) if platform == mine]
    if len(fit) != 1:
        raise DataError(
            f"the archive has {len(fit)} images for {mine}, of {len(manifests)}", "save the one for this machine alone"
        )
    return fit[0]


def _blob(digest: str) -> str:
    found = _DIGEST.fullmatch(digest)
    if not found:
        raise DataError(f"the image names a part {digest[:200]!r}, which is no SHA-256", _AGAIN)
    return f"blobs/sha256/{found[1]}"


def _read(blobs: _Blobs, name: str) -> Any:
    with blobs.open(name) as part:
        data = b""
        while len(data) <= _TEXT and (more := part.read(_TEXT)):
            data += more
    if len(data) > _TEXT:
        raise DataError(f"{name[:200]} has more than {_TEXT:,} bytes", _AGAIN)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name[:200]} is no JSON: {error}", _AGAIN) from error
