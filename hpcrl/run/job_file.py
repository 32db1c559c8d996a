"""JOB/job.json: which job of which scheduler a run directory belongs to, for whoever looks at it or goes on with it.

Invariant: whoever started the run last has written it; what a later start needs (the site) is in it whole.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.run.rundir import write_atomic

#: what starts a run without a queue before it: no scheduler has a job of it
UNQUEUED = ("local", "mpirun")


def write_job(root: Path, identity: str, scheduler: str, job_id: str | None, **more: Any) -> None:
    """Write job.json.  scheduler: its name, or one of UNQUEUED; `more`: cluster, script, components, site, as far as known."""
    record = {
        "scheduler": scheduler,
        "job_id": job_id,
        "cluster": None,
        "submit_host": socket.gethostname(),
        "submitted": time.time(),
        "identity": identity,
        "script": None,
        "components": [],
    }
    write_atomic(root / "job.json", msgspec.json.encode(read_job(root) | record | more))


def read_job(root: Path) -> dict[str, Any]:
    """job.json of a run directory; empty for a run that no scheduler knows."""
    try:
        return msgspec.json.decode((root / "job.json").read_bytes(), type=dict)
    except FileNotFoundError:
        return {}
