"""`hpcrl status` asked again and again while a test interferes with a run, each answer held against what Slurm says.

    with StatusWatch(job) as watch:
        ...                      # requeue, preempt, cut the power
    watch.check()

An answer counts where Slurm says the same of the job before and after it.  Invariant: what is compared with is Slurm's
own word and the run's files, never hpcrl's.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.support.slurm import Job, hpcrl

EVERY = 2.0  #: seconds between two questions
WORKING = {"preparing", "starting", "running", "saving"}
#: Slurm's state -> the phases that are true then.  A job that is queued again by its own run has said so before Slurm
#: ends it, and Slurm's word for its last moments is COMPLETING
TRUE = {
    "PENDING": {"pending"},
    "RUNNING": WORKING | {"requeued", "finished"},
    "COMPLETING": {"requeued", "pending", "saving", "ending", "finished"},
    "COMPLETED": {"finished"},
    # slurmctld is down, as it is nowhere in these tests but in the middle of a run
    "SILENT": WORKING,
}
SLACK = 2.0  #: seconds by which the time that is left may differ from that of any moment of the question


@dataclass(frozen=True)
class Answer:
    """What Slurm said before and after, and what `hpcrl status --json` said, between two unix times."""

    time: float
    after: float
    slurm: str
    ends: float | None
    said: dict[str, Any]

    def wrong(self) -> str:
        """What is not true of it; "" if all is."""
        phase = self.said["phase"]
        if self.slurm in TRUE and phase not in TRUE[self.slurm]:
            return f"{phase} ({self.said['message']}) while Slurm says {self.slurm}"
        left = self.said["left"]
        if self.slurm != "RUNNING" or left is None or self.ends is None:
            return ""
        least, most = self.ends - self.after, self.ends - self.time
        good = least - SLACK <= left <= most + SLACK
        return "" if good else f"{left:.0f} s left, and Slurm ends the job in {least:.0f} to {most:.0f} s"


class StatusWatch:
    """The answers, from a thread of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answers: list[Answer] = []
        self.unclear = 0  #: answers during which Slurm's own word changed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(120)

    def phases(self) -> list[tuple[str, str]]:
        """(Slurm's state, our phase), each time that either changed."""
        pairs = [(answer.slurm, answer.said["phase"]) for answer in self.answers]
        return [pair for before, pair in zip([None, *pairs], pairs, strict=False) if pair != before]

    def waits(self) -> list[int]:
        """Seconds from each time that the job was back in the queue until the run was said to train again, by answers
        that are some seconds apart."""
        found, since = [], 0.0
        for answer in self.answers:
            if answer.slurm == "PENDING" and not since:
                since = answer.time
            elif answer.said["phase"] == "running" and since:
                found.append(round(answer.time - since))
                since = 0.0
        return found

    def check(self) -> None:
        """AssertionError with every answer that was not true."""
        wrong = [f"{answer.time:.0f}: {what}" for answer in self.answers if (what := answer.wrong())]
        assert not wrong, "\n".join([*wrong, str(self.phases())])
        assert len(self.answers) > self.unclear, f"only {len(self.answers)} answers counted"

    def _ask(self) -> None:
        while not self._over.wait(EVERY):
            before = self._slurm()
            asked = time.time()
            done = hpcrl(self.job.cluster, "status", self.job.root, "--json", check=False)
            answered = time.time()
            if self._slurm() != before:
                self.unclear += 1
                continue
            assert done.returncode == 0, done.stderr
            self.answers.append(Answer(asked, answered, *before, json.loads(done.stdout)))

    def _slurm(self) -> tuple[str, float | None]:
        """(state, when it ends as a unix time) of the job; SILENT where slurmctld does not answer."""
        words = ["squeue", "-h", "-t", "all", "-o", "%T %e", "-j", str(self.job.number)]
        done = self.job.cluster.run(words, check=False)
        found = {tuple(line.split()) for line in done.stdout.splitlines()}
        if done.returncode:
            return "SILENT", None
        if len({state for state, _ in found}) != 1:
            return f"SEVERAL {time.time()}", None  # its components: one after the other
        state, ends = max(found)
        return state, None if not ends[0].isdigit() else datetime.datetime.fromisoformat(ends).timestamp()
