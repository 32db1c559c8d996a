"""`hpcrl rehearse --on-node`: the same command on one node of the site, where a login node has no room for it.

Invariants: its output is shown as it comes and its exit status is ours; whatever ends this command ends what it
started, and so does a deadline.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NoReturn

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.site_file import load_site
from hpcrl.launch.slurm.one_node import on_one_node
from hpcrl.launch.slurm.squeue import there

QUEUED = 3600.0  #: seconds that the node may take to come
TAKES = 3600.0  #: seconds that the rehearsal may take there
GRACE = 20.0  #: seconds in which srun has to end what it started
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def on_node(argv: Sequence[str], own: Mapping[str, Any]) -> int:
    """Run `hpcrl rehearse` with `argv` on a node; its exit status.

    Args:
        own: what the command's own flags among them are.

    Raises:
        UsageError: where Slurm is not here.
        HpcrlError: if it does not end in time.
    """
    site = load_site(own.get("site"))
    if not there():
        raise UsageError("--on-node: Slurm is not here", "leave it out, or type it where jobs are submitted")
    card = "gpu" in own or "gpu-memory" in own
    words = without(argv, "on-node", "site" if card else "")  # which has had its effect
    sys.stdout.flush()
    return _run(on_one_node(site, ["rehearse", *words], TAKES, own.get("at-once")))


def without(argv: Sequence[str], switch: str, valued: str) -> list[str]:
    """`argv` without a switch, and without a flag that has a value ("" for none)."""
    found: list[str] = []
    skipped = False
    for word in argv:
        if skipped or word == f"--{switch}":
            skipped = False
        elif valued and word == f"--{valued}":
            skipped = True
        elif not (valued and word.startswith(f"--{valued}=")):
            found.append(word)
    return found


def _run(command: Sequence[str]) -> int:
    """The exit status of a command whose output is ours."""
    try:
        process = Popen(command, stdin=DEVNULL, start_new_session=True)  # Ctrl-C is for us, who ask it to end
    except OSError as error:
        raise HpcrlError(f"--on-node: {command[0]} cannot be started: {error.strerror}") from None
    with _asked_to_stop():
        try:
            code = process.wait(QUEUED + TAKES)
        except TimeoutExpired:
            raise HpcrlError(f"--on-node: no end within {(QUEUED + TAKES) / 3600:.0f} hours", "see the queue") from None
        finally:
            _end_command(process)
    return code if code >= 0 else 128 - code


def _end_command(process: Popen[bytes]) -> None:
    """Have the command end its job or step, and itself."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(TimeoutExpired):
        process.wait(GRACE)
    process.kill()


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[None]:
    """Within, a signal that would end this process at once leaves time to end what it started."""

    def stop(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
