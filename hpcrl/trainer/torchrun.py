"""Start the trainer ranks of one host under torchrun.

    python -m hpcrl.trainer.torchrun RUN --attempt N --index HOST      HOST: number of the host among those with trainers

Invariant: the ranks die with this process, and a rank that dies is named, with its exit code or signal, in the run's
error before anybody else's complaint about the lost connection.
"""

from __future__ import annotations

import signal
import sys

from hpcrl.errors import PeerError
from hpcrl.process import die_with_parent
from hpcrl.roles import Seat, act, open_seat, say
from hpcrl.trainer.environment import prepare


def command(seat: Seat) -> list[str]:
    """torchrun's arguments for the ranks of this host."""
    hosts = seat.plan.trainer_hosts
    return [
        *("--nnodes", str(len(hosts))),
        *("--rdzv-backend", "hpcrl"),
        *("--rdzv-endpoint", seat.plan.trainers[0].at),
        *("--rdzv-id", "ranks"),
        *("--local-addr", _first(seat).at),
        *("--nproc-per-node", str(len(seat.plan.ranks_on(hosts[seat.index])))),
        *("--max-restarts", "0"),
        *("--monitor-interval", "0.2"),
        *("--module", "hpcrl.trainer.main", str(seat.rundir.root)),
        *("--attempt", str(seat.rundir.attempt)),
    ]


def _first(seat: Seat):  # noqa: ANN202
    return seat.plan.trainers[seat.plan.ranks_on(seat.plan.trainer_hosts[seat.index])[0]]


def main() -> int:
    die_with_parent()
    seat = open_seat()
    ranks = seat.plan.ranks_on(seat.plan.trainer_hosts[seat.index])
    return act("trainer", seat, ranks[0], lambda: run(seat, ranks))


def run(seat: Seat, ranks: tuple[int, ...]) -> None:
    """Return when all ranks of this host have ended well; SystemExit with the exit code of one that has not."""
    prepare(seat, ranks)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from hpcrl.trainer.rendezvous import register

    register(seat, seat.index)
    try:
        torchrun(command(seat))
    except SignalException as error:
        host, name = seat.plan.trainer_hosts[seat.index], signal.Signals(error.sigval).name
        raise PeerError(f"host {host} was told to end by {name} (cancelled, preempted, or out of time)") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        place = seat.plan.trainers[rank].host
        how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        message = f"rank {rank} on {place} ended with {how}"
        say(message)
        seat.rundir.fail("trainer", rank, message)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


if __name__ == "__main__":
    sys.exit(main())
