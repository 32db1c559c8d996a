"""The process outside of a box that starts the program which makes it, watches what the box uses, and ends it.

    python3 -ISc ... LIFELINE TALK PARENT TASK

LIFELINE and TALK are numbers of open sockets: the box's user closes LIFELINE when the box is to end, and reads
from it why the box has ended by itself; TALK is the box's own.  PARENT is the user's process id.  TASK is JSON:
`words` (the program, in which {talk} and {watcher} stand for numbers), `limits` (of a `BoxLimits`).

Invariant: the box has ended, with all that runs in it, when this process does; and this process ends with its user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from hpcrl.sandbox.inside.first import ENDED
from hpcrl.sandbox.inside.frames import pack
from hpcrl.sandbox.inside.kernel import DEATH_SIGNAL, prctl, read_kernel, write_kernel
from hpcrl.sandbox.inside.main import MADE, MOST_DISKS, START
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.utils.waiting import Deadline, poll

LIMIT = "limit: "  #: begins the reason for which a box was ended, where that is what ran in it
POLL = 0.005  #: seconds between two looks at what may grow
_SLOWEST = 0.05  #: seconds between two looks at what uses little
_PATIENCE = 5.0  #: seconds that the first process has to end what is over a limit, and to wait for its end
_ENDING = 10.0  #: seconds that the end of a box may take
_LOOK = 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HINTS = ("Try '", "dmesg(1)")  #: how util-linux's tools begin the line after their error
_SAID = 4096  #: last bytes of what the program says that are read
ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TZ": "UTC0"}


class Watch:
    """Looks at a box while anything runs in it but its first process."""

    def __init__(
        self, limits: BoxLimits, box: socket.socket, ends: Sequence[int], proc: int, disks: Sequence[int]
    ) -> None:
        """Watch a box.

        Args:
            box: the end of the socket to its first process.
            ends: numbers of files that can be read when the box is to end.
            proc: number of its open /proc.
            disks: numbers of directories, one of each file system that it can write to.
        """
        self._proc = f"/proc/self/fd/{proc}"
        self._disks = disks
        self._begun = self._on_disks()
        self._limits = limits
        self._box = box
        self._ends = ends
        self._strikes: Deadline | None = None  #: until when it may be over a limit
        self._ending = False  #: what ran over a limit has not ended yet

    def run(self) -> str:
        """Why the box is to be ended by force; "" otherwise."""
        waiting = select.poll()
        for one in (self._box.fileno(), *self._ends):
            waiting.register(one, select.POLLIN)
        pause: float | None = None
        over = ""
        while True:
            ready = dict(waiting.poll(None if pause is None else pause * 1000))
            if any(end in ready for end in self._ends):
                return ""
            if self._box.fileno() in ready:
                said = self._box.recv(64)
                if not said:
                    return ""
                self._ending = self._ending and said != ENDED
                pause = POLL
            late = self._strikes is not None and self._strikes.over
            if self._ending:  # what is seen meanwhile would be held against the next command
                if late:
                    return LIMIT + over
                continue
            processes, used, over = self._look()
            if over:
                if late:
                    return LIMIT + over
                self._strikes = self._strikes or Deadline(_PATIENCE)
                self._ending = True
                with contextlib.suppress(BlockingIOError):  # it does not listen: its time runs
                    self._box.send(over.encode())
                pause = POLL
                continue
            self._strikes = None
            near = 2 * processes > self._limits.processes or 2 * used > self._limits.memory
            pause = None if processes <= 1 else POLL if near else min(1.3 * (pause or POLL), _SLOWEST)

    def processes(self) -> list[str]:
        """The numbers of all in the box, as it sees them."""
        with contextlib.suppress(OSError):  # it has ended
            return [name for name in os.listdir(self._proc) if name.isdigit()]
        return []

    def _look(self) -> tuple[int, int, str]:
        """(processes, bytes of memory with those of the disk, the text of the limit that it is over)."""
        limits, pids = self._limits, self.processes()
        written, files = (now - begun for now, begun in zip(self._on_disks(), self._begun, strict=True))
        most = pids[: limits.processes + 2]  # more are too many anyway, and looking at them takes time
        used = written + sum(_resident(f"{self._proc}/{pid}") for pid in most if pid != "1")
        over = {
            f"it had more than {limits.processes} processes": len(pids) > limits.processes + 1,
            f"it took more than {limits.memory >> 20} MiB of memory": used > limits.memory,
            f"it wrote more than {limits.disk >> 20} MiB": written > limits.disk + _PAGE,  # `unshare`: it cannot
            f"it wrote more than {limits.inodes:,} files": files > limits.inodes,
        }
        return len(pids), used, next((text for text, holds in over.items() if holds), "")

    def _on_disks(self) -> tuple[int, int]:
        """(bytes, files) on all of them."""
        found = [os.fstatvfs(disk) for disk in self._disks]
        size = sum((disk.f_blocks - disk.f_bfree) * disk.f_frsize for disk in found)
        return size, sum(disk.f_files - disk.f_ffree for disk in found)


def _resident(process: str) -> int:
    """Bytes of a process that are in memory; of one whose first thread has ended, by any other."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if found := int(read_kernel(f"{process}/statm").split()[1]) * _PAGE:
            return found
        for thread in os.listdir(f"{process}/task"):
            if found := int(read_kernel(f"{process}/task/{thread}/statm").split()[1]) * _PAGE:
                return found
    return 0


