"""What a run directory says of the run's job, and what a user asks of it.

    RUN/job.json      what started the run, and which Slurm job it is, for commands that look at it or resume it
    RUN/state.json    what the job is doing, for those who look from outside
    RUN/stop, cancel  a user asks the run to save and end, or has cancelled its job

Invariants: each file is written whole.  state.json is written at each change and at least every BEAT seconds while the
launcher lives, so an old file of a job that should be running means that its launcher is gone; the last one says how
the job ended.  What a later start needs (the site) is in job.json.  A start heeds what was asked since it was itself
asked for, and nothing that was asked of an earlier launcher; but a request that no launcher lived to answer holds for a
start that no user asked for.  Times of files are compared with times of files alone: the clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import msgspec

from hpcrl.errors import HpcrlError, Stopped
from hpcrl.run.rundir import read_if_whole, read_record, write_atomic
from hpcrl.utils.waiting import LastSign

STATE = "state.json"  #: its name in a run directory
BEAT = 10.0
STOP = "stop"  #: RUN/stop is there once the run was asked to save and end
#: RUN/cancel is there while a job is being cancelled: whatever the launcher sees then is not a failure
CANCEL = "cancel"
CANCELLED = "cancelled; what was saved is good"

Working = Literal["preparing", "starting", "running", "saving", "ending"]
Phase = Literal[Working, "requeued", "finished", "stopped", "failed", "cancelled"]
WORKING = get_args(Working)
OVER = ("finished", "stopped", "failed", "cancelled")  #: those after which its launcher does nothing more


class JobState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it holds, the launcher's word.

    Attributes:
        time: when it was written.
        ends: the allocation's time limit (unix times).
        restarts: how often the scheduler has started the job again.
        host, pid: the launcher's.
        message: how it ended, or why it waits.
    """

    phase: Phase
    time: float
    stage: str = ""
    attempt: int = 0
    restarts: int = 0
    message: str = ""
    host: str = ""
    pid: int = 0
    ends: float | None = None


_WRITING = threading.RLock()  #: a process's writers of state.json, one after the other


def write_state(root: Path, state: JobState) -> None:
    """Write it.  No error is raised on a full disk: those who need it report it."""
    with _WRITING, contextlib.suppress(OSError, HpcrlError):
        write_atomic(root / STATE, msgspec.json.encode(state))


class JobStateFile:
    """The writer of state.json, as a context: leaving it says whether the job finished, stopped, failed or was
    cancelled.

    Attributes:
        judged: whether leaving it with an error leaves the phase as it is: the job may be queued again, and who decides
            that says how it ended (`last_word`).
    """

    def __init__(self, root: Path, restarts: int = 0, ends: float | None = None, judged: bool = False) -> None:
        self.root = root
        self.judged = judged
        self._written = LastSign()
        self.state = JobState("starting", 0.0, restarts=restarts, host=socket.gethostname(), pid=os.getpid(), ends=ends)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def set(self, phase: Phase, **fields: Any) -> None:
        """Change the phase, and what else is given of JobState's fields."""
        self.state = msgspec.structs.replace(self.state, phase=phase, **fields)
        self._write()

    def beat(self, phase: Phase | None = None) -> None:
        """A sign of life, and perhaps a new phase; cheap to call often."""
        if phase is not None and phase != self.phase:
            self.set(phase)
        elif self._written.silence > BEAT:
            self._write()

    def _write(self) -> None:
        self.state = msgspec.structs.replace(self.state, time=time.time())
        self._written.heard()
        write_state(self.root, self.state)

    def __enter__(self) -> JobStateFile:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.set("finished", message="")
        elif self.judged and isinstance(error, HpcrlError) and not (self.root / CANCEL).exists():
            self.set("saving", message=f"{error.what}; looking whether it is to be queued again")
        else:
            self.last_word(error)

    def last_word(self, error: BaseException) -> None:
        """How the job ended, by its error."""
        if (self.root / CANCEL).exists():
            self.set("cancelled", message=CANCELLED)
        elif isinstance(error, Stopped):
            self.set("stopped", message=str(error))
        else:
            self.set("failed", message=str(error) or type(error).__name__)


