"""Engines for a run that is under way, from a separate job or from this machine.

    python -m hpcrl.launch.engines.join RUN --attempt N --engines K [--host NAME] [--first-slot S]

Each is started, kept and ended as those of the plan are; the registry of the run gives it weights and requests.
Invariants: it ends with its attempt, whatever becomes of that; SIGTERM (a preemption, a time limit) has them finish
what they have, as long as that may take; its end is never the run's.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.launch.attempts.run_dir_poller import RunDirPoller
from hpcrl.launch.engines.restarter import EngineRestarter
from hpcrl.launch.probe import HostReport, choose, host_report
from hpcrl.launch.roles import GRACE, Role, devices, start
from hpcrl.launch.stop_signals import SignalFlags
from hpcrl.plan import Plan
from hpcrl.report.timeline.spans import ENDS, JOINS, ROLES, role_timeline
from hpcrl.run.engine_files import (
    EngineAdded,
    claim,
    first_incarnation,
    read_views,
    request_hand_back,
    request_removal,
    with_added,
)
from hpcrl.run.process import adopt_orphans, end, end_descendants
from hpcrl.run.role import read_options, read_plan, say
from hpcrl.run.rundir import RunDir
from hpcrl.toolbox.deadline import Deadline
from hpcrl.toolbox.signs import LastSign

#: seconds without a word of the run until it counts as gone; between two looks
SILENCE = 90.0
LOOK = 5.0
LEAVE = 25.0  #: seconds that engines have to finish their requests once the job is told to end


def where(host: str, plan: Plan, interface: str | None, found: HostReport) -> tuple[str, str]:
    """(address, interface) on which this host's engines are reached: on the network that the run is on.

    Raises:
        UsageError: if this host is not on it.
    """
    if host in plan.hosts:
        place = next(p for p in (*plan.trainers, *plan.engines, plan.rollout) if p.host == host)
        return place.address, place.interface
    theirs = plan.rollout.at
    if theirs in ("127.0.0.1", "localhost", "::1"):
        raise UsageError(f"the run is on {plan.rollout.host} alone, and listens only there", "add engines on that host")
    if interface:
        network = choose({host: found, "": found}, interface)[host]
        return network.address, network.interface
    names = {p.interface for p in (*plan.trainers, *plan.engines, plan.rollout) if p.interface}
    ours = [n for n in found.networks if n.interface in names] or [
        n for n in found.networks if _same_net(n.subnet, theirs)
    ]
    if len(ours) != 1:
        have = ", ".join(f"{n.interface} {n.address}" for n in found.networks) or "none"
        raise UsageError(
            f"host {host} is not on the run's network ({theirs}): it has {have}", "name it with --interface"
        )
    return ours[0].address, ours[0].interface


def _same_net(subnet: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(subnet)
    except ValueError:
        return False


def run(rundir: RunDir, host: str, slots: list[list[int]], told: SignalFlags) -> None:
    """Bring engines to the run, one for each list of slots, and keep them until it is over or they are told to
    leave."""
    options = read_options(rundir)
    plan = read_plan(rundir)
    looks = RunDirPoller(rundir)
    if looks.end() or looks.over(at_once=True):
        say(f"attempt {rundir.attempt} of {rundir.root} is over: no run to join")
        return
    address, interface = where(host, plan, options.interface, host_report(host))
    added = [EngineAdded(host=host, slots=tuple(mine), address=address, interface=interface) for mine in slots]
    indexes = [claim(rundir, plan, one) for one in added]
    say(f"engines {', '.join(map(str, indexes))} of {rundir.root} on {host}, at {address}")
    whole = with_added(rundir, plan)
    words = [str(rundir.root), "--attempt", str(rundir.attempt), "--index"]
    commands = {index: [sys.executable, "-m", "hpcrl.engine.main", *words, str(index)] for index in indexes}

    def begin(name: str, index: int, command: list[str]) -> Role:
        gpus = devices(whole, name, index, host, None, os.environ.get("CUDA_VISIBLE_DEVICES"))
        with deaf():
            return start(name, index, command, rundir, host, gpus)

    roles: list[Role] = []
    timeline = role_timeline(rundir, "joined", indexes[0], host)
    timeline.mark(JOINS, engines={str(index): mine for index, mine in zip(indexes, slots, strict=True)})

    def turn() -> None:
        restarter.restart_ended(roles)
        timeline.alive()

    first = {index: first_incarnation(rundir, options, index) for index in indexes}
    restarter = EngineRestarter(rundir, host, options.engine_restarts, commands, begin, first)
    try:
        with timeline.span(ROLES):
            for index, command in commands.items():
                roles.append(begin("engine", index, [*command, "--incarnation", str(first[index])]))
            # a response that continues elsewhere continues with other noise, so a run that repeats bit for bit begins
            # it again
            _keep(roles, restarter, turn, looks, rundir, told, finish=options.deterministic_mode)
    finally:
        end([psutil.Process(r.process.pid) for r in roles if r.status is None], GRACE)
        end_descendants(0.5)
        timeline.mark(ENDS)


@contextmanager
def deaf() -> Iterator[None]:
    """What is started in here takes no notice of SIGUSR1: a scheduler sends its warning to every process that it
    finds."""
    ours = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, ours)


def _keep(
    roles: list[Role],
    restarter: EngineRestarter,
    turn: Callable[[], None],
    looks: RunDirPoller,
    rundir: RunDir,
    told: SignalFlags,
    finish: bool,
) -> None:
    """Keep the engines until they have ended or are told to.

    Args:
        finish: whether engines that are told to end are given time to finish their responses.
    """
    sign = LifeSign(rundir)
    leave: Deadline | None = None
    while not looks.end() and not looks.over(at_once=False):
        turn()
        if sign.lost():
            raise PeerError(f"no sign of life of the run for {SILENCE:.0f} s", "its rollout process is gone, or hangs")
        ended = [role for role in roles if role.status is not None]
        for role in ended:  # for good: its supervisor has said why
            say(role.exit_report())
            roles.remove(role)
        if not roles and not restarter.waits:
            return
        if told.requests and leave is None:
            leave = Deadline(LEAVE)
            say(f"ending on request: the engines {'finish what they have' if finish else 'hand back what they have'}")
            for role in roles:
                request_removal(rundir, role.index)
                if not finish:
                    request_hand_back(rundir, role.index)
        if told.requests > 1 or (leave is not None and leave.over):
            return
        time.sleep(0.2)


class LifeSign:
    """Whether the run still is there: its rollout process says every few seconds how its engines are.

    By this host's clock alone, which may differ from the writer's.
    """

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._said = 0.0
        self._sign = LastSign()
        self._looked = LastSign(ago=math.inf)

    def lost(self) -> bool:
        """True once nothing new was said for SILENCE seconds."""
        if self._looked.due(LOOK):
            views = read_views(self._rundir.here)
            if views is not None and views.time != self._said:
                self._said = views.time
                self._sign.heard()
        return self._sign.silence > SILENCE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Engines that join a run; started by hpcrl engines add.")
    parser.add_argument("run")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--engines", type=int, required=True, help="how many of them this host gets")
    parser.add_argument("--host", default=socket.gethostname(), help="this host's name")
    parser.add_argument("--first-slot", type=int, default=0, help="the first GPU that they use")
    args = parser.parse_args(argv)
    adopt_orphans()
    rundir = RunDir(args.run, args.attempt)
    try:
        size = read_options(rundir).rollout_num_gpus_per_engine
        slots = [[args.first_slot + n * size + i for i in range(size)] for n in range(args.engines)]
        with SignalFlags() as told:
            signal.signal(signal.SIGUSR1, told.count)  # with which a scheduler says that the time limit is near
            run(rundir, args.host, slots, told)
    except HpcrlError as error:
        say(f"error: host {args.host}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
