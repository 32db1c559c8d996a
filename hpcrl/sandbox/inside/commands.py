"""The commands of a box, as its first process starts, feeds, reads and ends them.

Invariant: no more of a command's output is held than its bound; no read or write here waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Mapping, Sequence

from hpcrl.sandbox.inside.files import place_of
from hpcrl.sandbox.inside.kernel import read_kernel
from hpcrl.utils.waiting import Deadline

_PIECE = 1 << 16
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_NOT_FOUND = 127  #: the shell's exit codes for a command that is not there, and one that cannot be run
_NOT_RUN = 126


class Output:
    """What a command writes to a pipe, as far as it is kept.

    Attributes:
        number: the pipe's end here; -1: closed.
        cut: there was more than is kept.
    """

    def __init__(self, number: int, most: int, throttled: bool) -> None:
        """Read from a pipe.

        Args:
            most: bytes that are kept.
            throttled: when these are there, the command waits; else what follows is thrown away.
        """
        self.number = number
        self.cut = False
        self._most = most
        self._throttled = throttled
        self._kept = bytearray()
        os.set_blocking(number, False)

    @property
    def wanted(self) -> bool:
        """Whether to look whether there is more."""
        return self.number >= 0 and not (self._throttled and len(self._kept) >= self._most)

    @property
    def held(self) -> int:
        """Bytes that are here and not taken."""
        return len(self._kept)

    def look(self) -> bool:
        """Read a piece; whether there was one."""
        try:
            data = os.read(self.number, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        room = self._most - len(self._kept)
        if self._throttled:
            self._kept += data  # a piece more than the bound at most
        else:
            self._kept += data[:room]
            self.cut = self.cut or len(data) > room
        return True

    def drain(self) -> None:
        """Read what is there now, of what is kept at most."""
        for _ in range(self._most // _PIECE + 2):
            if not self.wanted or not self.look():
                break

    def take(self) -> bytes:
        data = bytes(self._kept)
        self._kept.clear()
        return data

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


class Running:
    """A command from its start until its end has been told.

    Attributes:
        pid: its first process, which leads a session and a group of its own.
        outputs: standard output and standard error, or both in one.
        code: its exit status, negative for a signal, once it has ended.
        limit: the text of the limit that ended it.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        limits: dict[int, int],
        most: int,
        seconds: float,
        lasting: bool,
        data: bytes,
        disk: int,
    ) -> None:
        """Start it.

        Args:
            limits: of `resource.RLIMIT_*`.
            data: what it can read; nothing more comes after it unless it is lasting.
            most: bytes of each output that are kept.
            lasting: it is read and fed while it runs, its outputs in one; else they are kept until it has ended.
            disk: number of an open directory of the box's disk.

        Raises:
            OSError: if there can be no more processes.
        """
        shell = [next(filter(os.path.exists, _SHELLS), "/bin/sh"), "-c"]
        words = [*shell, command] if isinstance(command, str) else list(command)
        written = [os.pipe() for _ in range(1 if lasting else 2)]
        given = os.pipe() if lasting or data else (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC),)
        try:
            self.pid = os.fork()
        except OSError:
            for number in (end for ends in (given, *written) for end in ends):
                os.close(number)
            raise
        if self.pid == 0:
            _become(words, dict(environment), directory, limits, [given[0], written[0][1], written[-1][1]])
        os.close(given[0])
        self.outputs = [Output(read, most, lasting) for read, _ in written]
        for _, end in written:
            os.close(end)
        self.input = given[1] if len(given) > 1 else -1
        self.lasting = lasting
        self.deadline = Deadline(seconds)
        self.code: int | None = None
        self.late = False
        self.limit = ""
        self._fed = bytearray()
        self._closing = False
        self._disk = disk
        self._cpu = limits[resource.RLIMIT_CPU]
        if self.input >= 0:
            os.set_blocking(self.input, False)
            self.feed(data, last=not lasting)

    def feed(self, data: bytes, last: bool) -> None:
        """Hand bytes over to its standard input, as it takes them.

        Args:
            last: there are no more after these.
        """
        self._fed += data
        self._closing = self._closing or last
        self.push()

    @property
    def runs(self) -> bool:
        """Whether its time still counts."""
        return self.code is None and not self.late

    @property
    def hungry(self) -> bool:
        """Whether there are bytes that it has not taken."""
        return self.input >= 0 and bool(self._fed)

    def push(self) -> None:
        """Write what its input takes now."""
        try:
            while self.hungry:
                del self._fed[: os.write(self.input, self._fed[:_PIECE])]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._closing = True
        if self._closing and self.input >= 0:
            self._fed.clear()
            os.close(self.input)
            self.input = -1

    def ended(self, status: int, used: resource.struct_rusage) -> None:
        """Its first process has ended, and was waited for."""
        self.code = os.waitstatus_to_exitcode(status)
        spent = used.ru_utime + used.ru_stime
        if not self.limit and not self.late:
            killed = self.code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
            if killed or (self.code == -signal.SIGKILL and spent >= self._cpu):
                self.limit = f"a process took more than {self._cpu} s of processor time"
            elif self.code and (full := full_disk(self._disk)):
                self.limit = full
        for output in self.outputs:
            output.drain()
        self._closing = True
        self._fed.clear()
        self.push()

    def kill(self, number: int) -> None:
        """Send a signal to its processes, as far as they are told from others: its session, and what descends from
        it."""
        if self.code is None:
            for pid in _family(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def run_out(self) -> None:
        """Its time is over."""
        self.late = True
        for _ in range(3):  # what was started in the meantime
            self.kill(signal.SIGKILL)


def _become(
    words: list[str], environment: dict[str, str], directory: str, limits: dict[int, int], files: list[int]
) -> None:
    """Become a command; what keeps this process from it is its error output."""
    code = _NOT_RUN
    try:
        for place, number in enumerate(files):
            os.dup2(number, place)
        os.closerange(len(files), 1 << 30)  # whatever this process has open, a command has not
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        bound_process(limits | {resource.RLIMIT_CPU: limits[resource.RLIMIT_CPU] + 1})
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]  # comes a second after the signal that says what it is for
        resource.setrlimit(resource.RLIMIT_CPU, (min(limits[resource.RLIMIT_CPU], hard), hard))
        os.umask(0o022)
        os.chdir(place_of(directory))
        os.execvpe(words[0], words, environment)
    except OSError as error:
        code = _NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else _NOT_RUN
        named = os.fsdecode(error.filename or "")  # the last directory of PATH, for a program that is in none of them
        named = words[0] if not named or named.endswith(f"/{words[0]}") else named
        os.write(2, f"{named}: {error.strerror}\n".encode(errors="replace"))
    except BaseException as error:  # noqa: BLE001  (nothing may get past this)
        os.write(2, f"{words[0]!r}: {error!r}\n".encode(errors="replace"))
    os._exit(code)


def bound_process(limits: Mapping[int, int]) -> None:
    """Limit this process and those that it starts, as far as they are not limited more already.

    Args:
        limits: of `resource.RLIMIT_*`.
    """
    for what, most in limits.items():
        hard = resource.getrlimit(what)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)


def _family(first: int) -> list[int]:
    """The processes of a session, and those that descend from its first."""
    parents: dict[int, int] = {}
    found = {first}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = read_kernel(f"/proc/{name}/stat").rpartition(")")[2].split()
            parents[int(name)] = int(words[1])
            if int(words[3]) == first:
                found.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {1})


def full_disk(folder: int) -> str:
    """The text that the disk of the box is full; "" while it is not.

    Args:
        folder: number of a directory that was open before the first command, which no path leads away from.
    """
    found = os.fstatvfs(folder)
    if not found.f_bfree:
        return f"its disk of {found.f_blocks * found.f_frsize >> 20} MiB is full"
    if not found.f_ffree:
        return f"its disk has {found.f_files:,} files, as many as it may"
    return ""
