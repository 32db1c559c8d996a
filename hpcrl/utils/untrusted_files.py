"""Files that another user may have written: opened without following links, read within limits.

A run directory may lie where others can write, and its files are read by commands that must neither hang, nor fill the
memory, nor do to one run what was meant for another.  Invariants: only regular files are opened, and never through a
link in a file's own place; no more is read than was allowed; whatever a file holds, one of a few errors comes of it.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

MOST = 1 << 26  #: bytes of a file that is read whole, unless the reader says otherwise
GIVEN = 1 << 24  #: bytes of a recipe, profile or hostfile
SAMPLES = 1 << 37  #: bytes of a file with all samples of a rollout, or every event of a run
AT_ONCE = 1 << 20  #: bytes read at once of a file that is longer than it said
PIPED = ("/dev/fd", "/proc/self/fd", "/dev/stdin")  #: where a shell puts what it has opened for a command

T = TypeVar("T")


class Damaged(ValueError):
    """A file's bytes are not what they should be."""


def open_regular(path: Path) -> BinaryIO:
    """A regular file, to be read.

    Raises:
        OSError: if it is not regular, is a link, or cannot be opened; never waits for a writer.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(number, "rb")


def read_regular(path: Path, most: int = MOST) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as `open_regular`, and for one of more than `most` bytes.
    """
    with open_regular(path) as file:
        return _whole(file, path, most)


def _whole(file: BinaryIO, path: Path, most: int) -> bytes:
    """All that is in a file.  Memory is taken for what is there, and not for `most` bytes."""
    data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    while len(data) <= most and (more := file.read(AT_ONCE)):
        data += more
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return data


def read_system(path: str | Path) -> str:
    """The text of a file of the kernel's, below /proc or /sys.

    Raises:
        OSError: as `read_regular`.
    """
    return read_regular(Path(path)).decode(errors="replace")


def read_given(path: str | Path, most: int = GIVEN) -> str:
    """The text of a file that the user has named.

    Raises:
        OSError: as `read_given_bytes`; UnicodeDecodeError.
    """
    return read_given_bytes(path, most).decode()


def read_given_bytes(path: str | Path, most: int = GIVEN) -> bytes:
    """A file that the user has named, links followed, or a pipe that his shell has opened for us (`<(command)`).

    Raises:
        OSError: for anything else, which might never end, and for more than `most` bytes.
    """
    place = Path(path)
    if any(place.is_relative_to(piped) for piped in PIPED):
        with place.open("rb") as file:
            return _whole(file, place, most)
    number = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(place))
        return _whole(file, place, most)


def read_json(path: Path, kind: type[T], *, strict: bool = True, most: int = MOST) -> T:
    """A JSON file as `kind`.

    Raises:
        OSError: as `read_regular`; Damaged if it holds anything else, nested however deep.
    """
    data = read_regular(path, most)
    try:
        return msgspec.json.decode(data, type=kind, strict=strict)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{error}" or type(error).__name__) from error


def parse_json(line: bytes | str) -> Any:
    """A line of JSON.

    Raises:
        Damaged: a ValueError, if it is not JSON, is nested too deep, or holds a number that Python refuses to read.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Damaged(str(error)) from error


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        Damaged: a ValueError, if it is not TOML, or holds a whole number of more than 64 bits; RecursionError: if it is
            nested too deep.
    """
    try:
        found = tomllib.loads(text + "\n")
    except ValueError as error:
        place = re.match(r"Cannot overwrite a value \(at line (\d+)", str(error))
        key = text.split("\n")[int(place[1]) - 1].partition("=")[0] if place else ""
        raise Damaged(f"{key.strip()} is given twice: {error}" if place else str(error)) from error
    left: list[Any] = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise Damaged("a whole number has more than 64 bits")
    return found


def open_append(path: Path) -> BinaryIO:
    """A regular file of the owner's, made if it is not there, to be written to at its end; what is in it can be read.

    Raises:
        OSError: if a link or anything else is in its place.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(number, "ab+")


def touch(path: Path) -> None:
    """Make an empty file of the owner's, or leave one as it is.

    Raises:
        OSError: if a link or anything else is in its place.
    """
    open_append(path).close()


def make_parents(path: Path) -> None:
    """Make the directories above `path` that are not there, such that no other user can write to them whatever the
    umask. OSError."""
    missing = [parent for parent in path.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)


def user_name(uid: int) -> str:
    """The name of a user, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def as_given(path: str | os.PathLike[str]) -> Path:
    """`path`, absolute and as the user says it, links on the way kept.

    Where a link leads may be known to this machine alone, such as the place of a home directory on a login node.  The
    link of another user, who could let it lead elsewhere later, is followed now, and so is whatever stands before a
    `..`.
    """
    whole = Path(path)
    whole = whole if whole.is_absolute() else _here() / whole
    if ".." in whole.parts or any(map(_of_another, (whole, *whole.parents))):
        return whole.resolve()
    return whole


def _here() -> Path:
    """The current directory as the shell calls it."""
    here, said = Path.cwd(), os.environ.get("PWD", "")
    try:
        return Path(said) if os.path.isabs(said) and os.path.samefile(said, here) else here
    except OSError:
        return here


def _of_another(path: Path) -> bool:
    """Whether this is a link that neither we nor root have made."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid())


def count_of(name: str) -> int | None:
    """The number that a name is, in ASCII digits and of at most 9; None if it is no such."""
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None
