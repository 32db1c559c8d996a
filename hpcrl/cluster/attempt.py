"""One attempt on this machine: start the roles of a plan as local processes, watch them, end them.

Invariants: the first role that fails ends the attempt, and within seconds no process of it is left; an attempt has
succeeded only if the trainer says so in summary.json and every role ended well (an exit code of 0 alone proves nothing).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from hpcrl.errors import DeadlineError, HpcrlError, PeerError, Stopped
from hpcrl.options import Options
from hpcrl.plan import Plan
from hpcrl.process import PARENT, end, end_descendants
from hpcrl.rundir import RunDir

GRACE = 7.5  #: seconds between SIGTERM and SIGKILL
CLOSING = 30.0  #: seconds that the other roles may take to end once the trainer has


@dataclass
class Role:
    """One started role."""

    name: str
    index: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def epitaph(self) -> str:
        """How it ended, for a user."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name}-{self.index} {how}; its log is {self.log}"


@dataclass
class Stop:
    """What signals have asked for so far: 0 nothing, 1 save and end, 2 end now."""

    requests: int = 0
    handlers: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, *_: object) -> None:
        self.requests += 1


def commands(plan: Plan, rundir: RunDir) -> list[tuple[str, int, list[str]]]:
    """(role, index, command) of every process that the plan asks this machine to start."""
    base = [str(rundir.root), "--attempt", str(rundir.attempt)]
    python = [sys.executable, "-m"]
    engines = [("engine", i, [*python, "hpcrl.engine.main", *base, "--index", str(i)]) for i in range(len(plan.engines))]
    rollout = ("rollout", 0, [*python, "hpcrl.rollout.main", *base])
    trainer = ("trainer", 0, [*python, "hpcrl.trainer.torchrun", *base])
    return [*engines, rollout, trainer]


def start(role: str, index: int, command: list[str], rundir: RunDir) -> Role:
    """Start one role in a session of its own, its output going to its log."""
    log = rundir.logs / f"{role}-{index}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment()
        )
    return Role(role, index, process, log)


def environment() -> dict[str, str]:
    """The user's environment, less what would change a role's behaviour by accident."""
    drop = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {
        PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": kept.get("HF_HUB_OFFLINE", "1"),
    }


def run_attempt(options: Options, plan: Plan, rundir: RunDir, stop: Stop, poll: Callable[[], None]) -> dict[str, object]:
    """Run one attempt to its end and return its summary.

    poll is called about five times a second.  PeerError names the role that failed; DeadlineError says that a stop was
    asked for and did not come in time.  Whatever happens, no process of the attempt outlives the call.
    """
    roles: list[Role] = []
    try:
        for name, index, command in commands(plan, rundir):
            roles.append(start(name, index, command, rundir))
        watch(roles, options, rundir, stop, poll)
    finally:
        end(living(roles), GRACE)  # each role first ends what it started itself, in its own order
        end_descendants(0.5)
    return summary_of(rundir)


def living(roles: list[Role]) -> list[psutil.Process]:
    """The roles that still live."""
    return [psutil.Process(r.process.pid) for r in roles if r.status is None and psutil.pid_exists(r.process.pid)]


def watch(roles: list[Role], options: Options, rundir: RunDir, stop: Stop, poll: Callable[[], None]) -> None:
    """Return when trainer and rollout have ended well; raise as soon as anything has not."""
    working = [r for r in roles if r.name != "engine"]
    stop_by = close_by = float("inf")
    while any(r.status is None for r in working):
        poll()
        check(roles, rundir)
        now = time.monotonic()
        if stop.requests and rundir.find("trainer", 0) is None:
            raise Stopped("stopped while starting: nothing was trained since the last checkpoint", "continue with --resume")
        if stop.requests and stop_by == float("inf"):
            rundir.request_stop()
            stop_by = now + options.stop_timeout
        if stop.requests > 1:
            raise HpcrlError("ended at once on a second signal", "the last saved checkpoint is good: continue with --resume")
        if now > stop_by:
            raise DeadlineError(
                f"the run did not save and end within --stop-timeout {options.stop_timeout:.0f} s", "it was ended"
            )
        if any(r.status is not None for r in working):
            close_by = min(close_by, now + CLOSING)
        if now > close_by:
            late = next(r for r in working if r.status is None)
            raise DeadlineError(
                f"{late.name}-{late.index} did not end within {CLOSING:.0f} s after the others", f"see {late.log}"
            )
        time.sleep(0.2)
    check(roles, rundir)


def check(roles: list[Role], rundir: RunDir) -> None:
    """PeerError if a role has failed, or an engine has ended while it was needed."""
    gone = [r for r in roles if r.status is not None and (r.status != 0 or r.name == "engine")]
    if not gone:
        rundir.check()
        return
    end_of_wait = time.monotonic() + 1.0  # the role that knows why may be about to say so
    while rundir.failure() is None and time.monotonic() < end_of_wait:
        time.sleep(0.05)
    rundir.check()
    rundir.fail(gone[0].name, gone[0].index, gone[0].epitaph())
    raise PeerError(gone[0].epitaph())


def summary_of(rundir: RunDir) -> dict[str, object]:
    """The summary that the trainer wrote in this attempt."""
    try:
        summary = msgspec.json.decode((rundir.root / "summary.json").read_bytes(), type=dict)
    except FileNotFoundError:
        summary = {}
    if summary.get("attempt") != rundir.attempt:
        raise PeerError(f"all roles ended, but the trainer left no summary of attempt {rundir.attempt}", f"see {rundir.logs}")
    return summary
