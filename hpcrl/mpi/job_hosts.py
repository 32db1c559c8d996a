"""The hosts of a job as LSF, Grid Engine and PBS tell them, rewritten as a hostfile that `hostfile.py` reads.

    LSF     LSB_MCPU_HOSTS="n1 8 n2 8", or LSB_HOSTS="n1 n1 n2" with a name for each slot
    SGE     PE_HOSTFILE: a file with "n1 8 all.q@n1 UNDEFINED" in each line
    PBS     PBS_NODEFILE: a file with a name for each slot

Invariant: only words are moved here; what they mean, and what is wrong with them, is the hostfile's to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcrl.careful_files import read_given
from hpcrl.errors import UsageError

#: scheduler -> the variables that it sets in a job, the best first
VARIABLES = {"lsf": ("LSB_MCPU_HOSTS", "LSB_HOSTS"), "sge": ("PE_HOSTFILE",), "pbs": ("PBS_NODEFILE",)}


def job_hostfile(scheduler: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """(hostfile text, where it came from).  UsageError outside of such a job, or for another scheduler."""
    if scheduler not in VARIABLES:
        raise UsageError(f"--from {scheduler} is unknown", f"choose one of {', '.join(VARIABLES)}")
    names = VARIABLES[scheduler]
    name = next((name for name in names if environment.get(name, "").strip()), None)
    if name is None:
        raise UsageError(
            f"{' and '.join(names)} are not set" if len(names) > 1 else f"{names[0]} is not set", "run it in a job"
        )
    text = environment[name]
    if name in ("PE_HOSTFILE", "PBS_NODEFILE"):
        try:
            text = read_given(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}={text} cannot be read: {error}") from error
    return _REWRITE[name](text), f"${name}"


def _pairs(text: str) -> str:
    words = text.split()
    if len(words) % 2:
        raise UsageError(f"LSB_MCPU_HOSTS={text} is no list of HOST SLOTS")
    return "".join(f"{host} slots={slots}\n" for host, slots in zip(words[::2], words[1::2], strict=True))


def _names(text: str) -> str:
    return "".join(f"{name} slots=1\n" for name in text.split())


def _queues(text: str) -> str:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if short := next((row for row in rows if len(row) < 2), None):
        raise UsageError(f"PE_HOSTFILE has the line {' '.join(short)!r}, without slots")
    return "".join(f"{row[0]} slots={row[1]}\n" for row in rows)


_REWRITE = {"LSB_MCPU_HOSTS": _pairs, "LSB_HOSTS": _names, "PE_HOSTFILE": _queues, "PBS_NODEFILE": _names}
