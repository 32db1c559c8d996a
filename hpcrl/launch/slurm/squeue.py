"""What Slurm says of jobs: one `squeue` for all of them, `sacct` (where there is accounting) for those that squeue has
forgotten.

Invariants: a missing, slow or failing Slurm is never an error of ours, only a note; no command takes longer than
DEADLINE; a job counts as a run's only if it carries the run's identity, since Slurm may give a number twice.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence

import msgspec

from hpcrl.run.process import CommandResult, run_command
from hpcrl.run.queued_job import GONE, JobKey, QueueAnswer, QueuedJob

DEADLINE = 10.0
#: what a job's comment starts with; the run's identity follows, and after a space what its launcher could say nowhere
#: else
MARK = "hpcrl:"
NAME = "-hpcrl"  #: what a job's name ends with
FIELDS = ("%i", "%A", "%T", "%r", "%V", "%S", "%e", "%D", "%u", "%j", "%k")
SACCT = ("JobID", "JobIDRaw", "State", "Submit", "Start", "End", "NNodes", "User", "JobName", "Comment")
#: how lines begin in which Slurm's programs only repeat that a task has failed
ECHOES = ("srun:", "slurmstepd:")
#: what Slurm says of a job that it will not queue again, an interactive one among them; whatever else it says may be
#: otherwise in a minute
REFUSED = ("disabled", "denied", "not permitted", "invalid job id", "not supported", "batch jobs")
CUT = "\x1f"  #: between fields: nothing that a job's name may hold
#: a job, a component of one (its leader's number + 1), or a task of an array, which has its own number besides
_ID = re.compile(r"(\d+)(?:\+(\d+)|(_\d+))?\Z")
#: what may be asked for: a job, or a task of an array
_ASKED = re.compile(r"\d+(_\d+)?\Z")

#: states in which a job is not at work, and may be again
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
#: how a job may have ended without its launcher saying so -> (phase, in plain words)
ENDINGS = {
    "CANCELLED": ("cancelled", "cancelled"),
    "TIMEOUT": ("failed", "ended by Slurm at its time limit; raise it, or let it be requeued"),
    "OUT_OF_MEMORY": ("failed", "out of memory, ended by Slurm; request more memory per node"),
    "NODE_FAIL": ("failed", "one of its nodes failed"),
    "BOOT_FAIL": ("failed", "one of its nodes did not boot"),
    "DEADLINE": ("failed", "ended by Slurm at its deadline"),
    "PREEMPTED": ("requeued", "ended by Slurm for a job of higher priority"),
    "FAILED": ("failed", "the job's script ended with an error; see the job's log"),
    "COMPLETED": ("failed", "the job's script ended, and the run did not say that it was done; see the job's log"),
}
OWN = ("FAILED", "COMPLETED")  #: those of them whose cause the script alone knows
#: Slurm's reason -> plain words
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "waits for free nodes",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job",
    "BeginTime": "may not begin yet",
    "Cleaning": "waits until its last start is cleaned up",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "JobHeldUser": "held; release it with scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held: requeued too often; release it with scontrol release",
    "JobLaunchFailure": "held: its last start failed; release it with scontrol release",
    "launch_failed_requeued_held": "held: its last start failed; release it with scontrol release",
    "job_requeued_in_held_state": "held: its batch process was killed; release it with scontrol release",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "ReqNodeNotAvail": "nodes that it needs are not available now",
    "MaxRequeue": "requeued too often",
    "JobArrayTaskLimit": "waits for other tasks of its array, which limits how many run together",
}
ORDER = ("Resources", "Priority", "None")  #: of components that wait for different things, these tell the least
#: reasons that do not pass by waiting
NEVER = {
    "PartitionNodeLimit": "more nodes than its partition has or allows",
    "PartitionTimeLimit": "a longer time limit than its partition allows",
    "PartitionConfig": "its partition does not allow such a job",
    "BadConstraints": "no node has what --constraint asks for",
    "DependencyNeverSatisfied": "the job that it depends on did not end as required",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not be used with this account or partition",
    "ReservationDeleted": "its reservation is gone",
}


class JobRow(msgspec.Struct, frozen=True):
    """One component of a job in Slurm's tables.

    Attributes:
        job_id: of a task of an array ARRAY_TASK.
        raw: the number of the task as a job, which it has once it was started: before, it is that of the array.
        start, ends: unix times or None.
    """

    job_id: str
    raw: str
    part: int
    state: str
    reason: str
    submitted: float | None
    start: float | None
    ends: float | None
    nodes: int
    user: str
    name: str
    comment: str

    def belongs(self, job: JobKey) -> bool:
        """Whether it is that job, whose number was noted at unix time `job.submitted`.

        A site may put its own text into the comment, and a script that the user gave to sbatch has none: then name,
        user and time must do.  A job that waits again after a requeue counts as submitted then.
        """
        if self.comment.startswith(MARK):
            carried = self.comment.partition(" ")[0].removeprefix(MARK)
            return bool(carried) and carried == job.identity
        ours = self.name.endswith(NAME) and self.user == getpass.getuser()
        return ours and (self.submitted is None or self.submitted <= job.submitted + 60.0 or self.state == "PENDING")

    @property
    def launcher_comment(self) -> str:
        """The launcher's last word, where it could not write it into the run directory."""
        return self.comment.partition(" ")[2] if self.comment.startswith(MARK) else ""


