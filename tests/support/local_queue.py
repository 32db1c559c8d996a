"""A second scheduler, small and real: jobs are process groups of this machine, their queue is a file, and nobody serves
it.

    $LOCAL_QUEUE/queue.json     every job there ever was; whoever reads or changes it holds $LOCAL_QUEUE/lock

`submit` starts a keeper for each job (`python -m tests.support.local_queue keep N`), which waits for its turn, runs the
script, warns it before its time limit, ends it there, and runs it again if it is to be queued again.  One job runs at a
time, the first submitted first: whichever keeper the machine lets run earlier.

It is found as any other scheduler is, by an entry point: `register` makes the package that has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.findings import Finding
from hpcrl.run.queued_job import GONE, JobKey, QueueAnswer, QueuedJob

if TYPE_CHECKING:
    from hpcrl.launch.scheduler import AllocationRequest, BatchScript, ScriptVerdict, Submission
    from hpcrl.launch.site import SiteProfile

NAME = "local-queue"
SLOTS = 8  #: of this machine
AGAIN = 2.0  #: seconds that a job waits before it starts again, as with other schedulers: time to look at it
#: state of a job -> (phase, reason, outcome)
MEANS: dict[str, tuple[Any, str, Any]] = {
    "waiting": ("pending", "another job is running", ""),
    "held": ("pending", "held; release it", ""),
    "running": ("running", "", ""),
    "done": ("ended", "its script ended, and the run did not say that it was done", "failed"),
    "broken": ("ended", "its script ended with an error", "failed"),
    "late": ("ended", "ended at its time limit", "failed"),
    "killed": ("ended", "cancelled", "cancelled"),
}


def register(directory: Path) -> None:
    """Write what an installed package with this scheduler would have beside it, for PYTHONPATH."""
    info = directory / "hpcrl_local_queue-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcrl-local-queue\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hpcrl.schedulers]\n{NAME} = tests.support.local_queue:LocalQueue\n")


# ---- the file


def folder() -> Path:
    return Path(os.environ["LOCAL_QUEUE"])


@contextlib.contextmanager
def jobs() -> Iterator[dict[str, dict[str, Any]]]:
    """All jobs by number; what is changed in them is written at the end."""
    file = folder() / "queue.json"
    with (folder() / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(file.read_text()) if file.exists() else {}
        before = json.dumps(found)
        yield found
        if (after := json.dumps(found)) != before:
            (folder() / ".queue.json").write_text(after)
            (folder() / ".queue.json").replace(file)


def change(number: str, **values: Any) -> None:
    """What an administrator may do to a job: state, limit (seconds from its start), wish ("requeue", "kill")."""
    with jobs() as found:
        found[number] |= values


def job(number: str) -> dict[str, Any]:
    with jobs() as found:
        return found[number]


# ---- on the login node


class Number(NamedTuple):
    job_id: str


@cache
def _profile() -> type[SiteProfile]:
    from hpcrl.launch.site import SiteProfile

    class LocalSite(SiteProfile):
        """A site whose jobs may be held until they are released."""

        hold: bool = False

    return LocalSite


class LocalQueue:
    """The queue, as hpcrl speaks to it (hpcrl.launch.scheduler.Scheduler)."""

    title = "Queue"
    submit_command = f"{shlex.quote(sys.executable)} -m tests.support.local_queue submit"
    test_command = ""
    script_file = "job.sh"
    echoes = ()

    def profile(self) -> type[SiteProfile]:
        return _profile()

    def here(self) -> bool:
        return "LOCAL_QUEUE" in os.environ

    def look(self, wanted: Sequence[JobKey]) -> QueueAnswer:
        if not self.here():
            return QueueAnswer()
        with jobs() as found:
            return QueueAnswer({key: _word(key, found.get(key.job_id)) for key in wanted})

    def cancel(self, job_id: str) -> None:
        with jobs() as found:
            if job_id not in found:
                raise HpcrlError(f"the queue has no job {job_id}")
            found[job_id]["wish"] = "kill"

    def responds(self) -> Iterator[Finding]:
        yield (
            Finding("ok", "", "the queue is a file")
            if self.here()
            else Finding("fail", "", "no queue here", "set LOCAL_QUEUE")
        )

    def fits(self, request: AllocationRequest, site: SiteProfile) -> Iterator[Finding]:
        most = sum(component.nodes * component.slots for component in request.components)
        if len(request.hosts()) > 1 or most > SLOTS:
            hosts = len(request.hosts())
            yield Finding(
                "fail", "", f"{hosts} hosts and {most} slots asked for, there are 1 and {SLOTS}", "ask for less"
            )

    def test(self, script: str) -> ScriptVerdict:
        raise NotImplementedError  # there is no test_command

    def render(self, script: BatchScript, request: AllocationRequest, site: SiteProfile) -> str:
        requeues = site.max_requeues if site.requeue else 0
        what = "\n# ".join([script.title, "", *script.summary.splitlines()])
        return (
            f"#!/bin/bash\n# {what}\n#QUEUE output={script.output}\n#QUEUE margin={request.margin}\n"
            f"export HPCRL_MAX_REQUEUES={requeues} HPCRL_SIGNAL_MARGIN={request.margin}\nexec {script.command}\n"
        )

    def script(self, submission: Submission) -> str:
        from hpcrl.launch.scheduler import batch_python

        root = submission.job.root
        command = shlex.join([batch_python(submission.site), "-u", "-m", "tests.support.local_queue", "run", str(root)])
        script = submission.script(command, str(root / "logs" / "job-%N.out"))
        return self.render(script, submission.request, submission.site)

    def script_by_hand(self, submission: Submission, words: Sequence[str]) -> str:
        place = f'"runs/{submission.job.recipe.name}-$LOCAL_JOB"'
        command = (
            f"{shlex.quote(sys.executable)} -m tests.support.local_queue start {shlex.join(words)} --run-dir {place}"
        )
        return self.render(submission.script_by_hand(command, "hpcrl-%N.out"), submission.request, submission.site)

    def submit(self, submission: Submission) -> Number:
        from hpcrl.launch.site import minutes

        file = submission.job.root / self.script_file
        file.write_text(self.script(submission))
        site = submission.site
        return Number(
            put(
                file,
                submission.job.identity,
                60.0 * minutes(site.time),
                "held" if site.hold else "waiting",
                submission.follows,
            )
        )

    def submit_script(self, file: Path) -> str:
        return put(file)


def put(file: Path, identity: str = "", limit: float = 3600.0, state: str = "waiting", follows: str = "") -> str:
    """A new job, and its keeper; the job's number."""
    options = dict(line[7:].split("=", 1) for line in file.read_text().splitlines() if line.startswith("#QUEUE "))
    with jobs() as found:
        number = str(1 + len(found))
        found[number] = {
            "script": str(file), "output": options["output"].replace("%N", number), "margin": float(options["margin"]),
            "identity": identity, "state": state, "submitted": time.time(), "limit": limit, "restarts": 0, "wish": "", "begin": 0.0, "follows": follows,
        }  # fmt: skip
    command = [sys.executable, "-m", "tests.support.local_queue", "keep", number]
    null = subprocess.DEVNULL
    keeper = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    change(number, keeper=keeper.pid)
    return number


