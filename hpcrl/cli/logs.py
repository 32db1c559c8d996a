"""`hpcrl logs`: what the processes of a run have said, in one view.

    RUN/logs/*.out, *.log                  the job itself (role job): the batch script, prepare commands
    STAGE/logs/attempt-N/ROLE-I.log        the roles; other names there (a host's process, srun) count as job too

Invariants: a log is read from its end, and only as far as was asked for; each line is shown once, whole, behind the
role, number and host that wrote it, and can do nothing to the terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.cli.find_run import Ending, find_run
from hpcrl.errors import UsageError
from hpcrl.plan import Plan
from hpcrl.report.file_tail import FileTail
from hpcrl.report.run_files import Run, StageFiles, changed, entries, load_json
from hpcrl.utils.arguments import RUN, Parser
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import count_of

ROLES = ("trainer", "engine", "rollout", "sandbox", "job")
GLANCE = 0.3  #: seconds between looks at the files
EVERY = 1.0  #: seconds between looks at the run's state
SETTLE = 2.0  #: seconds without a new line after which the log of a run that has ended is done
LINES = 20
#: role, its number, and of an engine over several hosts which part
_NAME = re.compile(r"(trainer|engine|rollout|sandbox)-(\d+)(?:-node-(\d+))?\.log\Z")


@dataclass(frozen=True)
class RoleLog:
    """One log file.

    Attributes:
        label: what its lines begin with.
        attempt: (stage, attempt), None for the job's own.
    """

    path: Path
    role: str
    label: str
    host: str
    attempt: tuple[str, int] | None = None


def logs(argv: list[str]) -> int:
    """`hpcrl logs`: the last lines of every log of the run's last attempt, and with -f what comes."""
    parser = Parser("logs", "The logs of a run's processes: the last attempt of its last stage, and the job's own log.")
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--role", help=f"only of this role: {', '.join(ROLES)}")
    parser.add_argument("--host", help="only of the processes on this host")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow across attempts and stages, until the run ends"
    )
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="only of this attempt of the stage, not of the last one"
    )
    parser.add_argument("--lines", type=int, default=LINES, metavar="N", help=f"last lines of each file ({LINES})")
    args = parser.parse_args(argv)
    if args.lines < 0:
        raise UsageError(f"--lines {args.lines} is negative", "give a number from 0")
    if args.role is not None and args.role not in ROLES:
        raise UsageError(f"--role {args.role}: no such role", f"there are {', '.join(ROLES)}")
    if args.attempt is not None and args.follow:
        raise UsageError(f"--attempt {args.attempt} has no effect with -f", "leave one of them out")
    run = find_run(args.run)
    every = logs_of(run)
    found = latest(every) if args.attempt is None else of_attempt(run, every, args.attempt)
    shown = chosen(found, args.role, args.host)
    if args.host is not None and args.host not in (hosts := hosts_of(run, every)):
        raise UsageError(
            f"--host {args.host}: the run has no process there", f"there are {', '.join(hosts) or 'none yet'}"
        )
    width = max((len(log.label) for log in shown), default=0)
    tails = {log.path: FileTail(log.path) for log in shown}
    for log in shown:
        tail = tails[log.path]
        lines = tail.last(args.lines)
        if tail.rest and not args.follow and args.lines:
            lines = [*lines, tail.rest][-args.lines :]
        for text in lines:
            print(f"{log.label:{width}} | {clean(text)}", flush=args.follow)
    if args.follow:
        follow(run.root, args.role, args.host, tails, {log.path for log in every})
    elif not shown:
        print("hpcrl: nothing has been logged there yet", file=sys.stderr)
    return 0


def of_attempt(run: Run, every: Iterable[RoleLog], number: int) -> list[RoleLog]:
    """The logs of one attempt of the last stage that has begun.

    Raises:
        UsageError: if it has no such attempt.
    """
    stage = next((stage for stage in reversed(run.stages) if stage.attempt is not None), None)
    found = [log for log in every if stage and log.attempt == (stage.name, number)]
    if not found:
        last = f"0 to {stage.attempt}" if stage else "none yet"
        raise UsageError(f"--attempt {number}: no such attempt", f"there are {last}")
    return found


# ---- which files


