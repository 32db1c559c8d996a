"""`hpcrl launch` under mpirun: every MPI rank finds out which host it is, and its host's roles start beside it.

Rank 0 is the launcher of the run; the others do what it says: start their host's part of an attempt, and carry the small
files by which roles find each other where no file system is shared.

Invariants: no wait is for ever: MPI itself must come up in INIT seconds, a host that is silent for a while ends the run; when
a rank ends, by whatever, all that it started ends with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError, Stopped, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempt import Member, Stop, Watched
from hpcrl.launch.host import GRACE
from hpcrl.launch.job import Job, begin_job, reopen_job, run_job, say
from hpcrl.launch.local import Local, spawn
from hpcrl.mpi.channel import DEAD, Channel
from hpcrl.mpi.file_sync import FileSync, pack_files, unpack_files
from hpcrl.mpi.placement import Placement, place_ranks
from hpcrl.plan import Host, Plan
from hpcrl.run.job_file import write_job
from hpcrl.run.process import adopt_orphans, die_with_parent, end, end_descendants
from hpcrl.run.rundir import RunDir

INIT = 60.0
PART = 20.0  #: seconds that the hosts may take to part at the end


def under_mpi() -> bool:
    """Whether an mpirun has started this process."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"))


def connect() -> Channel:
    """Join the MPI world.  The process ends with one line if that takes more than INIT seconds."""

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
        from mpi4py import MPI

        wire = Channel(MPI)
        wire.world.Barrier()
    except ImportError as error:
        raise UsageError(f"mpi4py cannot be loaded: {error}", "pip install mpi4py; see docs/bare-metal.md") from error
    finally:
        timer.cancel()
    return wire


# ---- one host's part of one attempt


@dataclass
class HostPart:
    """What this rank has started for an attempt, and the files that it carries."""

    rundir: RunDir
    process: Any
    relay: FileSync | None


def start_part(rundir: RunDir, host: str, slot: int | None, carries: bool) -> HostPart:
    """Start the process of this host (or of one slot of it)."""
    words = [str(rundir.root), "--attempt", str(rundir.attempt), "--host", host]
    words += [] if slot is None else ["--slot", str(slot)]
    log = rundir.logs / (f"host-{host}.log" if slot is None else f"host-{host}-{slot}.log")
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    process = spawn([sys.executable, "-m", "hpcrl.launch.host", *words], log)
    return HostPart(rundir, process, FileSync(rundir) if carries else None)


# ---- ranks other than 0


def follow(wire: Channel, crew: Placement) -> int:
    """Do what rank 0 says until it says quit; the exit status.  Ends by itself when rank 0 is silent."""
    hand = crew.hands[wire.rank]
    part: HostPart | None = None
    reported = False
    try:
        while True:
            for _, message in wire.receive():
                if message["op"] == "attempt":
                    part, reported = _begin(message, hand.host, hand.local if crew.per_slot else None), False
                elif message["op"] == "files" and part:
                    unpack_files(part.rundir, message["files"]) if part.relay is None else part.relay.put(message["files"])
                elif message["op"] == "sees":
                    wire.send(0, op="sees", token=Path(message["path"]).exists())
                elif message["op"] == "quit":
                    wire.send(0, op="bye")
                    return message["status"]
            wire.beat([0])
            if part:
                if part.relay and (files := part.relay.new()):
                    wire.send(0, op="files", files=files)
                if not reported and (status := part.process.poll()) is not None:
                    reported = True
                    wire.send(0, op="ended", attempt=part.rundir.attempt, root=str(part.rundir.root), status=status)
            if 0 in wire.silent():
                print(f"hpcrl: error: {hand.host}: the launcher on rank 0 was silent for {DEAD:.0f} s", file=sys.stderr)
                return 1
            time.sleep(0.1)
    finally:
        if part and part.process.poll() is None:
            end([psutil.Process(part.process.pid)], GRACE)
        end_descendants(0.5)


def _begin(message: dict[str, Any], host: str, slot: int | None) -> HostPart:
    rundir = RunDir(message["root"], message["attempt"])
    if message["files"]:
        rundir.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (rundir.here / "peers").mkdir(parents=True, exist_ok=True, mode=0o700)
        (rundir.root / "samples").mkdir(exist_ok=True, mode=0o700)
        unpack_files(rundir, message["files"])
    return start_part(rundir, host, slot, bool(message["files"]))


