"""JOB/job.json: which job of which scheduler a run directory belongs to, for whoever looks at it or goes on with it.

Invariant: whoever started the run last has written it; what a later start needs (the site) is in it whole.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import write_atomic

JOB = "job.json"  #: its name in a run directory
#: what starts a run without a queue before it: no scheduler has a job of it
UNQUEUED = ("local", "mpirun")


class JobFile(msgspec.Struct, frozen=True):
    """What it holds.  scheduler: "local" where none has the run; job_id: the scheduler's number (of a heterogeneous job
    the leader's); chain: the numbers of all jobs of a chain, this one among them; submitted: unix time; identity: the
    run's; script: the batch script; site: the profile it was submitted with."""

    scheduler: str = "local"
    job_id: str | None = None
    cluster: str | None = None
    submit_host: str = ""
    submitted: float = 0.0
    identity: str = ""
    script: str | None = None
    components: list[dict[str, Any]] = []
    site: dict[str, Any] | None = None
    chain: list[str] = []

    @property
    def queued(self) -> bool:
        """Whether a scheduler has the job."""
        return self.scheduler not in UNQUEUED


def write_job(root: Path, identity: str, scheduler: str, job_id: str | None, **more: Any) -> None:
    """Write job.json.  scheduler: its name, or one of UNQUEUED; `more`: cluster, script, components, site as far as
    they are known, and chain; a site that was known is kept."""
    known = {"site": read_job(root).site, **more}
    replace_job(
        root,
        JobFile(scheduler, job_id, submit_host=socket.gethostname(), submitted=time.time(), identity=identity, **known),
    )


def replace_job(root: Path, job: JobFile) -> None:
    """Write all of job.json."""
    write_atomic(root / JOB, msgspec.json.encode(job))


def read_job(root: Path) -> JobFile:
    """job.json of a run directory; that of a local run where no scheduler knows it.  HpcrlError names a damaged
    file."""
    try:
        return read_json(root / JOB, JobFile)
    except FileNotFoundError:
        return JobFile()
    except (OSError, Damaged) as error:
        raise HpcrlError(
            f"{root / JOB} is damaged: {error}", "remove it, and give the run's script to the scheduler again"
        ) from error
