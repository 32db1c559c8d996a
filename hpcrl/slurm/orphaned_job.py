"""A process on a node that is not the launcher's: with --no-kill Slurm lets a job whose batch process is lost with its
node hold all others until the time limit.

    python -m hpcrl.slurm.orphaned_job JOB RUN --seconds S

Invariant: nothing is done unless the launcher was silent for S seconds and Slurm itself says that the job has lost the
node of its batch process; then the job is queued again as often as it may be, or else cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from pathlib import Path

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.launcher_watchdog import queue_again
from hpcrl.run.job_files import OVER, STATE, JobState
from hpcrl.run.process import set_limits
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.slurm import squeue
from hpcrl.slurm.node_events import expand
from hpcrl.toolbox.signs import LastSign
from hpcrl.untrusted_files import Damaged, read_json

LOOK = 10.0  #: seconds between two looks at state.json
AGAIN = 30.0  #: seconds between two questions to Slurm
UNKNOWN = "invalid job id"  #: what scontrol says of a job that has ended a while ago


def lost_batch_node(record: str) -> str | None:
    """The node of the batch process, if the job has lost it; None if it has not, or that is not known.

    Args:
        record: the job's, as `scontrol --oneliner show job` has it: of a het job its first component's is first.
    """
    batch, nodes = _value(record, "BatchHost"), _value(record, "NodeList")
    with contextlib.suppress(UsageError):
        return batch if runs(record) and batch and nodes and batch not in expand(nodes) else None
    return None


def runs(record: str) -> bool:
    """Whether a job's record says that it has nodes."""
    return _value(record, "JobState") in ("RUNNING", "SUSPENDED", "STOPPED")


def _value(record: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", next(iter(record.splitlines()), ""))
    return found[1] if found else ""


def watch(job_id: str, root: Path, seconds: float) -> None:
    """Return when the job was queued again, or ended, since its launcher was lost; or has ended otherwise, which
    a node that was cut off hears late."""
    heard, last, asked = LastSign(), None, LastSign(ago=AGAIN)
    while True:
        time.sleep(LOOK)
        with contextlib.suppress(OSError, Damaged):
            if (state := read_json(root / STATE, JobState)) != last:
                last = state
                heard.heard()
        if last is not None and last.phase in OVER:
            return None
        if heard.silence < seconds or not asked.due(AGAIN):
            continue
        answer = squeue.call(["scontrol", "--oneliner", "show", "job", job_id])
        if (answer.code == 0 and not runs(answer.out)) or UNKNOWN in answer.err.lower():
            return None
        node = lost_batch_node(answer.out) if answer.code == 0 else None
        if node is not None:
            return end_job(job_id, root, last.stage if last else "", f"host {node}, the launcher's, was lost")


def end_job(job_id: str, root: Path, stage: str, what: str) -> None:
    """Have the job queued again, or end it if that may not be."""
    say(what)
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(os.environ.get("HPCRL_MAX_REQUEUES", "0"))
    queued = False
    with contextlib.suppress(OSError, HpcrlError):
        rundir = RunDir.latest(root / stage)
        with contextlib.suppress(OSError, HpcrlError):
            rundir.fail("launcher", 0, what)
        queued = queue_again(rundir, what, (sys.executable, "-m", "hpcrl.slurm.requeue", job_id) if again else ())
    if not queued:
        squeue.call(["scancel", job_id])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Watches for the loss of the launcher's node; started by the launcher."
    )
    parser.add_argument("job")
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    set_limits()
    watch(args.job, args.run, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