# ---- rank 0


@dataclass
class Away:
    """A member of the run on another rank."""

    name: str
    log: Path
    rank: int
    wire: Channel
    ended: int | None = None

    @property
    def status(self) -> int | None:
        if self.ended is None and self.rank in self.wire.silent():
            return 1
        return self.ended

    def end(self) -> None:
        """Its own rank ends it: it was told so, or is gone."""


@dataclass
class Mpi:
    """The hosts of an MPI world, seen from rank 0."""

    wire: Channel
    crew: Placement
    reports: dict[str, probe.Report]
    job_root: Path
    apart: set[int] = field(default_factory=set)  #: ranks that do not see the run directory
    away: list[Away] = field(default_factory=list)
    part: HostPart | None = None

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        if self.crew.per_slot and options.rank_launcher == "torchrun":
            raise UsageError(
                "there is an MPI rank for each slot, and --rank-launcher torchrun would start one more for each",
                "give --rank-launcher ranks, or start one rank a host (--map-by ppr:1:node, -ppn 1)",
            )
        network = probe.choose(self.reports, options.interface)
        return [Host(h.name, h.slots, network[h.name].address, network[h.name].interface) for h in self.crew.hosts]

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[Watched]:
        self._who_sees(rundir, options.launch_timeout)
        self._check_shared(plan)
        names = ["options.json", *_below(rundir, rundir.here), *_below(rundir, rundir.keys)]
        files = pack_files(rundir, names)
        self.away = []
        for hand in self.crew.hands[1:]:
            log = rundir.logs / f"host-{hand.host}.log"
            self.away.append(Away(f"host {hand.host} (MPI rank {hand.rank})", log, hand.rank, self.wire))
            sent = files if hand.rank in self.apart else {}
            self.wire.send(hand.rank, op="attempt", root=str(rundir.root), attempt=rundir.attempt, files=sent)
        first = self.crew.hands[0]
        self.part = start_part(rundir, first.host, first.local if self.crew.per_slot else None, bool(self.apart))
        self.part.relay = FileSync(rundir) if self.apart else None
        here = Member(f"host {first.host}", rundir.logs / f"host-{first.host}.log", self.part.process)
        return [here, *self.away]

    def again(self, root: Path) -> str:
        return f"hpcrl launch --resume {root} --hostfile FILE"

    def prepare(self, command: list[str], log: Path) -> Any:
        return Local().prepare(command, log)

    def turn(self, stop: Stop, rundir: RunDir | None) -> None:
        """Carry messages; called about five times a second."""
        if stop.nudges:  # mpirun hands on the SIGUSR1 by which hpcrl launch passes on a wish to stop
            stop.nudges = 0
            stop.ask("asked to")
        self.wire.beat([hand.rank for hand in self.crew.hands[1:]])
        for rank, message in self.wire.receive():
            self._take(rank, message, rundir)
        if self.part and self.part.relay and (files := self.part.relay.new()):
            self._spread(files, origin=0)
        if rundir and rundir.here.exists():
            for rank in self.wire.silent():
                host = self.crew.hands[rank].host
                rundir.fail("launcher", 0, f"host {host} did not answer for {DEAD:.0f} s; is it up, and its network?")

    def _take(self, rank: int, message: dict[str, Any], rundir: RunDir | None) -> None:
        if message["op"] == "files" and self.part and self.part.relay:
            self.part.relay.put(message["files"])
            self._spread(message["files"], origin=rank)
        elif message["op"] == "ended" and rundir and message["root"] == str(rundir.root) and message["attempt"] == rundir.attempt:
            for member in self.away:
                if member.rank == rank:
                    member.ended = message["status"]
        elif message["op"] == "sees" and not message["token"]:
            self.apart.add(rank)

    def _spread(self, files: dict[str, str], origin: int) -> None:
        for rank in self.apart - {origin}:
            self.wire.send(rank, op="files", files=files)

    def _who_sees(self, rundir: RunDir, seconds: float) -> None:
        """Find out which ranks share the run directory: they find this attempt's folder there."""
        self.apart.clear()
        waiting = {hand.rank for hand in self.crew.hands[1:]}
        for rank in waiting:
            self.wire.send(rank, op="sees", path=str(rundir.plan_file))
        deadline = time.monotonic() + seconds
        while waiting:
            for rank, message in self.wire.receive():
                if message["op"] == "sees":
                    waiting.discard(rank)
                self._take(rank, message, rundir)
            if time.monotonic() > deadline or set(self.wire.silent()) & waiting:
                names = ", ".join(sorted({self.crew.hands[rank].host for rank in waiting}))
                raise HpcrlError(f"no answer from {names} within --launch-timeout {seconds:.0f} s", "is the host up?")
            time.sleep(0.02)

    def _check_shared(self, plan: Plan) -> None:
        """UsageError if trainer ranks would save to file systems that others of them do not see."""
        unshared = {self.crew.hands[rank].host for rank in self.apart} & set(plan.trainer_hosts)
        if unshared:
            raise UsageError(
                f"host {sorted(unshared)[0]} has trainer ranks and does not see {self.job_root}, where checkpoints go",
                "put --run-dir on a file system that rank 0 and all trainer hosts share; engines may do without",
            )

    def part_from(self, status: int) -> bool:
        """Tell every rank to quit; whether all have answered in time."""
        waiting = {hand.rank for hand in self.crew.hands[1:]}
        for rank in waiting:
            self.wire.send(rank, op="quit", status=status)
        deadline = time.monotonic() + PART
        while waiting - set(self.wire.silent()) and time.monotonic() < deadline:
            waiting -= {rank for rank, message in self.wire.receive() if message["op"] == "bye"}
            time.sleep(0.02)
        return not waiting


