"""What every role's `main` has in common: its arguments, its place in the run, and how it fails.

Invariant: a role knows the run directory, the attempt and its index, and nothing of how it was started; whatever goes
wrong in it is recorded once in the run directory and ends it with a non-zero status.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, failure_kind
from hpcrl.plan import Plan
from hpcrl.run.code_files import use_code
from hpcrl.run.exit_status import out_of_memory
from hpcrl.run.heartbeat import beating
from hpcrl.run.owners import refuse_foreign
from hpcrl.run.process import set_limits
from hpcrl.run.rundir import RunDir, read_record
from hpcrl.run.storage_errors import WORDS, describe, remedy
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import read_regular
from hpcrl.utils.waiting import Deadline

ERROR_LINE = re.compile(rb"\d\d:\d\d:\d\d error: (.+)")  #: in a role's log, as `act` says it
LAST_WORDS = 20  #: lines of it in which that is looked for: what it started may have said something after it
SAID = 500  #: characters of an error in a log that are told
LISTEN = 0.2  #: seconds between two looks for another's error


def launch_timeout() -> float:
    """Seconds until every host must have answered: what the batch script has of the site's profile, or 120."""
    return float(os.environ.get("HPCRL_LAUNCH_TIMEOUT", "120"))


@dataclass(frozen=True)
class RoleContext:
    """A role's place in one attempt of a run.

    Attributes:
        incarnation: how often this one was started before in this attempt; engines alone.
    """

    rundir: RunDir
    options: Options
    plan: Plan
    index: int
    incarnation: int = 0


def read_options(rundir: RunDir) -> Options:
    """The resolved options of a run.

    Raises:
        HpcrlError: if the file is damaged, or is not there.
    """
    try:
        return Options.model_validate_json(read_regular(rundir.options_file))
    except (OSError, ValueError) as error:
        raise HpcrlError(f"{rundir.options_file} is damaged, or of another version of hpcrl: {error}") from error


def read_plan(rundir: RunDir) -> Plan:
    """Who runs where in this attempt.

    Raises:
        HpcrlError: if the launcher has left no whole plan.
    """
    if (plan := read_record(rundir.plan_file, Plan)) is None:
        raise HpcrlError(f"{rundir.plan_file} is missing", "does this host see the run directory?")
    return plan


def open_role(argv: list[str] | None = None) -> RoleContext:
    """Parse `RUN --attempt N [--index I] [--incarnation K]` and read the options and the plan of that attempt; custom
    functions are imported from the run's snapshot from then on."""
    parser = argparse.ArgumentParser(description="One role of a run; started by hpcrl, srun or mpirun.")
    parser.add_argument("run")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    args = parser.parse_args(argv)
    set_limits()
    rundir = RunDir(args.run, args.attempt)
    try:
        refuse_foreign(rundir.root)
        options = read_options(rundir)
        use_code(rundir.root, options.code_path)
        return RoleContext(rundir, options, read_plan(rundir), args.index, args.incarnation)
    except HpcrlError as error:
        raise SystemExit(f"error: {error}") from error


def say(text: str) -> None:
    """A line for the role's log; a log that cannot be written to is not a reason to end."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {strip_control(text, lines=True)}", file=sys.stderr, flush=True)


def last_error(log: Sequence[bytes]) -> str:
    """The error that a role, or a host's process, has said at the end of these lines of its log, "" if it has said
    none: on a full disk it could not record it."""
    said = [found[1] for line in log[-LAST_WORDS:] if (found := ERROR_LINE.fullmatch(line))]
    return strip_control(said[-1].decode(errors="replace"))[:SAID] if said else ""


def act(
    role: str,
    context: RoleContext,
    index: int,
    body: Callable[[], None],
    late: Callable[[BaseException], float] = lambda _: 0.0,
    record: Callable[[str], object] | None = None,
    beat: str = "",
) -> int:
    """Run `body`; record what goes wrong and return the exit status.

    late(error): seconds to wait for another's word before an error is recorded, for errors that are mere echoes of
    another's death. record(message): in place of recording it as the attempt's error.

    Args:
        beat: the name that this process gives signs of life under (default: ROLE-INDEX).
    """
    try:
        with beating(beat or f"{role}-{index}"):
            body()
        return 0
    except HpcrlError as error:
        message, status, kind = str(error), error.exit_code, failure_kind(error)
        _let_others_speak(context.rundir, late(error))
    except Exception as error:  # noqa: BLE001  (the boundary of the process: everything is recorded)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        message, status, kind = _describe_unexpected(error), 1, failure_kind(error)
        _let_others_speak(context.rundir, late(error))
    say(f"error: {message}")
    if record is not None:
        record(message)
    else:
        context.rundir.fail(role, index, message, kind)
    return status


def _let_others_speak(rundir: RunDir, seconds: float) -> None:
    """Wait until an error of this attempt is recorded, or so long."""
    until = Deadline(seconds)
    with contextlib.suppress(HpcrlError):  # one that is recorded and damaged is an end too
        while not until.over and rundir.failure() is None:
            time.sleep(LISTEN)


def _describe_unexpected(error: Exception) -> str:
    """An error that no code of ours expected, for a user: what a file system or the kernel has said in plain words."""
    if isinstance(error, OSError) and error.errno in WORDS:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{where}{describe(error)}; {remedy(error)}"
    line = out_of_memory(str(error)) or next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"
