"""How a process ended, in words: the one phrase for an exit status.

Invariant: no status is an error here, also one that no process of ours can have.
"""

from __future__ import annotations

import signal

from hpcrl.run.memory_limit import killed_at_limit

#: what a shell, srun or mpirun adds to the number of the signal that killed the process below it
SHELL = 128
#: who sends SIGKILL when nobody was asked: the kernel to a process, or Slurm to all of a step
_MEMORY = "memory may have run out"


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals and unknown ones by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int) -> str:
    """ "was killed by SIGSEGV" or "ended with exit code 3", to stand behind the name of the process.

    status: as `subprocess` has it, negative for a signal.  With SIGKILL stands what the kernel says of it, or what it often means.
    """
    memory = (killed_at_limit() or _MEMORY) if status in (-signal.SIGKILL, SHELL + signal.SIGKILL) else ""
    if status < 0:
        name = signal_name(-status)
        return f"was killed by {name}" + (f" ({memory})" if memory else "")
    below = status - SHELL
    if below in set(signal.Signals):  # a process below a shell
        name = signal_name(below)
        return f"ended with exit code {status} ({name}{'; ' + memory if memory else ''})"
    return f"ended with exit code {status}"
