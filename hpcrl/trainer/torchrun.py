"""Start the trainer ranks of this host under torchrun.

    python -m hpcrl.trainer.torchrun RUN --attempt N

Invariant: the ranks die with this process, and a rank that dies is named, with its exit code or signal, in the run's
error before anybody else's complaint about the lost connection.
"""

from __future__ import annotations

import os
import signal
import sys

from hpcrl.process import die_with_parent
from hpcrl.roles import Seat, open_seat, say


def command(seat: Seat) -> list[str]:
    """torchrun's arguments for the ranks of one host (all of them sit on one host here)."""
    return [
        "--nnodes",
        "1",
        "--rdzv-backend",
        "hpcrl",
        "--rdzv-endpoint",
        seat.plan.trainers[0].host,
        "--rdzv-id",
        "ranks",
        "--local-addr",
        seat.plan.trainers[0].host,
        "--nproc-per-node",
        str(len(seat.plan.trainers)),
        "--max-restarts",
        "0",
        "--monitor-interval",
        "0.2",
        "--module",
        "hpcrl.trainer.main",
        str(seat.rundir.root),
        "--attempt",
        str(seat.rundir.attempt),
    ]


def main() -> int:
    die_with_parent()
    seat = open_seat()
    os.environ.setdefault("OMP_NUM_THREADS", str(seat.options.trainer_threads))
    if seat.plan.hosts == ("127.0.0.1",):  # or else gloo and NCCL listen on whatever interface the host's name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.update(seat.options.train_env_vars)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from hpcrl.trainer.rendezvous import register

    register()

    try:
        torchrun(command(seat))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        place = seat.plan.trainers[rank].host
        how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        message = f"rank {rank} on {place} ended with {how}"
        say(message)
        seat.rundir.fail("trainer", rank, message)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
