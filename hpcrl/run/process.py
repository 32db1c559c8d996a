"""Processes that end when they should: with their parent, and with everything they started; and short commands that
answer within a deadline.

Invariants: we end only what we started, found by process id, never by name.  A role dies with the process that started
it, and a launcher that ends takes along all its descendants, also those that left its process group.  A process that
computes with torch ends with the status of its work, whatever its daemon threads wait for.  Whatever a short
command does is an answer, never an exception: a program that is missing, fails or is too slow included; nothing that it
started outlives a question that was given up.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import NamedTuple, NoReturn

import psutil

from hpcrl.utils.waiting import Deadline

#: exit codes, as timeout(1) and a shell have them
LATE = 124
MISSING = 127


class CommandResult(NamedTuple):
    """What a command answered.

    Attributes:
        code: its exit status, negative for a signal; LATE if it did not end in time, MISSING if it could not be
            started.
        out, err: what it wrote; in those two cases `err` says what happened.
    """

    code: int
    out: str = ""
    err: str = ""
    program: str = ""

    @property
    def last_output(self) -> str:
        """The last line that says something, of the errors or else of the output, without the program's name before
        it."""
        lines = [line.strip() for text in (self.out, self.err) for line in text.splitlines() if line.strip()]
        return lines[-1].removeprefix(f"{self.program}: ") if lines else f"exit code {self.code}"


def run_command(
    command: Sequence[str], seconds: float, stdin: str = "", env: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command for at most `seconds`.

    Args:
        env: all of its environment; None: ours.
    """
    program = Path(command[0]).name
    try:
        process = Popen(
            command,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(MISSING, "", f"cannot be started: {error.strerror}", program)
    with process:
        try:
            out, err = process.communicate(stdin or None, timeout=seconds)
        except TimeoutExpired:
            _kill_session(process)
            return CommandResult(LATE, "", f"no answer within {seconds:.0f} s", program)
        except BaseException:
            _kill_session(process)
            raise
    return CommandResult(process.returncode, out, err, program)


def _kill_session(process: Popen[str]) -> None:
    """Kill a command with all of its session's first group; it has not been waited for, so the number is still its
    own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


PARENT = "HPCRL_PARENT"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(forks: bool = False) -> None:
    """Be killed (SIGKILL) when the process that started us ends, however it ends (prctl(2), PR_SET_PDEATHSIG).

    The parent process may put its process id into HPCRL_PARENT: then its death before this call, while we were still
    importing, is noticed too. What we start ourselves finds our own id there.

    Args:
        forks: so are processes that are forked from this one's main thread, and theirs: one writes a checkpoint, and
            libraries may fork others.
    """
    if forks:
        os.register_at_fork(after_in_child=die_with_parent)
    if os.environ.get(PARENT) == str(os.getpid()):
        return  # done already
    parent = int(os.environ.get(PARENT) or os.getppid())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ[PARENT] = str(os.getpid())


def exit_after(main: Callable[[], int]) -> NoReturn:
    """End this process with the status of `main()`, and without the interpreter's own end; to be called first.

    A thread that waits in torch's C++ code, in a store or in gloo, asks for the interpreter's lock when it returns.  At
    the interpreter's end CPython 3.11 ends such a thread there, which aborts the process ("terminate called without an
    active exception"), and a later one lets it wait for ever.  What was registered with atexit after this call still
    runs; what was before it does not.
    """
    status = 1

    def leave() -> None:
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(status)

    atexit.register(leave)  # the first to be registered is the last to run
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    sys.exit(status)


def raise_file_limit() -> None:
    """Let this process, and what it starts, have as many files and connections open as the system allows."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        with contextlib.suppress(OSError, ValueError):  # some systems call it infinite, and take less
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_private() -> None:
    """Have all files that this process and its children make be of their user alone: torch, Megatron, vLLM and the
    functions of a user have no other way to be told."""
    os.umask(0o077)


def set_limits() -> None:
    """What every process of a run does first: files for its user alone, and as many open ones as the system allows."""
    keep_private()
    raise_file_limit()


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent died, so that `end` finds them (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """Every living process below this one."""
    return psutil.Process().children(recursive=True)


def end_processes(processes: Iterable[psutil.Process], grace: float) -> None:
    """SIGTERM, then after `grace` seconds SIGKILL; returns when all are gone."""
    alive = list(processes)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = Deadline(grace)
    while alive and not deadline.over:
        alive = psutil.wait_procs(alive, timeout=0.1)[1]
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def end_descendants(grace: float) -> None:
    """End all that this process started, directly or not, including what appears while we are at it."""
    end_processes(descendants(), grace)
    for _ in range(5):
        if not (rest := descendants()):
            return
        end_processes(rest, 0.0)


if __name__ == "__main__":  # python -m hpcrl.run.process COMMAND ...: run a command that dies with its parent
    die_with_parent()
    del os.environ[PARENT]  # what COMMAND starts elsewhere, such as srun's tasks, has other parents
    os.execvp(sys.argv[1], sys.argv[1:])
