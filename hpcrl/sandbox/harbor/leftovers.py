"""What the policy has left in its box, carried over to another as a tar archive of directories that are named.

The archive comes out of a box in which the policy may have replaced every program, tar too: it is bytes of a stranger.
Invariant: of it only regular files, directories and links below the named places are taken, and no file of them lies
below a link of them; so unpacking writes nowhere else.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import shlex
import tarfile
from collections.abc import Sequence

from hpcrl.sandbox import Box

MOST = 256 << 20  #: bytes of an archive
_AT_ONCE = 1 << 20  #: bytes that are handed to a box at once
_SILENT = 30.0  #: seconds without a byte of it


class NothingLeft(Exception):
    """No archive came: the policy has broken what would make one, or has left too much."""


async def pack(box: Box, places: Sequence[str]) -> bytes:
    """An archive of what lies at these absolute paths, those that are not there left out.

    Raises:
        NothingLeft: if none can be made of it.
        SandboxLost: if the box has ended.
    """
    names = " ".join(shlex.quote(place.lstrip("/")) for place in places)
    try:
        process = await box.start(["sh", "-c", f"exec tar -cf - -C / {names} 2>/dev/null"], cwd="/")
        data = bytearray()
        while more := await process.read(_SILENT):
            data += more
            if len(data) > MOST:
                await process.kill()
                raise NothingLeft(f"it has left more than {MOST:,} bytes")
    except (OSError, TimeoutError) as error:
        raise NothingLeft(f"what it has left cannot be read: {error}") from error
    try:
        return await asyncio.to_thread(_checked, bytes(data), places)
    except NothingLeft:
        raise
    except Exception as error:  # Python's reader raises what it likes at an archive that was made up
        raise NothingLeft(f"what it has left cannot be read: {type(error).__name__}: {error}") from error


async def unpack(box: Box, archive: bytes, places: Sequence[str]) -> None:
    """Put what `pack` has made in the place of what lies there.

    Raises:
        OSError: if the box takes it not, or has no tar.
        SandboxLost: if the box has ended.
    """
    words = " ".join(shlex.quote(place) for place in places)
    inside = 'rm -rf "$p"/* "$p"/.[!.]* "$p"/..?*'  # the place itself may be one that cannot be removed
    line = f'for p in {words}; do if [ -d "$p" ]; then {inside}; else rm -f "$p"; fi; done'
    emptied = await box.run(["sh", "-c", line], cwd="/")
    process = await box.start(["sh", "-c", "exec tar -xpof - -C / 2>&1"], cwd="/")
    try:
        for at in range(0, len(archive), _AT_ONCE):
            await process.write(archive[at : at + _AT_ONCE], last=at + _AT_ONCE >= len(archive))
    except BrokenPipeError:
        pass  # it has said why, and ends with it
    said = b""
    while more := await process.read(_SILENT):
        said = (said + more)[-500:]
    if (code := await process.wait()) or not emptied.ok:
        raise OSError(f"tar ended with {code}: {said.decode(errors='replace')}{emptied.stderr[-500:]}")


def _checked(data: bytes, places: Sequence[str]) -> bytes:
    """An archive with what of `data` may be unpacked: directories first, then files, links last.

    Raises:
        NothingLeft: if it holds too much.
        Exception: if it is none.
    """
    taken: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    left = MOST
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errorlevel=1) as theirs:
        for member in theirs:
            name = posixpath.normpath(member.name)
            if not any(f"/{name}" == place or f"/{name}".startswith(f"{place}/") for place in places):
                continue
            first = taken.get(posixpath.normpath(member.linkname)) if member.islnk() else None
            left -= first[0].size if first else member.size  # of sparse files and hard links, more than is in `data`
            if left < 0:
                raise NothingLeft(f"it has left more than {MOST:,} bytes")
            file = theirs.extractfile(member) if member.isreg() else None
            body = file.read() if file else first[1] if first else b""
            is_file = file is not None or (first is not None and first[0].isreg())
            if is_file or member.isdir() or member.issym():
                taken[name] = (_plain(name, member, len(body), is_file), body)
    links = {name for name, (info, _) in taken.items() if info.issym()}
    order = sorted(taken, key=lambda name: (taken[name][0].issym(), not taken[name][0].isdir(), name))
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:", format=tarfile.GNU_FORMAT) as ours:
        for name in order:
            if not any(above in links for above in _above(name)):
                info, body = taken[name]
                ours.addfile(info, io.BytesIO(body) if info.isreg() else None)
    return found.getvalue()


def _plain(name: str, member: tarfile.TarInfo, size: int, is_file: bool) -> tarfile.TarInfo:
    """A member of the user's own, without set-user-ID; a hard link is a file of its own."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.REGTYPE if is_file else tarfile.DIRTYPE if member.isdir() else tarfile.SYMTYPE
    info.size, info.mtime = size, max(0, int(member.mtime))
    info.mode = member.mode & 0o777 | (0o700 if member.isdir() else 0o400)
    info.linkname = member.linkname if member.issym() else ""
    return info


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
