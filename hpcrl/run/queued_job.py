"""A job in Slurm's queue, in hpcrl's own words: what Slurm answers and what status, stop and cancel judge by.

Invariant: pure data; hpcrl/launch/slurm has put its words into plain ones.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class JobKey(msgspec.Struct, frozen=True):
    """A run's job, as it was submitted.

    Attributes:
        identity: of the run, which the job carries, since Slurm may give a number twice.
        submitted: unix time.
        history: whether it is worth asking how the job ended, if the queue has forgotten it.
    """

    job_id: str
    identity: str
    submitted: float
    history: bool = True


class QueuedJob(msgspec.Struct, frozen=True):
    """Slurm's word on a run's job.

    Attributes:
        phase: pending (waits, or is held up), running (on its nodes), ended, gone (Slurm knows no such job, or
            one of that number that is another's: then `foreign`).
        word: the state in Slurm's own word, for people.
        reason: in plain words, why it waits or how it ended.
        cause: whether that is why its processes ended, too.
        outcome: of a job that has ended, what that means for a run whose launcher could not say so itself.
        never: it waits for what does not come.
        started: some part of it has been on a node.
        over: every part has ended.
        ending: Slurm is ending what is left of it, on its nodes, for good or to queue it again.
        start, ends: unix times, expected ones too; None: not known. ends is the time limit's.
    """

    phase: Literal["pending", "running", "ended", "gone"]
    word: str = ""
    reason: str = ""
    outcome: Literal["", "failed", "cancelled", "requeued"] = ""
    never: bool = False
    started: bool = True
    over: bool = False
    ending: bool = False
    foreign: bool = False
    start: float | None = None
    ends: float | None = None
    nodes: int = 0
    cause: bool = False


GONE = QueuedJob("gone", over=True)


class QueueAnswer(msgspec.Struct):
    """What Slurm answered.

    Attributes:
        jobs: its word on each job that was asked for, empty if it could not be asked.
        note: why.
    """

    jobs: dict[JobKey, QueuedJob] = {}
    note: str = ""