def _word(key: JobKey, found: dict[str, Any] | None) -> QueuedJob:
    if found is None:
        return GONE
    if found["identity"] != key.identity:
        return QueuedJob("gone", over=True, foreign=True)
    phase, reason, outcome = MEANS[found["state"]]
    start = found.get("started")
    ends = start + found["limit"] if start and phase == "running" else None
    over, begun = phase == "ended", phase != "pending"
    return QueuedJob(phase, found["state"], reason, outcome, start=start, ends=ends, over=over, begun=begun, nodes=1)


# ---- the keeper of one job


def keep(number: str) -> None:
    """Bring a job to its end, over as many starts as that takes."""
    while True:
        with jobs() as found:
            mine = found[number]
            if mine["wish"] == "kill":
                mine["state"] = "killed"
                return
            turn = number == _next(found)
            if turn:
                mine |= {"state": "running", "started": time.time(), "wish": ""}
        if not turn:
            time.sleep(0.1)
            continue
        if (state := _once(number)) != "again":
            change(number, state=state)
            return
        restarts = job(number)["restarts"] + 1
        change(number, state="waiting", wish="", restarts=restarts, begin=time.time() + AGAIN)


def _next(found: dict[str, dict[str, Any]]) -> str | None:
    """The job whose turn it is; none while one runs."""

    def may(job: dict[str, Any]) -> bool:
        before = found.get(job["follows"])
        waits = before is not None and MEANS[before["state"]][0] != "ended"
        return job["state"] == "waiting" and not waits and time.time() >= job["begin"]

    if any(job["state"] == "running" for job in found.values()):
        return None
    return next((number for number, job in found.items() if may(job)), None)