def logs_of(run: Run) -> list[RoleLog]:
    """Every log of a run: the job's own, then for each stage and attempt the roles'."""
    host = run.state.host if run.state else ""
    found = [
        RoleLog(run.root / "logs" / name, "job", _label(name.rsplit(".", 1)[0], host), host)
        for name in entries(run.root / "logs")
        if name.endswith((".out", ".log", ".err"))
    ]
    for stage in run.stages:
        names = {count_of(name[8:]): name for name in entries(stage.root / "logs") if name.startswith("attempt-")}
        for attempt in sorted(number for number in names if number is not None):
            found += _roles(stage, attempt, host, entries(stage.root / "logs" / names[attempt]))
    return found


def _roles(stage: StageFiles, attempt: int, launcher: str, names: Iterable[str]) -> Iterator[RoleLog]:
    """The logs of one attempt, which are called so, trainers first."""
    plan = load_json(stage.root / "attempts" / str(attempt) / "plan.json", Plan, [])
    folder = stage.root / "logs" / f"attempt-{attempt}"
    found = []
    for name in names:
        if match := _NAME.match(name):
            role = match[1]
            index = int(match[2])
            part = int(match[3] or 0)
            host = _host(plan, role, index, part)
            log = RoleLog(folder / name, role, _label(name[:-4], host), host, (stage.name, attempt))
            found.append((ROLES.index(role), (index, part), log))
        elif name.endswith((".log", ".out", ".err")):
            label = _label(name.rsplit(".", 1)[0], launcher)
            found.append(
                (ROLES.index("job"), (0, 0), RoleLog(folder / name, "job", label, launcher, (stage.name, attempt)))
            )
    yield from (log for _, _, log in sorted(found, key=lambda item: (item[0], item[1], item[2].path.name)))


def _label(name: str, host: str) -> str:
    return f"{name}@{host}" if host else name


def _host(plan: Plan | None, role: str, index: int, part: int) -> str:
    """Where a plan has a part of a role; empty if it does not say."""
    if plan is None:
        return ""
    places = {"trainer": plan.trainers, "engine": plan.engines, "rollout": (plan.rollout,), "sandbox": plan.sandboxes}
    try:
        return places[role][index].hosts[part]
    except IndexError:
        return ""


def latest(every: Iterable[RoleLog]) -> list[RoleLog]:
    """The roles' logs of the last attempt of the last stage that has any, and the newest of the job's own logs."""
    every = list(every)
    attempts = [log.attempt for log in every if log.attempt]
    own = [log for log in every if log.attempt is None]
    outputs = [log for log in own if log.path.suffix == ".out"]
    older = set(sorted(outputs, key=lambda log: changed(log.path))[:-1])
    roles = [log for log in every if log.attempt and log.attempt == attempts[-1]]
    return [log for log in own if log not in older] + roles


def chosen(found: Iterable[RoleLog], role: str | None, host: str | None) -> list[RoleLog]:
    """Those of a role and a host."""
    return [log for log in found if role in (None, log.role) and host in (None, log.host)]


def hosts_of(run: Run, every: Iterable[RoleLog]) -> list[str]:
    """The hosts that a process of the run is or was on."""
    found = {log.host for log in every}
    for stage in run.stages:
        if (plan := load_json(stage.here / "plan.json", Plan, [])) is not None:
            found |= {*plan.hosts}
    return sorted(found - {""})


# ---- their lines


def clean(text: bytes) -> str:
    """A line as it is after a progress bar has overwritten it, with nothing in it that a terminal obeys."""
    return strip_control(text.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1])


def follow(root: Path, role: str | None, host: str | None, tails: dict[Path, FileTail], old: set[Path]) -> None:
    """Print what is written from now on, also to files that appear later, until the run has ended and is silent.

    Args:
        tails: the files whose last lines are shown already.
        old: all that were there then.
    """
    looked = quiet = time.monotonic()
    ending, width = Ending(), 0
    found = ending.look(Run(root))
    while True:
        run, now = Run(root), time.monotonic()
        for log in chosen(logs_of(run), role, host):
            if log.path not in old:
                tails.setdefault(log.path, FileTail(log.path))
            for text in tails[log.path].new() if log.path in tails else ():
                width, quiet = max(width, len(log.label)), now
                print(f"{log.label:{width}} | {clean(text)}", flush=True)
        if now - looked > EVERY:
            found, looked = ending.look(run), now
        if ending.sure(found) and now - quiet > SETTLE:
            print(f"hpcrl: the run has ended: {found.phase}", file=sys.stderr)
            return
        time.sleep(GLANCE)
