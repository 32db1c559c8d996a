"""One trainer rank without torchrun, where srun or mpirun starts every rank itself.

    python -m hpcrl.trainer.start.single_rank RUN --attempt N --index RANK

Invariant: the rank sees the environment that torchrun would have given it, so that nothing above knows the difference.
"""

from __future__ import annotations

import os
import sys

from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role
from hpcrl.trainer.start.environment import prepare_environment


def join(context: RoleContext) -> object:
    """Set torchrun's variables; returns the store, which must live as long as rank 0 does."""
    rank, world = context.index, len(context.plan.trainers)
    here = context.plan.ranks_on(context.plan.trainers[rank].host)
    prepare_environment(context, here)
    from hpcrl.trainer.start.rendezvous import meet

    store, address, port = meet(context, first=rank == 0)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(here.index(rank)),
        LOCAL_WORLD_SIZE=str(len(here)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # or else rank 0 would open another store, on every interface
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return store


def main() -> int:
    die_with_parent()
    context = open_role()
    kept: list[object] = []
    if status := act("trainer", context, context.index, lambda: kept.append(join(context))):
        return status
    from hpcrl.trainer.main import work

    return work(context, context.index)


if __name__ == "__main__":
    sys.exit(main())
