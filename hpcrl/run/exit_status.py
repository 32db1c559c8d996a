"""How a process ended, in words: its exit status, and what the kernel says of memory, and CUDA of hardware.

    watch = MemoryWatch()                            # before the process is started
    how_it_ended(process.returncode, watch)          # -> "was killed by SIGKILL (the kernel killed 1 process ...)"

The kernel counts the processes that it kills: for each cgroup (memory.events of version 2, memory.oom_control of
version 1) and for the whole host (oom_kill of /proc/vmstat).

Invariants: no status is an error here, not even one that no process of ours can have; what cannot be read is not
guessed; a host is called broken only for words by which CUDA or NVML says that the hardware is.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

from hpcrl.utils.untrusted_files import read_system

#: what a shell, srun or mpirun adds to the number of the signal that killed the process below it
SHELL = 128
#: who sends SIGKILL unrequested: the kernel to a process, or Slurm to all of a step
MEMORY = "memory may have run out"
NOT_MEMORY = "not the kernel's out-of-memory killer: another process sent it"


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals and unknown ones by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int, memory: MemoryWatch | None = None) -> str:
    """ "was killed by SIGSEGV" or "ended with exit code 3", to follow the name of the process.

    Args:
        status: as `subprocess` has it, negative for a signal. With SIGKILL comes what it often means, or, with a
            `memory` that was there before the process, whether the kernel did it.
    """
    if status < 0:
        name = signal_name(-status)
        return f"was killed by {name}" + (f" ({_who(memory)})" if name == "SIGKILL" else "")
    below = status - SHELL
    if below in set(signal.Signals):  # a process below a shell
        name = signal_name(below)
        return f"ended with exit code {status} ({name}{'; ' + _who(memory) if name == 'SIGKILL' else ''})"
    return f"ended with exit code {status}"


def _who(memory: MemoryWatch | None) -> str:
    """Who sent a SIGKILL, as far as that is known."""
    if memory is None:
        return MEMORY
    return memory.describe_kills() or (NOT_MEMORY if memory.sees else MEMORY)


# ---- what the kernel says of memory

#: a cgroup's controllers ("" in version 2) -> folder, file with the count of kills
FILES = {"": ("sys/fs/cgroup", "memory.events"), "memory": ("sys/fs/cgroup/memory", "memory.oom_control")}


class MemoryWatch:
    """The counts as they are now, of this process's cgroups and of its host.

    Attributes:
        root: where /proc and /sys are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [*_counts(root), root / "proc/vmstat"]
        self._before = [_kills(path) for path in self._files]

    def describe_kills(self) -> str:
        """What the kernel has killed since, for a user; "" if nothing, or if that cannot be found out.

        The host's count alone does not say whose process it was: another job's limit may have been hit.
        """
        for path, before in zip(self._files, self._before, strict=True):  # our own cgroup first
            now = _kills(path)
            if now is None or before is None or now <= before:
                continue
            killed = f"{now - before} process{'es' if now - before > 1 else ''}"
            if path is self._files[-1]:
                return f"perhaps out of memory: the kernel has killed {killed} of this host meanwhile"
            return f"out of memory: the kernel killed {killed}: ask for more memory"
        return ""

    @property
    def sees(self) -> bool:
        """Whether a kill would have been seen, so that its absence says something."""
        return any(count is not None for count in self._before)


def _counts(root: Path) -> list[Path]:
    """The files with the counts of this process's cgroups with a memory controller, innermost first."""
    found = []
    with contextlib.suppress(OSError):
        for line in read_system(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in FILES or "memory" in controllers.split(","):
                folder, name = FILES.get(controllers, FILES["memory"])
                here = root / folder / path.lstrip("/")
                found += [place / name for place in (here, *here.parents) if place.is_relative_to(root / folder)]
    return found


def _kills(path: Path) -> int | None:
    """The kernel's count in a file of lines of a name and a number."""
    with contextlib.suppress(OSError, ValueError):
        for line in read_system(path).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


# ---- what CUDA and NVML say of hardware

#: what CUDA (cuda-runtime-api, cudaError: ECCUncorrectable, NvlinkUncorrectable, HardwareStackError) and NVML say of
#: hardware, in their own lines: a prompt may speak of it too
HARDWARE = re.compile(
    r"CUDA\b.{0,40}error\b.{0,20}(?:uncorrectable ECC error|uncorrectable NVLink error|hardware stack error)"
    r"|(?:NVML|nvidia-smi|Unable to determine the device handle).{0,80}GPU is lost",
    re.IGNORECASE,
)


def hardware_words(text: str) -> str | None:
    """The line that says that hardware is broken, if one does."""
    return next((line.strip()[:200] for line in text.splitlines() if HARDWARE.search(line)), None)


# ---- what torch, CUDA's libraries and vLLM say of a GPU's memory

GPU_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Cuda failure[\w ]* 'out of memory'"
    r"|cudaErrorMemoryAllocation|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
    r"|less than desired [CG]PU memory utilization|No available memory for the cache blocks"
)


def out_of_memory(text: str) -> str:
    """The line that says that a GPU has no memory left, "" if none does.

    The kernel's word on a host's memory is not meant.
    """
    return next((line.strip()[:300] for line in text.splitlines() if GPU_MEMORY.search(line)), "")