class QueueRows(msgspec.Struct):
    """squeue's answer: the rows of each job id, and what could not be learned."""

    found: dict[str, list[JobRow]] = {}
    note: str = ""
    complete: bool = False  #: whether squeue answered, so that a job that is not there is not in the queue


def there() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def query_jobs(jobs: Sequence[JobKey]) -> QueueAnswer:
    """Slurm's word on jobs: one squeue for all, and one sacct for those that it has forgotten and that are worth it."""
    rows = query_squeue(list(dict.fromkeys(job.job_id for job in jobs)))
    if not rows.complete:
        return QueueAnswer(note=rows.note)
    forgotten = [job.job_id for job in jobs if job.history and job.job_id not in rows.found]
    found = rows.found | remembered(forgotten)
    return QueueAnswer({job: word(job, found.get(job.job_id, [])) for job in jobs})


def is_number(job_id: str) -> bool:
    """Whether this is what Slurm calls a job, or a task of an array; nothing else becomes a word of its commands."""
    return job_id.isascii() and _ASKED.fullmatch(job_id) is not None


def query_squeue(ids: Sequence[str]) -> QueueRows:
    """The jobs of `ids` that are in Slurm's memory, with one squeue."""
    ids = [i for i in ids if is_number(i)]
    if not ids or not there():
        return QueueRows()
    words = ["squeue", "--noheader", "--array", "--states=all"]  # --array: tasks that wait are one row otherwise
    answer = call([*words, "--jobs", ",".join(ids), "--format", CUT.join(FIELDS)])
    if (
        answer.code and "Invalid job id" not in answer.err
    ):  # what one forgotten job gives; of several, squeue leaves it out
        return QueueRows(note=f"squeue: {answer.last_output}")
    return QueueRows(found=_by_job(filter(None, map(_row, answer.out.splitlines())), ids), complete=True)


def remembered(ids: Sequence[str]) -> dict[str, list[JobRow]]:
    """What accounting remembers of `ids`; nothing where there is none."""
    ids = [i for i in ids if is_number(i)]
    if not ids or shutil.which("sacct") is None:
        return {}
    answer = call(["sacct", "-X", "-n", "-P", "--delimiter", CUT, "-j", ",".join(ids), "-o", ",".join(SACCT)])
    if answer.code:
        return {}
    rows = []
    for line in answer.out.splitlines():
        cells = line.split(CUT)
        if len(cells) == len(SACCT):
            job, raw, state, submit, start, end, nodes, user, name, comment = cells
            rows.append(_row(CUT.join((job, raw, state, "", submit, start, end, nodes, user, name, comment))))
    return _by_job(filter(None, rows), ids)


def word(job: JobKey, rows: Sequence[JobRow]) -> QueuedJob:
    """The rows of a number as one word on the job that was submitted under it."""
    if not all(row.belongs(job) for row in rows):
        return msgspec.structs.replace(GONE, foreign=True)
    return together(rows) or GONE


