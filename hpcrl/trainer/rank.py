"""One trainer rank without torchrun, where srun or mpirun starts every rank itself.

    python -m hpcrl.trainer.rank RUN --attempt N --index RANK

Invariant: the rank sees the environment that torchrun would have given it, so that nothing above knows the difference.
"""

from __future__ import annotations

import os
import sys

from hpcrl.process import die_with_parent
from hpcrl.roles import Seat, act, open_seat
from hpcrl.trainer.environment import prepare


def join(seat: Seat) -> object:
    """Set torchrun's variables; returns the store, which must live as long as rank 0 does."""
    rank, world = seat.index, len(seat.plan.trainers)
    here = seat.plan.ranks_on(seat.plan.trainers[rank].host)
    prepare(seat, here)
    from hpcrl.trainer.rendezvous import meet

    store, address, port = meet(seat, first=rank == 0)
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
    seat = open_seat()
    kept: list[object] = []
    if status := act("trainer", seat, seat.index, lambda: kept.append(join(seat))):
        return status
    from hpcrl.trainer.main import work

    return work(seat, seat.index)


if __name__ == "__main__":
    sys.exit(main())
