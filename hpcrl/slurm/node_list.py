"""Slurm's short form of several node names.

Invariant: the names come out in Slurm's order, which is the order of the job's tasks.
"""

from __future__ import annotations

from hpcrl.errors import UsageError


def expand(nodelist: str) -> list[str]:
    """node[1-3,7] -> node1, node2, node3, node7, in Slurm's order."""
    from hostlist import BadHostlist, expand_hostlist

    try:
        return expand_hostlist(nodelist, allow_duplicates=True)
    except BadHostlist as error:
        raise UsageError(f"Slurm's node list {nodelist} cannot be read: {error}") from error
