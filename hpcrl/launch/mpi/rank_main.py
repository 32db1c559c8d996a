"""`hpcrl launch` under mpirun: every MPI rank finds out which host it is, and its host's roles start next to it.

Rank 0 is the launcher of the run (launcher_rank.py); the others do what it says (host_rank.py).

Invariants: MPI itself must come up in INIT seconds; when a rank ends, by whatever, all that it started ends with it,
and the MPI world ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError, Stopped, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempts.loop import stay
from hpcrl.launch.attempts.retries import HostFault
from hpcrl.launch.attempts.spare_hosts import mark_spares
from hpcrl.launch.broken_hosts import note_broken_host
from hpcrl.launch.job import RunJob, begin_job, reopen_job, run_job
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.launch.mpi.channel import Channel, Message, OrderState, Quit
from hpcrl.launch.mpi.host_rank import HostRank
from hpcrl.launch.mpi.launcher_rank import MpiHosts
from hpcrl.launch.mpi.placement import place_ranks
from hpcrl.launch.requeue import seen_broken
from hpcrl.launch.user_code.snapshot import resume_code
from hpcrl.plan import Host
from hpcrl.report.progress import say
from hpcrl.run.job_files import JOB, write_job
from hpcrl.run.process import adopt_orphans, die_with_parent, end_descendants

INIT = 60.0


def run_ranks(
    recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None, hostfile: list[Host] | None
) -> int:
    """Be this MPI rank to the end of the run; the exit status.

    Raises:
        UsageError: if there is no MPI world to join.
        OSError: what is no error of ours ends the process, and MPI the world with it.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun hands it to every rank; rank 0 takes it as a request to stop
    die_with_parent()
    adopt_orphans()
    channel, report = join_world()
    last: Message = OrderState()
    try:  # where the ranks cannot be placed, each of them finds so, and one says it
        with _deadline():
            reports = channel.gather(report)
        placement = place_ranks(reports, hostfile)
        if channel.rank:
            rank = HostRank(channel, placement.names[channel.rank])
            status, last = rank.run(), rank.report
        else:
            by_host = dict(zip(placement.names, reports, strict=True))
            status = _launch(MpiHosts(channel, placement, by_host), recipe, overrides, resume)
    except HpcrlError as error:
        status = error.exit_code
        if channel.rank == 0:
            print(f"hpcrl: {'' if isinstance(error, Stopped) else 'error: '}{error}", file=sys.stderr, flush=True)
    except BaseException:
        end_descendants(0.5)
        raise
    leave_world(channel, status, last if channel.rank else Quit(status))


def _launch(backend: MpiHosts, recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None) -> int:
    hosts, begin = backend.placement.hosts, None
    if resume:
        job: RunJob = reopen_job(resume)
        begin = partial(resume_code, job.root, overrides.get("live_code"))
    else:
        assert recipe is not None
        job = begin_job(recipe, overrides, lambda options: mark_spares(hosts, options.spares))
    exit_status_relay.tell_where(job.root, job.identity)
    components = [{"name": h.name, "nodes": 1, "slots": h.slots} for h in hosts]
    write_job(job.root, job.identity, "mpirun", None, components=components)
    backend.unchecked = job.root / JOB
    say(f"{len(hosts)} hosts: {', '.join(f'{h.name} ({h.slots} slots)' for h in hosts)}")
    leave = partial(_leave, job)
    return run_job(job, backend, watch=backend.carry, age=exit_status_relay.age(), begin=begin, leave=leave)


def _leave(job: RunJob, error: HpcrlError, well: bool, stuck: Mapping[str, str]) -> HostFault:
    """Without which hosts the run continues: one that is lost ends the MPI world with it, but one whose hardware broke
    is still there, and a spare one takes its place."""
    broken = seen_broken(job) if any(options.spares for options in job.stages) else None
    if broken is None:
        return stay(error, well, stuck)
    note_broken_host(job.root, *broken)
    return HostFault(f"host {broken[0]} is broken ({broken[1]})", (broken[0],))


# ---- the MPI world


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """End the process with one line if MPI takes more than INIT seconds in the context."""

    def late() -> None:
        print(
            f"hpcrl: error: MPI did not come up within {INIT:.0f} s on {socket.gethostname()}: "
            "some host of the hostfile does not answer, or its firewall drops what MPI sends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(INIT, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join_world() -> tuple[Channel[Any], probe.HostReport]:
    """Join the MPI world, and see what there is on this host.

    Raises:
        UsageError: if mpi4py cannot be used here.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(f"mpi4py cannot be loaded: {error}", "pip install mpi4py; see docs/mpirun.md") from error
    check_library(MPI.Get_library_version(), os.environ)
    report = probe.host_report(socket.gethostname())
    with _deadline():
        MPI.Init_thread()
        return Channel(MPI), report


def check_library(library: str, environment: Mapping[str, str]) -> None:
    """Refuse a library of another MPI than the mpirun that has started this process: MPI_Init would end the process, or
    make every process a world of its own.  Under srun, Open MPI's library serves PMI_SIZE too.

    Args:
        library: what the library that mpi4py has opened says of itself.

    Raises:
        UsageError: names both.
    """
    opened = "Open MPI" if "Open MPI" in library else "MPICH"
    hydra = "SLURM_PROCID" not in environment or any(name.startswith(("HYDI_", "HYDRA_")) for name in environment)
    started = "MPICH" if "PMI_SIZE" in environment and hydra else opened
    started = "Open MPI" if "OMPI_COMM_WORLD_SIZE" in environment else started
    if opened != started:
        raise UsageError(
            f"an mpirun of {started} (or of what stems from it) has started this process, and mpi4py has opened "
            f"{library.split(',')[0].splitlines()[0]}",
            "put the directory of mpirun's own libmpi first on LD_LIBRARY_PATH, or use the mpirun of that library",
        )


def leave_world(channel: Channel[Any], status: int, last: Message) -> NoReturn:
    """End this rank: with the others, or, if some are gone, by ending what is left of the world."""
    end_descendants(0.5)
    sys.stdout.flush()
    sys.stderr.flush()
    if channel.rank == 0:
        exit_status_relay.tell(status)
    if not channel.close(last):
        if channel.rank == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)  # Abort of MPICH waits for an mpirun that is cut off
            channel.world.Abort(status or 1)
        os._exit(status or 1)  # which ends the world too
    if "Open MPI" in channel.mpi.Get_library_version():
        channel.mpi.Finalize()  # or else it takes the end of the process for a crash
    os._exit(status)  # MPICH needs no more than that, and over UCX it may never come back from Finalize
