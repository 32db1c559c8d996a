"""The processes of a host: which it has, how each starts, and how its end is reported.

Invariants: what runs on a host follows from the plan alone; every role has a session of its own, and an environment in
which nothing of the launcher's own rank is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpcrl.config.options import Options
from hpcrl.plan import NO_GPUS, Plan, visible_devices
from hpcrl.report.file_tail import last_lines
from hpcrl.run.exit_status import MemoryWatch, hardware_words, how_it_ended, out_of_memory
from hpcrl.run.gpu_environment import gpus_are_here, without_gpus
from hpcrl.run.process import PARENT, end_processes
from hpcrl.run.role import last_error
from hpcrl.run.rundir import RunDir
from hpcrl.utils.untrusted_files import open_append

#: begins the role's name of what an engine over several hosts has on the others: engine-INDEX-node-NODE
PART = "engine-"
SANDBOX = "sandbox"  #: the role of a host's sandboxes
GRACE = 7.5  #: seconds between SIGTERM and SIGKILL


@dataclass
class Role:
    """One started role.

    Attributes:
        memory: what the kernel had killed before it was.
    """

    name: str
    index: int
    process: subprocess.Popen[bytes]
    log: Path
    memory: MemoryWatch = field(default_factory=MemoryWatch)

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        """End it; what it has started ends with it."""
        if self.status is None:
            end_processes([psutil.Process(self.process.pid)], GRACE)

    @property
    def engine(self) -> int | None:
        """The engine that it is, or is a part of; None if it is another role."""
        if self.name == "engine":
            return self.index
        return int(self.name.split("-")[1]) if self.name.startswith(PART) else None

    @property
    def serves(self) -> bool:
        """Whether it is an engine, a part of one, or a node's sandboxes, which run until a signal ends them."""
        return self.engine is not None or self.name == SANDBOX

    def exit_report(self) -> str:
        """How it ended, for a user, with what its log says of hardware, or its own last words where it ended by
        itself."""
        log = last_lines(self.log, 200) if self.log.exists() else []
        text = b"\n".join(log).decode(errors="replace")
        said = hardware_words(text) or (self.process.returncode > 0 and last_error(log)) or out_of_memory(text)
        also = f"; it says: {said}" if said else ""
        how = how_it_ended(self.process.returncode, self.memory)
        return f"{self.name}-{self.index} {how}{also}; its log is {self.log}"


# ---- what runs on a host


def commands(
    options: Options, plan: Plan, rundir: RunDir, host: str, slot: int | None = None
) -> list[tuple[str, int, list[str]]]:
    """(role, index, command) of every process of `host`; with `slot`, of those that begin on this slot."""
    base = [str(rundir.root), "--attempt", str(rundir.attempt)]
    python = [sys.executable, "-m"]
    found = []
    for index, place in enumerate(plan.engines):
        if place.host == host and slot in (None, place.slots[0]):
            found.append(("engine", index, [*python, "hpcrl.engine.main", *base, "--index", str(index)]))
        for node, part in enumerate(place.also, 1):
            if part.host == host and slot in (None, part.slots[0]):
                more = ["--index", str(index), "--node", str(node)]
                found.append((f"{PART}{index}-node", node, [*python, "hpcrl.engine.follower", *base, *more]))
    engines = [part for index in range(len(plan.engines)) for part in plan.engine_nodes(index)]
    used = [number for place in (*plan.trainers, *engines) if place.host == host for number in place.slots]
    first = slot in (None, min(used, default=0))  # 0 where only the rollout process is
    for index, place in enumerate(plan.sandboxes):
        if place.host == host and first:
            found.append((SANDBOX, index, [*python, "hpcrl.sandbox.nodes.main", *base, "--index", str(index)]))
    if plan.rollout.host == host and first:
        found.append(("rollout", 0, [*python, "hpcrl.rollout.main", *base]))
    ranks = plan.ranks_on(host)
    if options.debug_rollout_only:
        ranks = ()
        if plan.rollout.host == host and first:
            found.append(("trainer", 0, [*python, "hpcrl.trainer.rollout_driver", *base]))
    # one rank needs no agent, and a task for each slot starts its own
    agent = slot is None and options.world_size > 1
    if ranks and agent:
        number = plan.trainer_hosts.index(host)
        found.append(("trainer", ranks[0], [*python, "hpcrl.trainer.start.torchrun", *base, "--index", str(number)]))
    if not agent:
        mine = [rank for rank in ranks if slot in (None, plan.trainers[rank].slots[0])]
        found += [
            ("trainer", rank, [*python, "hpcrl.trainer.start.single_rank", *base, "--index", str(rank)])
            for rank in mine
        ]
    return found


def devices(plan: Plan, role: str, index: int, host: str, slot: int | None, inherited: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a role, as `visible_devices`; nothing where there are no GPUs, or the role needs none;
    empty where the user wants CPUs.

    Args:
        inherited: the variable as this process has it. A value of NO_GPUS means that the run is on CPUs.
            Trainer ranks of a host see all of its trainer's GPUs, as torchrun has it, unless each is bound to its own.
    """
    if (
        role in ("rollout", SANDBOX)
        or (role == "trainer" and not plan.trainers[index].slots)
        or inherited in NO_GPUS
        or (inherited is None and not gpus_are_here())
    ):
        return without_gpus()
    if role == "engine":
        together = [place := plan.engines[index]]
    elif role.startswith(PART):
        together = [place := plan.engines[int(role.split("-")[1])].also[index - 1]]
    else:
        place = plan.trainers[index]
        together = [plan.trainers[rank] for rank in plan.ranks_on(host)]
    slots = tuple(number for one in together for number in one.slots)
    own = None if slot is None else place.slots
    visible = visible_devices(inherited, slots, plan.slots_on(host), own)
    return {"CUDA_VISIBLE_DEVICES": visible} | without_gpus()


def start(role: str, index: int, command: list[str], rundir: RunDir, host: str, variables: Mapping[str, str]) -> Role:
    """Start one role in a separate session, its output going to its log, under a heading.

    Args:
        variables: in addition to those of every role.
    """
    log, memory = rundir.logs / f"{role}-{index}.log", MemoryWatch()
    with open_append(log) as out:
        out.write(heading(rundir.attempt, host))
        out.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**role_environment(), **variables},
        )
    return Role(role, index, process, log, memory)


def heading(attempt: int, host: str) -> bytes:
    """The line that says which attempt writes a log from there on, and on which host."""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    return f"hpcrl: attempt {attempt} on {host}, {when}\n".encode()


def role_environment() -> dict[str, str]:
    """The user's environment, less what would change a role's behaviour by accident."""
    drop = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {
        PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": kept.get("HF_HUB_OFFLINE", "1"),
    }
