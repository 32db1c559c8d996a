"""Layers of an image, laid one over the other into a directory.

What a layer takes away of those below it is named `.wh.NAME`, and `.wh..wh..opq` is all of a directory (the OCI image
specification, layer.md, Whiteouts).  A path is resolved as it will be inside, where the directory is the root: links of
the image lead to the image.

Invariant: every file lies below the directory, belongs to this user, and is a regular one, a directory or a link; no
other process writes there meanwhile, so that a path that was resolved stays so.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import IO, Any, cast

from hpcrl.errors import DataError
from hpcrl.sandbox.images.streams import PIECE, Forward

MOST_BYTES = 128 << 30  #: of an image, unpacked
MOST_FILES = 4_000_000
_GONE, _ALL_GONE = ".wh.", ".wh..wh..opq"
_LINKS = 40  #: on the way to one file, as the kernel's own bound
_LONGEST = 4096  #: PATH_MAX


class ImageTree:
    """The files of an image, as far as it was unpacked."""

    def __init__(self, root: Path, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
        """Unpack into a directory that is there and empty."""
        self._root = str(root)
        self._bytes = most_bytes
        self._files = most_files
        self._layer: set[str] = set()  #: what this layer has made, and the directories above that
        self._folders: dict[str, str] = {}  #: parents that were resolved

    def add(self, layer: Forward) -> None:
        """Lay a layer, a tar archive, over what is there.

        Raises:
            DataError: if it is damaged, leads out of the image, or has more files or bytes than an image may have.
            OSError: if the files cannot be written here.
        """
        self._layer = {self._root}
        self._folders.clear()
        try:
            with tarfile.TarFile(fileobj=cast(IO[bytes], layer), errorlevel=1) as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # which would hold all of them
                    self._add(archive, member)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise DataError(f"a layer of the image cannot be read: {error}", "save the image again") from error

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._files -= 1
        if self._files < 0:
            raise DataError("the image has more files than an image may have", f"at most {MOST_FILES:,} are taken")
        names = [name for name in member.name.split("/") if name not in ("", ".")]
        if ".." in names or len(member.name) >= _LONGEST or "\0" in member.name:
            raise DataError(
                f"the image has a file {member.name[:200]!r}", "no image has such names: it is not unpacked"
            )
        if not names:
            return
        folder = self._folder("/".join(names[:-1]))
        name = names[-1]
        if name.startswith(_GONE):
            self._take_away(folder, name)
            return
        path = f"{folder}/{name}"
        made = self._make(archive, member, path, folder)
        if made:
            self._layer.add(path)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, folder: str) -> bool:
        """Make one entry; False for one that a box has no use for, as a device."""
        if member.isdir():
            if not os.path.isdir(path) or os.path.islink(path):
                self._clear(path)
                os.mkdir(path)
            os.chmod(path, member.mode & 0o777 | 0o700)
        elif member.issym():
            self._clear(path)
            os.symlink(member.linkname, path)
            self._folders.clear()
        elif member.islnk():
            source = self._linked(member.linkname)
            if source != path:
                self._clear(path)
                os.link(source, path, follow_symlinks=False)
        elif member.isreg():
            self._clear(path)
            self._write(archive, member, path)
        else:
            return False
        return True

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self._bytes -= max(member.size, 0)
        if self._bytes < 0:
            raise DataError(
                "the image unpacks to more bytes than an image may have", f"at most {MOST_BYTES:,} are taken"
            )
        source: Any = archive.extractfile(member)
        with open(path, "xb") as file:
            left = member.size
            while left > 0:
                data = source.read(min(PIECE, left))
                if not data:
                    raise DataError("a layer of the image is cut off", "save the image again")
                file.write(data)
                left -= len(data)
        os.chmod(path, member.mode & 0o777)
        os.utime(path, (max(member.mtime, 0), max(member.mtime, 0)), follow_symlinks=False)

    def _linked(self, name: str) -> str:
        """What a hard link is another name of."""
        names = [part for part in name.split("/") if part not in ("", ".")]
        if not names or ".." in names:
            raise DataError(
                f"the image has a hard link to {name[:200]!r}", "no image has such links: it is not unpacked"
            )
        path = f"{self._folder('/'.join(names[:-1]))}/{names[-1]}"
        if not os.path.lexists(path) or stat.S_ISDIR(os.lstat(path).st_mode):
            raise DataError(f"the image has a hard link to {name[:200]!r}, which it lacks", "save the image again")
        return path

    def _folder(self, parent: str) -> str:
        """The directory outside that is `parent` inside, made if it is not there."""
        found = self._folders.get(parent)
        if found is None:
            found = self._folders[parent] = self._resolve(parent)
        return found

    def _resolve(self, parent: str) -> str:
        todo = parent.split("/")[::-1]
        at = self._root
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                at = at if at == self._root else os.path.dirname(at)
                continue
            path = f"{at}/{name}"
            if os.path.islink(path):
                links += 1
                if links > _LINKS:
                    raise DataError(f"the image has links in a ring at {parent[:200]!r}", "it is not unpacked")
                target = os.readlink(path)
                at = self._root if target.startswith("/") else at
                todo += target.split("/")[::-1]
                continue
            if not os.path.isdir(path):
                self._clear(path)
                os.mkdir(path, 0o755)
            at = path
            self._layer.add(at)
        return at

    def _take_away(self, folder: str, name: str) -> None:
        """Remove what layers below this one have made."""
        if name == _ALL_GONE:
            for other in os.listdir(folder):
                self._forget(f"{folder}/{other}")
        elif not name.startswith(2 * _GONE):  # other names of that kind are AUFS's own
            gone = name.removeprefix(_GONE)
            if gone in ("", ".", ".."):
                raise DataError(f"the image takes away {gone!r}", "no image does: it is not unpacked")
            self._forget(f"{folder}/{gone}")

    def _forget(self, path: str) -> None:
        """Remove a path unless this layer has made it, and what is below a directory in the same way."""
        if path not in self._layer:
            self._clear(path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                self._forget(f"{path}/{name}")

    def _clear(self, path: str) -> None:
        """Remove whatever is at a path."""
        if not os.path.lexists(path):
            return
        self._folders.clear()
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