def _start(words: list[str], talk: int, watcher: int, said: int) -> int:
    """Start the program that makes the box; its process id."""
    if child := os.fork():
        return child
    try:
        os.setsid()
        prctl(DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        write_kernel("/proc/self/oom_score_adj", "1000")  # a node without memory ends these first, not the run
        for number in (talk, watcher):
            os.set_inheritable(number, True)
        null = os.open("/dev/null", os.O_RDWR)
        for number, place in ((null, 0), (null, 1), (said, 2)):
            os.dup2(number, place)
        words = [word.replace("{talk}", str(talk)).replace("{watcher}", str(watcher)) for word in words]
        os.execvpe(words[0], words, ENVIRONMENT)
    except OSError as error:
        os.write(said, f"{words[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def main(argv: Sequence[str]) -> int:
    """Make a box and watch it until it ends, or is to end."""
    lifeline, talk = (socket.socket(fileno=int(number)) for number in argv[:2])
    task = json.loads(argv[3])
    ends = [lifeline.fileno()]
    with contextlib.suppress(OSError, AttributeError):  # Linux before 5.3: the end of the lifeline says it
        ends.append(os.pidfd_open(int(argv[2])))
    for end in (lifeline, talk):
        end.set_inheritable(False)
    os.chdir("/")
    with contextlib.suppress(OSError):  # root's processes have no limit of their number: this one has to come first
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    said = os.memfd_create("said", os.MFD_CLOEXEC)
    box, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _start(task["words"], talk.fileno(), its.fileno(), said)
    its.close()
    watch, why = None, ""
    try:
        box.settimeout(START)
        made, files, _, _ = socket.recv_fds(box, 16, MOST_DISKS + 1)
        if made == MADE:
            watch = Watch(BoxLimits(**task["limits"]), box, ends, files[0], files[1:])
            box.send(b"seen")
            box.setblocking(False)
            talk.close()
            why = watch.run()
        else:
            text = os.pread(said, _SAID, max(0, os.fstat(said).st_size - _SAID)).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(_HINTS)]
            with contextlib.suppress(OSError):
                talk.send(pack({"n": 0, "said": lines[-1][:300] if lines else ""}))
    except TimeoutError:
        why = f"making it took more than {START:g} s"
    except OSError as error:  # it has just ended
        why = error.strerror
    box.close()  # which ends the first process as well, whatever becomes of the program
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    poll(lambda: not watch or not watch.processes(), Deadline(_ENDING), _LOOK)
    with contextlib.suppress(OSError):
        lifeline.send(why.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