def _once(number: str) -> str:
    """Run the job's script; the state that it ends in, or "again"."""
    mine = job(number)
    environment = os.environ | {"LOCAL_JOB": number, "LOCAL_RESTARTS": str(mine["restarts"])}
    with open(mine["output"], "a") as out:
        process = subprocess.Popen(
            ["bash", mine["script"]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    warned = None
    while process.poll() is None:
        mine = job(number)
        ends, late = mine["started"] + mine["limit"], ""
        if time.time() > ends - mine["margin"] and warned != ends:
            warned = ends
            process.send_signal(signal.SIGUSR1)
        if mine["wish"] or time.time() > ends:
            late = {"kill": "killed", "requeue": "again"}.get(mine["wish"], "late")
            os.killpg(process.pid, signal.SIGKILL)  # what the run has started elsewhere dies with it
            process.wait(60)
            return late
        time.sleep(0.1)
    wish = job(number)["wish"]
    return {"kill": "killed", "requeue": "again"}.get(wish, "broken" if process.returncode else "done")


# ---- inside a job


def allocation() -> Any:
    """The job of this process (hpcrl.launch.scheduler.Allocation)."""
    from hpcrl.errors import UsageError
    from hpcrl.launch.local import Local
    from hpcrl.plan import Host

    class Here(Local):
        """This machine, which is never lost."""

        count = 1

        def silent(self, seconds: float) -> list[str]:
            return []

    class LocalAllocation:
        scheduler = NAME
        title = LocalQueue.title
        cluster = None
        backend = Here()

        def __init__(self) -> None:
            if "LOCAL_JOB" not in os.environ:
                raise UsageError("this is no job of the queue", "submit it")
            self.job_id = os.environ["LOCAL_JOB"]
            self.restarts = int(os.environ["LOCAL_RESTARTS"])

        def nodes(self) -> list[Host]:
            return [Host(os.uname().nodename, SLOTS)]

        def ends(self) -> float | None:
            mine = job(self.job_id)
            return mine["started"] + mine["limit"]

        def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
            return {}

        def preempted(self) -> bool:
            return False

        def cancelled(self) -> bool:
            return False

        def requeue(self) -> None:
            change(self.job_id, wish="requeue")

        def leave_out(self, job_id: str, hosts: Sequence[str]) -> None:
            change(job_id, left_out=list(hosts))

        def mark(self, identity: str) -> None:
            change(self.job_id, identity=identity)

    return LocalAllocation()


def main(word: str, *words: str) -> int:
    if word == "submit":
        print(put(Path(words[0]).resolve()))
        return 0
    if word == "keep":
        keep(words[0])
        return 0
    from hpcrl.launch.batch_run import batch_main, run_in_job
    from hpcrl.launch.job import reopen_job

    if word == "start":
        return batch_main(list(words), allocation)
    try:
        run_in_job(reopen_job(Path(words[0])), allocation())
    except HpcrlError as error:
        print(f"hpcrl: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
