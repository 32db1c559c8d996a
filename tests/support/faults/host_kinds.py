"""Faults of runs over several hosts: of their hosts, networks and launchers, and what their administrators do.

Invariant: whatever was done to a host is undone before the next fault.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tests.support.faults.beds import Bed, Missed
from tests.support.faults.hosts import HostsBed, MpirunBed, SlurmBed
from tests.support.faults.kinds import (
    LONG,
    WHO,
    Kind,
    Struck,
    kill,
    kill_two,
    name_of,
    role_kills,
    send,
    sleep,
    stop_command,
    victim,
)

BATCH = "submitit.core._submit"  #: the launcher in a job


def host_of(bed: Bed, chance: random.Random) -> str:
    assert isinstance(bed, HostsBed)
    if not (hosts := bed.hosts_at_work()):
        raise Missed("no host is at work")
    return chance.choice(hosts)


def power_cut(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, HostsBed)
    host = host_of(bed, chance)
    bed.cluster.kill_node(host, told=isinstance(bed, SlurmBed) and chance.random() < 0.5)

    def heal() -> None:
        bed.cluster.boot_node(host)
        if isinstance(bed, SlurmBed):
            bed.cluster.run(["scontrol", "update", f"nodename={host}", "state=resume"], check=False)

    return Struck(host, heal, host)


def link_cut(seconds: float | None) -> Callable[[Bed, random.Random], Struck]:
    """The network cable of a host, for some seconds or for ever."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        assert isinstance(bed, HostsBed)
        host = host_of(bed, chance)
        bed.cluster.link(host, "down")
        if seconds is not None:
            time.sleep(seconds)
            bed.cluster.link(host, "up")
            return Struck(host)

        def heal() -> None:
            bed.cluster.link(host, "up")
            bed.cluster.restart_slurmd(host)

        return Struck(host, heal, host)

    return strike


def slurmd_again(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, SlurmBed)
    host = host_of(bed, chance)
    bed.cluster.kill_slurmd(host)
    time.sleep(chance.uniform(0, 4))
    bed.cluster.start_slurmd(host)
    return Struck(host)


def suspended(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, SlurmBed)
    if bed.cluster.run(["scontrol", "suspend", str(bed.job)], check=False).returncode:
        raise Missed("not running")
    time.sleep(3)
    bed.cluster.run(["scontrol", "resume", str(bed.job)])
    return Struck(f"job {bed.job}")


def told(*words: str) -> Callable[[Bed, random.Random], Struck]:
    """A command of Slurm's with the job's number at its end."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        assert isinstance(bed, SlurmBed)
        if bed.cluster.run([*words, str(bed.job)], check=False).returncode:
            raise Missed(" ".join(words))
        return Struck(f"job {bed.job}")

    return strike


def common() -> list[Kind]:
    kinds = role_kills()
    kinds += [
        Kind(f"SIGSTOP of {who} for 3 s", sleep(word, 3.0), ends=False, weight=0.5) for who, (word, _) in WHO.items()
    ]
    kinds += [
        Kind(
            f"SIGSTOP of {who} for ever",
            sleep(word, None),
            says=r"sign of life|did not answer",
            seconds=LONG,
            weight=0.15,
            early=False,
        )
        for who, (word, _) in WHO.items()
    ]
    return [
        *kinds,
        Kind("SIGKILL of two", kill_two),
        Kind("link cut for 3 s", link_cut(3.0), ends=False, weight=1.5),
        Kind("hpcrl stop", stop_command, says="stopped", weight=0.5, orderly=True),
    ]


def strike_part(number: signal.Signals) -> Callable[[Bed, random.Random], Struck]:
    """A signal to the vLLM server of one part of an engine over several hosts."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        process = victim(bed, chance, "hpcrl.engine.server")
        send(number, process)
        return Struck(name_of(process))

    return strike


def part_kinds() -> list[Kind]:
    """Faults of an engine over several hosts, which ends with any part of it, and the attempt with it."""
    return [
        Kind("SIGKILL of a part of an engine", strike_part(signal.SIGKILL), says="engine", weight=2, early=False),
        Kind("SIGSTOP of a part of an engine", strike_part(signal.SIGSTOP), says="engine", seconds=LONG, early=False),
        *(kind for kind in common() if kind.engines_live and "torchrun" not in kind.name),
    ]


def slurm_kinds() -> list[Kind]:
    """Faults of a job of Slurm's."""
    return [
        *common(),
        # not while the run starts: then it may be the probe's, which a run survives
        Kind("SIGKILL of srun", kill("srun"), says=r"srun on", early=False),
        Kind("SIGKILL of srun's child", kill("srun", forked=True), ends=False, weight=0.5, early=False),
        Kind("SIGKILL of the launcher", kill(BATCH)),
        Kind("SIGSTOP of the launcher for 3 s", sleep(BATCH, 3.0), ends=False, weight=0.5),
        Kind("power cut", power_cut, seconds=LONG, weight=1.5, early=False),
        Kind("link cut for ever", link_cut(None), seconds=LONG, early=False),
        Kind("slurmd killed and started again", slurmd_again, ends=False),
        Kind("scontrol suspend, and resume", suspended, ends=False),
        Kind("scontrol requeue", told("scontrol", "requeue"), seconds=LONG),
        Kind("scancel", told("scancel")),
        Kind("scancel --signal=TERM --full", told("scancel", "--signal=TERM", "--full"), says="stopped|was ended"),
    ]


def mpirun_kinds() -> list[Kind]:
    """Faults of a run under mpirun."""
    return [
        *common(),
        Kind("SIGKILL of hpcrl launch", kill_caller),
        Kind("SIGTERM to hpcrl launch", stop_caller, says="stopped"),
        Kind("SIGKILL of rank 0", kill_rank),
        Kind("power cut", power_cut, seconds=LONG, says=r"node\d", early=False),
        Kind("link cut for ever", link_cut(None), seconds=LONG, says=r"node\d", weight=0.5, early=False),
    ]


def kill_caller(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, MpirunBed) and bed.process is not None
    bed.process.kill()
    return Struck("hpcrl launch")


def stop_caller(bed: Bed, chance: random.Random) -> Struck:
    found = [process for process in bed.find("launch") if process.host == "head" and "hpcrl" in process.argv]
    if not found:
        raise Missed("hpcrl launch")
    send(signal.SIGTERM, found[0])
    return Struck("hpcrl launch")


def kill_rank(bed: Bed, chance: random.Random) -> Struck:
    """A launcher of a host, MPI rank 0 or another."""
    found = [p for p in bed.find("launch") if p.host != "head" and p.argv[1:3] == ["-m", "hpcrl"]]
    if not found:
        raise Missed("no rank")
    process = chance.choice(found)
    send(signal.SIGKILL, process)
    return Struck(f"a rank on {process.host}", host=process.host)
