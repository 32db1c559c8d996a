"""One trainer rank without torchrun, where srun or mpirun starts every rank itself.

    python -m hpcrl.trainer.start.single_rank RUN --attempt N --index RANK

Invariant: the rank sees the environment that torchrun would have set, so nothing above can tell the difference.
"""

from __future__ import annotations

import os

from hpcrl.run.compile_cache.role_cache import KeptCode
from hpcrl.run.process import die_with_parent, exit_after
from hpcrl.run.role import RoleContext, act, open_role
from hpcrl.trainer.start.torchrun import prepare_environment, watch


def join(context: RoleContext) -> tuple[KeptCode, object]:
    """Set torchrun's variables; returns the compiled code of this host's ranks, and the store's server, if it is here:
    it must live as long as rank 0 does."""
    rank = context.index
    world = len(context.plan.trainers)
    here = context.plan.ranks_on(context.plan.trainers[rank].host)
    code = prepare_environment(context, here)
    if rank == here[0]:
        watch(context, here, code)
    from hpcrl.trainer.start.rendezvous import serve

    server = serve(context) if rank == 0 else None
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(here.index(rank)),
        LOCAL_WORLD_SIZE=str(len(here)),
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return code, server


def main() -> int:
    die_with_parent(forks=True)
    context = open_role()
    kept: list[tuple[KeptCode, object]] = []
    if status := act("trainer", context, context.index, lambda: kept.append(join(context))):
        return status
    from hpcrl.trainer.main import work

    status = work(context, context.index)
    if not status:
        kept[0][0].finish()
    return status


if __name__ == "__main__":
    exit_after(main)
