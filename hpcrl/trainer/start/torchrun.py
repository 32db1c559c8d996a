"""Start the trainer ranks of one host under torchrun, in the environment that they need.

    python -m hpcrl.trainer.start.torchrun RUN --attempt N --index HOST      HOST: index among the hosts with trainers

Invariants: the ranks die with this process, and a rank that dies is named, with its exit code or signal, in the run's
error before any other rank's complaint about the lost connection; gloo and NCCL use the plan's network, never whatever
interface the host's name resolves to; torch is imported only after the environment is set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.errors import EXITED, PeerError
from hpcrl.report.file_tail import end_of_text
from hpcrl.run.compile_cache.role_cache import KeptCode
from hpcrl.run.compile_cache.shape import pipeline_stages
from hpcrl.run.exit_status import MemoryWatch, how_it_ended, out_of_memory, signal_name
from hpcrl.run.gpu_environment import Where, build_tools, missing, overruled, wanted
from hpcrl.run.process import die_with_parent
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.scratch import scratch
from hpcrl.utils.cpus import cores

LISTEN = 3.0  #: seconds that a process waits, once a signal ends it, for another one's report of the reason


def command(context: RoleContext, logs: Path) -> list[str]:
    """torchrun's arguments for the ranks of this host.

    Args:
        logs: where it may keep its own files.
    """
    hosts = context.plan.trainer_hosts
    return [
        *("--nnodes", str(len(hosts))),
        *("--rdzv-backend", "hpcrl"),
        *("--rdzv-endpoint", context.plan.trainers[0].at),
        *("--rdzv-id", "ranks"),
        *("--local-addr", context.plan.trainers[context.plan.ranks_on(hosts[context.index])[0]].at),
        *("--nproc-per-node", str(len(context.plan.ranks_on(hosts[context.index])))),
        *("--max-restarts", "0"),
        *("--log-dir", str(logs)),
        *("--monitor-interval", "0.2"),
        *("--module", "hpcrl.trainer.main", str(context.rundir.root)),
        *("--attempt", str(context.rundir.attempt)),
    ]


class ToldToEnd(PeerError):
    """A signal from outside, which Slurm also sends to all tasks of a step after one of them has died."""


def main() -> int:
    die_with_parent()
    context = open_role()
    ranks = context.plan.ranks_on(context.plan.trainer_hosts[context.index])
    late = lambda error: LISTEN if isinstance(error, ToldToEnd) else 0.0  # noqa: E731
    return act("trainer", context, ranks[0], lambda: run(context, ranks), late, beat=f"torchrun-{ranks[0]}")


def run(context: RoleContext, ranks: tuple[int, ...]) -> None:
    """Return when all ranks of this host have ended well.

    Raises:
        SystemExit: with the exit code of one that has not.
    """
    code = prepare_environment(context, ranks)
    watch(context, ranks, code)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from hpcrl.trainer.start.rendezvous import register

    register(context, context.index)
    memory = MemoryWatch()
    try:
        with scratch("torchrun") as logs:
            torchrun(command(context, logs))
        code.finish()
    except SignalException as error:
        host = context.plan.trainer_hosts[context.index]
        name = signal_name(error.sigval)
        raise ToldToEnd(
            f"host {host} was ended by {name} (cancelled, preempted, out of time, or another host of the job lost)"
        ) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        place = context.plan.trainers[rank].host
        said = out_of_memory(end_of_text(context.rundir.logs / f"trainer-{ranks[0]}.log"))
        message = f"rank {rank} on {place} {how_it_ended(failure.exitcode, memory)}" + (said and f"; it says: {said}")
        say(message)
        context.rundir.fail("trainer", rank, message, EXITED if failure.exitcode > 0 else "")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


#: where torch's flight recorder puts what it knows of NCCL's collectives when one takes too long (the rank's number is
#: added), by its name and its elder one
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def prepare_environment(context: RoleContext, ranks: tuple[int, ...]) -> KeptCode:
    """Set the environment of these ranks, which share a host; what the user has set stays, and is logged.

    Returns:
        The compiled code of the ranks.
    """
    threads = cpu_threads(context.options, cores(os.sched_getaffinity(0), os.environ), len(ranks))
    wishes = wanted("trainer", Where(context.options, context.plan.trainers[ranks[0]].interface, threads))
    base = {**os.environ, **context.options.train_env_vars}
    for line in overruled(wishes, base):
        say(line)
    stages = pipeline_stages(context.options, context.plan, context.plan.trainers[ranks[0]].host)
    code = KeptCode(context.options, context.rundir, "trainer", stages, base)
    os.environ.update(missing(wishes, base) | code.variables | build_tools(base))
    if not base.keys() & DUMPS:  # a node's /tmp may go with the job
        os.environ[DUMPS[0]] = str(context.rundir.logs / "nccl-trace-rank-")
    os.environ.update(context.options.train_env_vars)
    return code


def watch(context: RoleContext, ranks: tuple[int, ...], code: KeptCode) -> None:
    """Have compiled code packed on the first of the hosts that hold the same pipeline stages."""
    stages = lambda host: pipeline_stages(context.options, context.plan, host)  # noqa: E731
    here = context.plan.trainers[ranks[0]].host
    if here == next(host for host in context.plan.trainer_hosts if stages(host) == stages(here)):
        code.watch()


def cpu_threads(options: Options, count: int, ranks: int) -> int:
    """Threads of one of `ranks` ranks that share `count` cores: 1, or its share where the CPU does Adam's work."""
    return max(1, count // ranks) if options.megatron.get("optimizer_cpu_offload") else 1


if __name__ == "__main__":
    sys.exit(main())
