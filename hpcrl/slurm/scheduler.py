"""Slurm as a scheduler of hpcrl's (hpcrl.launch.scheduler.Scheduler).

Invariant: light to import; what submits is loaded when something is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import HpcrlError
from hpcrl.findings import Finding
from hpcrl.run.queued_job import JobKey, QueueAnswer
from hpcrl.slurm import node_events, squeue

if TYPE_CHECKING:
    from hpcrl.launch.scheduler import AllocationRequest, BatchScript, ScriptVerdict, Submission
    from hpcrl.slurm.site import SlurmSite


class Slurm:
    """A Slurm cluster, from a login node."""

    title = "Slurm"
    submit_command, test_command = "sbatch", "sbatch --test-only"
    script_file = "job.sbatch"
    echoes = squeue.ECHOES

    def profile(self) -> type[SlurmSite]:
        from hpcrl.slurm.site import SlurmSite

        return SlurmSite

    # ---- the queue

    def here(self) -> bool:
        return squeue.there()

    def look(self, jobs: Sequence[JobKey]) -> QueueAnswer:
        return node_events.named(squeue.look(jobs))

    def cancel(self, job_id: str) -> None:
        if not squeue.is_number(job_id):
            raise HpcrlError(f"{job_id} is no number of a Slurm job", "see squeue --me")
        answer = squeue.call(["scancel", job_id])
        if answer.code:
            raise HpcrlError(f"scancel {job_id}: {answer.said}", "see squeue")

    # ---- one node

    def on_one_node(
        self, site: SlurmSite, arguments: Sequence[str], seconds: float, cpus: int | None = None
    ) -> list[str]:
        """The command that runs hpcrl with `arguments` on one node, for at most `seconds`, and shows what it says."""
        from hpcrl.slurm.one_node import on_one_node

        return on_one_node(site, arguments, seconds, cpus)

    # ---- before a job

    def responds(self) -> Iterator[Finding]:
        from hpcrl.slurm.partitions import responds

        return responds()

    def fits(self, request: AllocationRequest, site: SlurmSite) -> Iterator[Finding]:
        from hpcrl.slurm.partitions import fits, queued_again

        yield from fits(site, request.components)
        yield from queued_again(request)

    def test(self, script: str) -> ScriptVerdict:
        from hpcrl.slurm.submit import SECONDS, test_only

        return test_only(script, SECONDS)

    # ---- scripts and submission

    def render(self, script: BatchScript, request: AllocationRequest, site: SlurmSite) -> str:
        from hpcrl.slurm.submit import render

        return render(script, request, site)

    def script(self, submission: Submission) -> str:
        from hpcrl.slurm.submit import preview_script

        return preview_script(submission)

    def script_by_hand(self, submission: Submission, words: Sequence[str]) -> str:
        from hpcrl.slurm.submit import script_by_hand

        return script_by_hand(submission, words)

    def submit(self, submission: Submission) -> Any:
        from hpcrl.slurm.submit import send

        return send(submission)

    def submit_script(self, file: Path) -> str:
        from hpcrl.slurm.submit import send_script

        return send_script(file)
