"""Whether other users may run on the nodes of this job, in Slurm's own words.

An engine over several hosts has vLLM's own store and message queues on the network, which admit any peer; on nodes
of this user alone there is no other user's process to be one.

Invariant: nodes count as this user's alone only where Slurm says so; an answer that cannot be had counts as no.
"""

from __future__ import annotations

import os
import re
import time

from hpcrl.errors import UsageError
from hpcrl.launch.slurm import squeue
from hpcrl.plan import Plan
from hpcrl.run.process import CommandResult
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.retry import Pauses

PATIENCE = 60.0  #: seconds that Slurm may take until it answers

#: of `scontrol show job`: nodes for this job, for this user
ALONE = re.compile(r"\b(OverSubscribe=(NO|USER)|Exclusive=(NODE|USER|TOPO))\b")
#: the same of `scontrol show partition`
ALONE_THERE = re.compile(r"\b(OverSubscribe=EXCLUSIVE|ExclusiveUser=YES)\b")


def refuse_shared_nodes(plan: Plan) -> None:
    """Raise UsageError if an engine of this plan lies on several nodes that other users may use, unless the site's
    profile allows that."""
    wide = [number for number, engine in enumerate(plan.engines) if engine.also]
    if not wide or os.environ.get("HPCRL_SHARED_NODES"):
        return
    job = os.environ.get("SLURM_JOB_ID", "")
    if (why := shared(job)) is not None:
        hosts = ", ".join(part.host for part in plan.engine_nodes(wide[0]))
        raise UsageError(
            f"engine {wide[0]} lies on {hosts}, which other users may share ({why}), and vLLM's connections between "
            "hosts do not prove who is there: another user of the network could run code in it",
            "ask for whole nodes (exclusive = true in the site's profile, or sbatch --exclusive), or set "
            "shared_nodes = true there",
        )


def shared(job: str) -> str | None:
    """Why the nodes of a job do not count as its user's alone; None if they do."""
    answer = _scontrol_show("job", job)
    if answer.code != 0:
        return f"scontrol show job {job}: {answer.last_output}"
    for line in filter(str.strip, answer.out.splitlines()):
        partition = re.search(r"\bPartition=(\S+)", line)
        if not ALONE.search(line) and not (partition and _alone_in(partition[1])):
            said = re.search(r"\bOverSubscribe=\S+", line)
            return f"Slurm says {said[0]}" if said else "Slurm does not say"
    return None


def _scontrol_show(what: str, name: str) -> CommandResult:
    """What `scontrol show` says; asked again for PATIENCE seconds, since a controller that starts hundreds of nodes is
    busy."""
    deadline = Deadline(PATIENCE)
    for pause in Pauses(1.0, 10.0):
        answer = squeue.call(["scontrol", "--oneliner", "show", what, name])
        if answer.code == 0 or deadline.left < pause:
            break
        time.sleep(pause)
    return answer


def _alone_in(partition: str) -> bool:
    answer = _scontrol_show("partition", partition)
    return answer.code == 0 and bool(ALONE_THERE.search(answer.out))
