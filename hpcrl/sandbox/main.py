"""The process that confines a command, watches it, and ends it: `python -m hpcrl.sandbox.main TASK REPORT`.

TASK and REPORT are numbers of open files: the task as JSON (`run.py` writes it), and where its outcome is written.
The command is the first process of a PID namespace: with it end all that it has started, and with this process it.

Invariants: the command runs confined or not at all; it holds no file from outside, what it writes being copied when it
has ended; it has ended when this process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import Any

from hpcrl.sandbox.confine import become_own_user, confine_first_process
from hpcrl.sandbox.private_root import TMP, View, make_tmpfs, nameless_files
from hpcrl.sandbox.system_calls import (
    NEW_MOUNTS,
    NEW_PIDS,
    PARENT_DEATH_SIGNAL,
    PRIVATE,
    RECURSIVE,
    mount,
    prctl,
    reason,
)
from hpcrl.sandbox.usage import POLL, START, bound_numbers, bound_process, come_first, threads_of_user, usage
from hpcrl.utils.deadline import Deadline

PROCESSES = 128  #: that it may have at once
NUMBERS = 512  #: process ids, of which the kernel keeps 300 to itself once they were all given
MEMORY = 1536 << 20  #: bytes that they may have together
_EACH = {  #: limits of each process
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: 20,
    resource.RLIMIT_FSIZE: 16 << 20,
    resource.RLIMIT_MEMLOCK: 1 << 20,
    resource.RLIMIT_NOFILE: 256,
}


def main(argv: list[str]) -> int:
    """Run the task; what became of it is in the report, whatever this returns."""
    task_file, report_file = int(argv[0]), int(argv[1])
    for number in (task_file, report_file):
        os.set_inheritable(number, False)
    task = json.loads(os.pread(task_file, os.fstat(task_file).st_size, 0))
    try:
        report = _run(task)
    except OSError as error:
        report = {"unconfined": reason(error)}
    os.write(report_file, json.dumps(report).encode())
    return 0


def _run(task: dict[str, Any]) -> dict[str, Any]:
    prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
    come_first()
    view = View(tuple((inside, outside) for inside, outside in task["shown"]), task["results"])
    others = threads_of_user()
    become_own_user(NEW_MOUNTS | NEW_PIDS)
    mount(None, "/", None, RECURSIVE | PRIVATE)
    kept = -1
    if view.results:
        kept = os.open(view.results, os.O_DIRECTORY | os.O_CLOEXEC)
        make_tmpfs(view.results, TMP, "700")
    output = nameless_files(2, 2 * _EACH[resource.RLIMIT_FSIZE])
    said, telling = os.pipe()
    child = os.fork()
    if child == 0:
        _become(task, view, output, telling, PROCESSES + others)
    os.close(telling)
    wrong = _first_word(said)
    if wrong:
        os.waitpid(child, 0)
        return {"unconfined": wrong}
    report = _watch(child, Deadline(task["seconds"]))
    for number, written in enumerate(output, 1):
        place = 0
        while data := os.pread(written, 1 << 20, place):
            place += os.write(number, data)
    if view.results:
        _keep(view.results, kept)
    return report


def _become(task: dict[str, Any], view: View, output: list[int], telling: int, processes: int) -> None:
    """Become the command, confined; what keeps this process from it goes through the pipe `telling`.

    Args:
        output: files for what it writes to standard output and standard error.
    """
    try:
        os.setsid()
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        bound_numbers(NUMBERS)
        confine_first_process(view)
        for number, file in enumerate(output, 1):
            os.dup2(file, number)
        bound_process(_EACH | {resource.RLIMIT_NPROC: processes})
        os.umask(0o077)
        os.chdir(task["directory"])
        os.execve(task["command"][0], task["command"], task["environment"])
    except BaseException as error:  # noqa: BLE001  (nothing may get past this)
        os.write(telling, reason(error).encode())
    os._exit(1)


def _first_word(said: int) -> str:
    """Why the command did not begin; "" when it has: then its end of the pipe is closed."""
    ready, _, _ = select.select([said], [], [], START)
    if not ready:
        return f"confining took more than {START:g} s"
    return os.read(said, 4096).decode(errors="replace")


def _watch(child: int, deadline: Deadline) -> dict[str, Any]:
    """Wait for the first process of the namespace, and end all if they become too many, too large or too slow."""
    ended = ""
    while True:
        pid, status = os.waitpid(child, 0 if ended else os.WNOHANG)
        if pid:
            return {"status": os.waitstatus_to_exitcode(status), "ended": ended}
        processes, used = usage(f"/proc/{child}/root/proc", PROCESSES + 1)
        if deadline.over:
            ended = "time"
        elif processes > PROCESSES:
            ended = f"has more than {PROCESSES} processes"
        elif used > MEMORY:
            ended = f"takes more than {MEMORY >> 20} MiB"
        if ended:
            os.kill(child, signal.SIGKILL)
        else:
            time.sleep(POLL)


def _keep(folder: str, kept: int) -> None:
    """Copy what was written to the results, TMP bytes of regular files, to the directory that they cover."""
    left = TMP
    for name in sorted(os.listdir(folder)):
        with contextlib.suppress(OSError):
            number = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(number).st_mode) and os.fstat(number).st_size <= left:
                    data = os.pread(number, left, 0)
                    left -= len(data)
                    _write_copy(kept, name, data)
            finally:
                os.close(number)


def _write_copy(folder: int, name: str, data: bytes) -> None:
    number = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with open(number, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
