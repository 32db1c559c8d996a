"""The process that watches the launcher: a launcher that hangs would hold every host of the run until its time limit.

    python -m hpcrl.launch.launcher_watchdog RUN --attempt N --launcher PID --beats FOLDER --seconds S
        [--requeue WORD ...]

Invariants: it ends with the launcher; it ends only the launcher that started it, whose processes then end with it; what
it saw is recorded as the attempt's error.  In a Slurm job it has the job queued again first, as the launcher
would have after any other fault that a new start may get over; `check_headway` ends that where it leads nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.heartbeat import HeartbeatMonitor, HeartbeatWriter
from hpcrl.run.job_files import CANCEL, STATE, STOP, JobState, Phase, write_state
from hpcrl.run.process import PARENT, die_with_parent, run_command
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.run.scratch import scratch

ANSWER = 960.0  #: seconds that it may take to have the job queued again: its command asks until the scheduler answers


@contextlib.contextmanager
def watched(rundir: RunDir, seconds: float, requeue: Sequence[str] = ()) -> Iterator[None]:
    """Have this process, the launcher, watched.

    Not at a terminal, where a user may have stopped it with Ctrl-Z and means to continue.

    Args:
        requeue: the command that queues the launcher's job again; () for none.
    """
    if os.isatty(0):
        yield
        return
    with scratch("launcher") as made:
        folder = made / "beats"
        folder.mkdir(mode=0o700)
        words = [str(rundir.root), "--attempt", str(rundir.attempt), "--launcher", str(os.getpid())]
        command = [
            sys.executable,
            "-m",
            "hpcrl.launch.launcher_watchdog",
            *words,
            "--beats",
            str(folder),
            "--seconds",
            str(seconds),
            *(["--requeue", *requeue] if requeue else []),
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=os.environ | {PARENT: str(os.getpid())}, start_new_session=True
        )
        try:
            with HeartbeatWriter(folder, "launcher", every=min(3.0, seconds / 4)):
                yield
        finally:
            process.kill()
            process.wait(10)


def watch(rundir: RunDir, launcher: int, folder: Path, seconds: float, requeue: Sequence[str] = ()) -> None:
    """Return when the launcher was silent for too long, and has been ended."""
    pulse = HeartbeatMonitor(folder, look=min(5.0, seconds / 4))
    while True:
        for silent in pulse.silent(seconds):
            with contextlib.suppress(HpcrlError):  # the attempt of now, which may be a later one
                rundir = RunDir.latest(rundir.root)
            what = f"the launcher on {socket.gethostname()} {silent}; it was ended, so that the run's hosts are free"
            say(what)
            with contextlib.suppress(OSError, HpcrlError):
                rundir.fail("launcher", 0, what)
            with contextlib.suppress(OSError, HpcrlError):
                queue_again(rundir, what, requeue)
            os.kill(launcher, signal.SIGKILL)  # our parent: its number cannot be another's while we live
            return
        time.sleep(pulse.look)


def queue_again(rundir: RunDir, what: str, words: Sequence[str]) -> bool:
    """Queue the job again if there is a command for it and the user has not ended the run; record what became of it.

    Returns:
        Whether it is queued again.
    """
    root = next((root for root in (rundir.root, rundir.root.parent) if (root / STATE).is_file()), None)
    if root is None:
        return False
    asked = rundir.stop_requested() or any((root / name).exists() for name in (STOP, CANCEL))
    phase: Phase = "requeued" if words and not asked else "failed"
    _last_word(rundir, root, phase, what)  # before, since the scheduler may end us at once
    if phase != "requeued":
        return False
    answer = run_command(list(words), ANSWER)
    if answer.code in (0, -signal.SIGTERM):
        return True
    _last_word(rundir, root, "failed", f"{what}; {shlex.join(words)}: {answer.said}")
    return False


def _last_word(rundir: RunDir, root: Path, phase: Phase, what: str) -> None:
    """What the launcher would have written of its end: `root` is the run directory or, of a stage, the one above."""
    write_state(root, JobState(phase, time.time(), attempt=rundir.attempt, message=what, host=socket.gethostname()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Watches the launcher; started by it.")
    parser.add_argument("run")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--beats", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--requeue", nargs=argparse.REMAINDER, default=[], help="a command, with all that follows")
    args = parser.parse_args()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher; we end with it
    watch(RunDir(args.run, args.attempt), args.launcher, args.beats, args.seconds, args.requeue)
    return 0


if __name__ == "__main__":
    sys.exit(main())