@contextlib.contextmanager
def judging(root: Path) -> Iterator[None]:
    """While it is found out whether a run that ended early is queued again: signs of life for those who look."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with _WRITING:
                if (state := _left_to_judge(root)) is not None:
                    write_state(root, msgspec.structs.replace(state, time=time.time()))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT)


def settle(root: Path, error: BaseException) -> None:
    """Have a state that this process has left to be judged say how the job ended, unless it says meanwhile that it is
    queued again."""
    with _WRITING:
        if (state := _left_to_judge(root)) is not None:
            file = JobStateFile(root)
            file.state = state
            file.last_word(error)


def _left_to_judge(root: Path) -> JobState | None:
    """The state if it is this process's own and says that the run is at work: another's says so of another start."""
    state = read_if_whole(root / STATE, JobState)
    mine = state and state.phase in WORKING and (state.host, state.pid) == (socket.gethostname(), os.getpid())
    return state if mine else None


# ---- job.json

JOB = "job.json"  #: its name in a run directory
#: what starts a run: Slurm alone has a queue before it
Scheduler = Literal["local", "mpirun", "slurm"]
SUBMITTING = (
    180.0  #: seconds in which a run that is being submitted gets its job's number, or the submission was cut short
)


#: what numbers of jobs and identities look like; none can be taken for an option of a command
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+@\[\]-]{0,99}").fullmatch


class JobFile(msgspec.Struct, frozen=True):
    """What it holds.  Another user may have written it: numbers become words of Slurm's commands.

    Attributes:
        job_id: Slurm's number (of a heterogeneous job the leader's; of a task of a job array as the scheduler
            writes it).
        chain: the numbers of all jobs of a chain, this one among them.
        submitted: unix time.
        identity: the run's.
        script: the batch script.
        site: the profile it was submitted with.
    """

    scheduler: Scheduler = "local"
    job_id: str | None = None
    cluster: str | None = None
    submit_host: str = ""
    submitted: float = 0.0
    identity: str = ""
    script: str | None = None
    components: list[dict[str, Any]] = []
    site: dict[str, Any] | None = None
    chain: list[str] = []

    def __post_init__(self) -> None:
        """ValueError for what Slurm has not given."""
        for name in ("job_id", "identity"):
            if (text := getattr(self, name)) and not _PLAIN(text):
                raise ValueError(f"{name} is {text[:40]!r}, which is no such")
        if wrong := [text for text in self.chain if not _PLAIN(text)]:
            raise ValueError(f"chain holds {wrong[0][:40]!r}, which is not a job ID")

    @property
    def queued(self) -> bool:
        """Whether it is a Slurm job."""
        return self.scheduler == "slurm"


def write_job(root: Path, identity: str, scheduler: Scheduler, job_id: str | None, **more: Any) -> None:
    """Write job.json.

    Args:
        more: cluster, script, components, site as far as they are known, and chain; a site that was known is kept.
    """
    known = {"site": read_job(root).site, **more}
    replace_job(
        root,
        JobFile(scheduler, job_id, submit_host=socket.gethostname(), submitted=time.time(), identity=identity, **known),
    )


def replace_job(root: Path, job: JobFile) -> None:
    """Write all of job.json."""
    write_atomic(root / JOB, msgspec.json.encode(job))


def read_job(root: Path) -> JobFile:
    """job.json of a run directory; that of a local run where there is none.

    Raises:
        HpcrlError: names a damaged file.
    """
    return read_record(root / JOB, JobFile, "remove it, and give the run's script to Slurm again") or JobFile()


# ---- RUN/stop and RUN/cancel


def process_age() -> float:
    """Seconds since this process began."""
    import psutil  # not at the top: `hpcrl status` does without

    return max(0.0, time.time() - psutil.Process().create_time())


def forget_old_requests(root: Path, restarts: int, age: float) -> None:
    """Remove what was not asked of this start.

    Args:
        restarts: how often the scheduler has started the job again by itself.
        age: seconds since this start was asked for, as far as its process knows: that of a job that `hpcrl submit` or
            `hpcrl resume` has sent is as old as its job.json.
    """
    os.utime(root / "lock")
    now = _changed(root / "lock")
    if (record := read_job(root)).queued and record.site is not None:
        age = max(age, now - _changed(root / JOB))
    last = read_if_whole(root / STATE, JobState)  # of the launcher before, which may have ended by itself
    for name in (STOP, CANCEL):
        asked = _changed(root / name)
        answered = last is not None and last.phase in OVER and asked <= _changed(root / STATE)
        if answered or (not restarts and asked < now - age):
            (root / name).unlink(missing_ok=True)


def _changed(path: Path) -> float:
    """Unix time by the clock of the file system; 0 where there is no such file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
