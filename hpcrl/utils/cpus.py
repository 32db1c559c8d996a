"""The processors that a process may use: how many cores they are, and which of them are local to a device.

Invariant: what the system does not say changes nothing: every processor is then its own core, and nothing is
bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from hpcrl.utils.untrusted_files import read_system

SYSTEM = Path("/sys")
#: processors of this host that the scheduler gives the job, hardware threads as a rule (launch/task.sh)
GIVEN = "HPCRL_CPUS"


def cores(allowed: Collection[int], environment: Mapping[str, str], system: Path = SYSTEM) -> int:
    """How many cores `allowed` (numbers of processors, as os.sched_getaffinity has them) are; hardware threads of one
    count once.

    Args:
        environment: a job that has a part of its host and is not bound to it may run anywhere; its share is what GIVEN
            says.
    """
    cpus = system / "devices/system/cpu"
    cores = {read_list(cpus / f"cpu{n}/topology/thread_siblings_list") or frozenset({n}) for n in allowed}
    found = len(cores) or 1
    given = environment.get(GIVEN, "")
    if not given.isdigit() or not 0 < int(given) < len(allowed):
        return found
    return max(1, int(given) * found // len(allowed))


def read_list(file: Path) -> frozenset[int]:
    """Numbers as the kernel lists them, `0-3,64`; none if the file is not there or holds something else."""
    try:
        parts = [part.partition("-") for part in read_system(file).strip().split(",")]
        return frozenset(number for first, _, last in parts for number in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def bind_beside(device: str, system: Path = SYSTEM) -> frozenset[int]:
    """Keep all threads of this process, and what they start, on the processors of the NUMA node of a PCI device
    (`0000:3b:00.0`).

    Returns:
        These, or none if nothing was changed: the system does not say, they are all that it has, or it may use none of
        them.
    """
    allowed = os.sched_getaffinity(0)
    local = read_list(system / "bus/pci/devices" / device / "local_cpulist") & allowed
    if not local or local == allowed:
        return frozenset()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), local)
    return local
