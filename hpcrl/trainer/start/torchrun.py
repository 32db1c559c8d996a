"""Start the trainer ranks of one host under torchrun.

    python -m hpcrl.trainer.start.torchrun RUN --attempt N --index HOST      HOST: number of the host among those with trainers

Invariant: the ranks die with this process, and a rank that dies is named, with its exit code or signal, in the run's
error before anybody else's complaint about the lost connection.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcrl.errors import PeerError
from hpcrl.run.exit_status import how_it_ended, signal_name
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.trouble.memory import MemoryWatch
from hpcrl.run.trouble.scratch import scratch
from hpcrl.trainer.start.environment import prepare_environment

LISTEN = 3.0  #: seconds that whoever is told to end waits for the word of who knows why


def command(context: RoleContext, logs: Path) -> list[str]:
    """torchrun's arguments for the ranks of this host.  logs: where it may keep files of its own."""
    hosts = context.plan.trainer_hosts
    return [
        *("--nnodes", str(len(hosts))),
        *("--rdzv-backend", "hpcrl"),
        *("--rdzv-endpoint", context.plan.trainers[0].at),
        *("--rdzv-id", "ranks"),
        *("--local-addr", _first(context).at),
        *("--nproc-per-node", str(len(context.plan.ranks_on(hosts[context.index])))),
        *("--max-restarts", "0"),
        *("--log-dir", str(logs)),
        *("--monitor-interval", "0.2"),
        *("--module", "hpcrl.trainer.main", str(context.rundir.root)),
        *("--attempt", str(context.rundir.attempt)),
    ]


def _first(context: RoleContext):  # noqa: ANN202
    return context.plan.trainers[context.plan.ranks_on(context.plan.trainer_hosts[context.index])[0]]


class ToldToEnd(PeerError):
    """A signal from outside, which Slurm also sends to all tasks of a step after one of them has died."""


def main() -> int:
    die_with_parent()
    context = open_role()
    ranks = context.plan.ranks_on(context.plan.trainer_hosts[context.index])
    late = lambda error: LISTEN if isinstance(error, ToldToEnd) else 0.0  # noqa: E731
    return act("trainer", context, ranks[0], lambda: run(context, ranks), late, beat=f"torchrun-{ranks[0]}")


def run(context: RoleContext, ranks: tuple[int, ...]) -> None:
    """Return when all ranks of this host have ended well; SystemExit with the exit code of one that has not."""
    prepare_environment(context, ranks)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from hpcrl.trainer.start.rendezvous import register

    register(context, context.index)
    memory = MemoryWatch()
    try:
        with scratch("torchrun") as logs:
            torchrun(command(context, logs))
    except SignalException as error:
        host = context.plan.trainer_hosts[context.index]
        name = signal_name(error.sigval)
        raise ToldToEnd(
            f"host {host} was told to end by {name} (cancelled, preempted, out of time, or another host of the job lost)"
        ) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        place = context.plan.trainers[rank].host
        message = f"rank {rank} on {place} {how_it_ended(failure.exitcode, memory)}"
        say(message)
        context.rundir.fail("trainer", rank, message)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


if __name__ == "__main__":
    sys.exit(main())
