"""What a shell's environment says of the job around it: whether an mpirun has started us, and how mpirun will start
others.

Invariant: a shell inside a job is no MPI rank, whatever variables its launcher has left in it.
"""

from __future__ import annotations

from collections.abc import Mapping

#: variables of an MPI launcher, by how their names begin
LEFT_BEHIND = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "HYDI_", "HYDRA_CONTROL")


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an mpirun has started this process.

    `srun --pty bash` gives its shell the variables of a world of one (PMIX_RANK, or PMI_SIZE=1) and SLURM_PTY_PORT:
    that is no rank; mpirun called in such a shell sets variables of its own.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return True
    world = any(name in environment for name in ("PMI_SIZE", "PMI_RANK", "PMIX_RANK"))
    shell = "SLURM_PTY_PORT" in environment and environment.get("PMI_SIZE", "1") == "1"
    return world and not shell


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for an mpirun that is called in such a shell."""
    return {name: value for name, value in environment.items() if not name.startswith(LEFT_BEHIND)}


def started_by_scheduler(kind: str, agent: str, environment: Mapping[str, str]) -> bool:
    """Whether mpirun reaches the hosts through the scheduler and needs no ssh: Open MPI inside a Slurm job takes srun,
    unless it was given an agent (its plm slurm)."""
    return kind == "openmpi" and agent == "ssh" and "SLURM_JOB_ID" in environment
