"""How a process ended, in words: the one phrase for an exit status, and what the kernel says of memory that ran out.

Invariant: no status is an error here, also one that no process of ours can have; where the kernel's files say nothing,
so does this.
"""

from __future__ import annotations

import signal

from hpcrl.run.trouble.memory import MemoryWatch

#: what a shell, srun or mpirun adds to the number of the signal that killed the process below it
SHELL = 128
#: who sends SIGKILL when nobody was asked: the kernel to a process, or Slurm to all of a step
MEMORY = "memory may have run out"
NOT_MEMORY = "not for want of memory, says the kernel: somebody or something else did it"


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals and unknown ones by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int, memory: MemoryWatch | None = None) -> str:
    """ "was killed by SIGSEGV" or "ended with exit code 3", to stand behind the name of the process.

    status: as `subprocess` has it, negative for a signal.  With SIGKILL stands what it often means, or, with a `memory`
    that was there before the process, whether the kernel did it.
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
        return MemoryWatch(ever=True).said() or MEMORY
    return memory.said() or (NOT_MEMORY if memory.sees else MEMORY)