def together(rows: Iterable[JobRow]) -> QueuedJob | None:
    """The components of one job as one word, or None if there are none.

    The leader's state counts, unless a component has ended while the leader has not; the reason is the worst of all.
    """
    parts = sorted(rows, key=lambda row: row.part)
    if not parts:
        return None
    lead = parts[0]
    if lead.state in ("COMPLETED", "CANCELLED"):
        lead = next(
            (row for row in parts if row.state in ENDINGS and row.state not in ("COMPLETED", "CANCELLED")), lead
        )
    outcome, reason = ENDINGS.get(lead.state, ("", ""))
    if lead.state == "FAILED":
        reason = next((row.launcher_comment for row in parts if row.launcher_comment), reason)
    never = False
    if lead.state == "PENDING":
        reason, never = worst([row.reason for row in parts])
        if lead.start and lead.reason not in NEVER:
            reason += f"; start expected {time.strftime('%a %H:%M', time.localtime(lead.start))}"
    if lead.state in ("SUSPENDED", "STOPPED"):
        reason = "suspended by Slurm"
    return QueuedJob(
        phase="pending" if lead.state in WAITING else "ended" if outcome else "running",
        word=lead.state,
        reason=reason,
        cause=lead.state in ENDINGS and lead.state not in OWN,
        outcome=outcome,
        never=never,
        started=any(row.state != "PENDING" for row in parts),
        over=all(row.state in ENDINGS for row in parts),
        ending=lead.state == "COMPLETING",
        start=lead.start,
        ends=lead.ends,
        nodes=sum(row.nodes for row in parts),
    )


def worst(reasons: Sequence[str]) -> tuple[str, bool]:
    """(plain words, whether the job will never start) of the components' reasons, at least one."""
    keys = [re.split(r"[,(\s]", reason.strip("()"), maxsplit=1)[0] for reason in reasons]
    for key, reason in zip(keys, reasons, strict=True):
        if key in NEVER:
            return f"{NEVER[key]} ({reason})", True

    number = min(range(len(keys)), key=lambda i: ORDER.index(keys[i]) if keys[i] in ORDER else -1)
    return f"{explain(keys[number])} ({reasons[number]})", False


def explain(key: str) -> str:
    """One of Slurm's reasons in plain words."""
    if key in REASONS:
        return REASONS[key]
    if key.startswith("QOS"):
        return "a limit of its QOS is reached"
    if key.startswith(("Assoc", "MaxJobs")) or "Grp" in key:
        return "a limit of its account is reached"
    return "waits"


# ---- talking to Slurm


def call(words: Sequence[str]) -> CommandResult:
    """The answer of one of Slurm's commands within DEADLINE seconds, times in it in Unix seconds, whatever the user has
    set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    plain = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C.UTF-8"}  # 0: all tasks of a row
    return run_command(words, DEADLINE, env=env | plain)


def _row(line: str) -> JobRow | None:
    cells = line.split(CUT)
    match = _ID.match(cells[0].strip())
    if len(cells) != len(FIELDS) or not match:
        return None
    _, raw, state, reason, submitted, start, ends, nodes, user, name, comment = (cell.strip() for cell in cells)
    state = state.split(" ")[0].rstrip("+")  # `CANCELLED by 1000`
    number = int(nodes) if nodes.isdigit() else 0
    comment = "" if comment == "(null)" else comment
    times = map(_time, (submitted, start, ends))
    job = match[1] + (match[3] or "")
    return JobRow(job, raw, int(match[2] or 0), state, reason, *times, number, user, name, comment)


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() and int(text) > 0 else None


def _by_job(rows: Iterable[JobRow], ids: Sequence[str]) -> dict[str, list[JobRow]]:
    """The rows of each of `ids` that has any; a task of an array may be asked for by either of its numbers."""
    found: dict[str, list[JobRow]] = {}
    for row in rows:
        array, task, _ = row.job_id.partition("_")
        begun = row.state != "PENDING" or row.raw != array  # only then the second number is its own
        own = {row.job_id, row.raw} if task and begun else {row.job_id}
        for job in own.intersection(ids):
            found.setdefault(job, []).append(row)
    return found
