"""What Slurm says of jobs: one `squeue` for all of them, `sacct` (where there is accounting) for those that squeue has forgotten.

Invariants: a missing, slow or failing Slurm is never an error of ours, only a note; no command takes longer than DEADLINE;
a job counts as a run's only if it carries the run's identity, since Slurm may give a number twice.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence

import msgspec

from hpcrl.report.run_status import ENDINGS, Queued

DEADLINE = 10.0
MARK = "hpcrl:"  #: what a job's comment starts with; the run's identity follows
FIELDS = ("%i", "%T", "%r", "%V", "%S", "%e", "%D", "%u", "%j", "%k")
SACCT = ("JobID", "State", "Submit", "Start", "End", "NNodes", "User", "JobName", "Comment")
CUT = "\x1f"  #: between fields: nothing that a job's name may hold
_ID = re.compile(r"(\d+)(?:\+(\d+))?\Z")

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
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "ReqNodeNotAvail": "nodes that it needs are not available now",
    "MaxRequeue": "requeued too often",
}
ORDER = ("Resources", "Priority", "None")  #: of components that wait for different things, these tell the least
#: reasons that do not pass by waiting
NEVER = {
    "PartitionNodeLimit": "more nodes than its partition has or allows",
    "PartitionTimeLimit": "a longer time limit than its partition allows",
    "PartitionConfig": "its partition does not allow such a job",
    "BadConstraints": "no node has what --constraint asks for",
    "DependencyNeverSatisfied": "the job that it waits for has ended otherwise than asked",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not be used with this account or partition",
    "ReservationDeleted": "its reservation is gone",
}


class JobRow(msgspec.Struct, frozen=True):
    """One component of a job in Slurm's tables.  start, ends: unix times or None."""

    job_id: str
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

    def belongs(self, identity: str, submitted: float) -> bool:
        """Whether it is the job of the run `identity`, whose number was noted at unix time `submitted`.

        A site may put its own text into the comment, and a script that was given to sbatch by hand has none: then name,
        user and time must do.  A job that waits again after a requeue counts as submitted then.
        """
        if self.comment.startswith(MARK):
            return bool(identity) and self.comment == MARK + identity
        ours = self.name.startswith("hpcrl") and self.user == getpass.getuser()
        return ours and (self.submitted is None or self.submitted <= submitted + 60.0 or self.state == "PENDING")


class Answer(msgspec.Struct):
    """Slurm's answer: the rows of each job id, and what could not be learned."""

    rows: dict[str, list[JobRow]] = {}
    note: str = ""
    asked: bool = False  #: whether squeue answered, so that a job that is not there is not in the queue


def there() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def ask(ids: Sequence[str]) -> Answer:
    """The jobs of `ids` that are in Slurm's memory, with one squeue."""
    ids = [i for i in ids if i.isdigit()]
    if not ids or not there():
        return Answer()
    command = ["squeue", "--noheader", "--states=all", "--jobs", ",".join(ids), "--format", CUT.join(FIELDS)]
    code, out, err = call(command)
    if code and "Invalid job id" not in err:  # what one forgotten job gives; of several, squeue leaves it out
        return Answer(note=f"squeue: {err or f'exit code {code}'}")
    return Answer(rows=_by_job(filter(None, map(_row, out.splitlines()))), asked=True)


def remembered(ids: Sequence[str]) -> dict[str, list[JobRow]]:
    """What accounting remembers of `ids`; nothing where there is none."""
    if not ids or shutil.which("sacct") is None:
        return {}
    command = ["sacct", "-X", "-n", "-P", "--delimiter", CUT, "-j", ",".join(ids), "-o", ",".join(SACCT)]
    code, out, _ = call(command)
    if code:
        return {}
    rows = []
    for line in out.splitlines():
        cells = line.split(CUT)
        if len(cells) == len(SACCT):
            job, state, submit, start, end, nodes, user, name, comment = cells
            rows.append(_row(CUT.join((job, state, "", submit, start, end, nodes, user, name, comment))))
    return _by_job(filter(None, rows))


def queued(rows: Iterable[JobRow]) -> Queued | None:
    """The components of one job as one word, or None if there are none.

    The leader's state counts, unless a component has ended while the leader has not; the reason is the worst of all.
    """
    parts = sorted(rows, key=lambda row: row.part)
    if not parts:
        return None
    lead = parts[0]
    if lead.state in ENDINGS and lead.state in ("COMPLETED", "CANCELLED"):
        lead = next((row for row in parts if row.state in ENDINGS and row.state not in ("COMPLETED", "CANCELLED")), lead)
    reason, never = worst([row.reason for row in parts]) if lead.state == "PENDING" else ("", False)
    if lead.state == "PENDING" and lead.start and lead.reason not in NEVER:
        reason += f"; start expected {_clock(lead.start)}"
    if lead.state in ("SUSPENDED", "STOPPED"):
        reason = "suspended by Slurm"
    return Queued(lead.state, reason, never, lead.start, lead.ends, sum(row.nodes for row in parts))


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


def call(command: Sequence[str]) -> tuple[int, str, str]:
    """(exit code, output, last line of the errors) of one of Slurm's commands; it gets DEADLINE seconds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    env |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {DEADLINE:.0f} s"
    except OSError as error:
        return 127, "", error.strerror or "cannot be started"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    last = said[-1].removeprefix(f"{command[0]}: ") if said else ""
    return done.returncode, done.stdout.decode(errors="replace"), last


def _row(line: str) -> JobRow | None:
    cells = line.split(CUT)
    match = _ID.match(cells[0].strip())
    if len(cells) != len(FIELDS) or not match:
        return None
    _, state, reason, submitted, start, ends, nodes, user, name, comment = (cell.strip() for cell in cells)
    state = state.split(" ")[0].rstrip("+")  # `CANCELLED by 1000`
    number = int(nodes) if nodes.isdigit() else 0
    comment = "" if comment == "(null)" else comment
    times = map(_time, (submitted, start, ends))
    return JobRow(match[1], int(match[2] or 0), state, reason, *times, number, user, name, comment)


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() and int(text) > 0 else None


def _clock(at: float) -> str:
    return time.strftime("%a %H:%M", time.localtime(at))


def _by_job(rows: Iterable[JobRow]) -> dict[str, list[JobRow]]:
    found: dict[str, list[JobRow]] = {}
    for row in rows:
        found.setdefault(row.job_id, []).append(row)
    return found
