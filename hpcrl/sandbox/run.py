"""`run_confined`: a command that is not trusted, run where it can do no harm, and what it wrote.

Invariant: the command gets none of the caller's files, no terminal, and no variable that is not handed over; it has
ended, with all that it started, when the call returns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.sandbox.private_root import View
from hpcrl.sandbox.usage import START

OUTPUT = 16 << 20  #: bytes that are read of what it writes
_MORE = 15.0  #: seconds that the watching process may take beyond what it gives the command
#: variables that the watching process needs to start; the command does not get them
_PYTHONS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")


class Unconfined(HpcrlError):
    """The command was not run, because it cannot be confined here."""


def python_variables() -> dict[str, str]:
    """Of this process's variables those that Python needs to start, and no other: no key is among them."""
    return {name: os.environ[name] for name in _PYTHONS if name in os.environ}


def refusal() -> str:
    """Why this machine cannot confine a command of this user's, "" if it can."""
    try:
        run_confined(["/bin/sh", "-c", ":"], View(), {}, _MORE)
    except Unconfined as error:
        return error.what
    return ""


class Confined(NamedTuple):
    """What became of a command.

    Attributes:
        code: its exit status, negative for a signal.
        out, err: what it wrote; control characters are still in it.
        late: it had not ended in time.
        limit: the other limit over which it was ended, in words, or "".
    """

    code: int
    out: str
    err: str
    late: bool = False
    limit: str = ""


def run_confined(
    command: Sequence[str], view: View, environment: Mapping[str, str], seconds: float, directory: str = "/"
) -> Confined:
    """Run a command.

    For whatever reads text or code of unknown origin: an imported script, a tool that a model has written.  The
    command begins in `directory`, with standard input empty.  It can start other programs that it sees.

    Args:
        command: its first word is a path inside.
        view: the files that it sees, besides the system's directories.
        environment: all of its variables.
        seconds: it is ended after these.

    Raises:
        Unconfined: says why this machine cannot confine it; nothing was run.
    """
    task = {
        "command": list(command),
        "directory": directory,
        "environment": dict(environment),
        "results": view.results,
        "seconds": seconds,
        "shown": [list(pair) for pair in view.shown],
    }
    with (
        tempfile.TemporaryFile() as told,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,  # files, whose size the limits bound
    ):
        told.write(json.dumps(task).encode())
        told.seek(0)
        numbers = (told.fileno(), report.fileno())
        words = [sys.executable, "-P", "-m", "hpcrl.sandbox.main", *map(str, numbers)]
        try:
            subprocess.run(
                words,
                env=python_variables(),
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                timeout=START + seconds + _MORE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Confined(-9, "", "", late=True)
        texts = [(file.seek(0), file.read(OUTPUT).decode(errors="replace"))[1] for file in (report, out, err)]
    if not texts[0]:
        last = texts[2].strip().splitlines()[-1:] or ["its watching process ended"]
        raise Unconfined(f"it cannot be confined here: {last[0]}")
    found = json.loads(texts[0])
    if "unconfined" in found:
        raise Unconfined(f"it cannot be confined here: {found['unconfined']}")
    late = found["ended"] == "time"
    return Confined(found["status"], texts[1], texts[2], late, "" if late else found["ended"])