def _below(rundir: RunDir, folder: Path) -> list[str]:
    return [str(path.relative_to(rundir.root)) for path in sorted(folder.rglob("*")) if path.is_file()]


# ---- the command


def run_ranks(recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None, hostfile: list[Host] | None) -> int:
    """Be this MPI rank to the end of the run; the exit status."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun hands it to every rank; rank 0 takes it as a wish to stop
    die_with_parent()
    adopt_orphans()
    wire = connect()
    report = probe.report(socket.gethostname())
    import msgspec

    gathered = wire.all({"report": msgspec.to_builtins(report), "gpus": len(list(Path("/dev").glob("nvidia[0-9]*")))})
    reports = [msgspec.convert(item["report"], probe.Report) for item in gathered]
    try:
        crew = place_ranks(reports, [item["gpus"] for item in gathered], hostfile)
    except HpcrlError as error:  # the same on every rank: one of them says so
        if wire.rank == 0:
            print(f"hpcrl: error: {error}", file=sys.stderr, flush=True)
        _leave(wire, True, error.exit_code)
    if wire.rank:
        _leave(wire, True, follow(wire, crew))
    by_host = {host.name: reports[crew.first(host.name)] for host in crew.hosts}
    status, backend = 1, Mpi(wire, crew, by_host, Path())
    try:
        status = _lead(backend, recipe, overrides, resume)
    except HpcrlError as error:
        status = error.exit_code
        print(f"hpcrl: {'' if isinstance(error, Stopped) else 'error: '}{error}", file=sys.stderr, flush=True)
    finally:
        _leave(wire, backend.part_from(status), status)
    raise AssertionError


def _lead(backend: Mpi, recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None) -> int:
    if resume:
        job: Job = reopen_job(resume)
    else:
        assert recipe is not None
        job = begin_job(recipe, overrides, lambda _: list(backend.crew.hosts))
    backend.job_root = job.root
    write_job(
        job.root,
        job.identity,
        "mpirun",
        None,
        components=[{"name": h.name, "nodes": 1, "slots": h.slots} for h in backend.crew.hosts],
    )
    say(f"{len(backend.crew.hosts)} hosts: {', '.join(f'{h.name} ({h.slots} slots)' for h in backend.crew.hosts)}")
    return run_job(job, backend, watch=backend.turn)


def _leave(wire: Channel, all_there: bool, status: int) -> None:
    """End this rank: with the others, or, if some are gone, by ending what is left of the world."""
    end_descendants(0.5)
    sys.stdout.flush()
    sys.stderr.flush()
    if not all_there or not wire.close(PART):
        wire.world.Abort(status or 1)
    if "Open MPI" in wire.mpi.Get_library_version():
        wire.mpi.Finalize()  # or else it takes the end of the process for a crash
    os._exit(status)  # MPICH needs no more than that, and over UCX it may never come back from Finalize
