"""Whether hosts run a command for us, by ssh or whatever else mpirun uses for that.

Invariant: every host is asked at once, and none for longer than REACH.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL

from hpcrl.errors import UsageError

REACH = 20.0  #: seconds that a host may take to answer
IN = "Authenticated to "  #: what ssh says once a host has let it in
SLOW = "accepts the connection, but its shell was not ready within"  #: of a host that is there
REST = ("Transferred: ", "Bytes per second: ")  #: and when it has ended well; what went wrong is before


def check_hosts(hosts: Sequence[str], agent: list[str]) -> None:
    """Raise UsageError unless every host runs a command for us within REACH seconds, none of them through the
    loopback.
    """
    if len(hosts) > 1:
        for host in hosts:
            if (address := _loopback(host)) is not None:
                raise UsageError(
                    f"host {host} is {address} here, which other hosts cannot reach",
                    "write its address on the machines' network into the hostfile",
                )
    for host, why in unreachable(hosts, agent).items():
        start = "let its start-up file return early in a non-interactive shell; " if why.startswith(SLOW) else ""
        raise UsageError(f"host {host} {why}", f"{start}try: {shlex.join(agent)} {host} true")


def unreachable(hosts: Sequence[str], agent: list[str]) -> dict[str, str]:
    """host -> what is wrong, of those that do not run a command for us within REACH seconds."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH / 2:.0f}", "-o", "LogLevel=VERBOSE"]
    words = [*agent, *(options if Path(agent[0]).name == "ssh" else [])]
    names = list(dict.fromkeys(hosts))
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        found = pool.map(_wrong, ([*words, name, "true"] for name in names))
        return {name: why for name, why in zip(names, found, strict=True) if why}


def lost_hosts(hosts: Sequence[str], agent: list[str]) -> list[str]:
    """The hosts that cannot be reached, or answer nothing, for REACH seconds; one whose shell alone takes long is
    there."""
    return [host for host, why in unreachable(hosts, agent).items() if not why.startswith(SLOW)]


def _wrong(command: list[str]) -> str:
    """What is wrong with the host of a command, by its exit status and what it says on stderr; or ""."""
    # a file, since a process that shares our connection to a host (ssh's ControlMaster) may hold a pipe open for ever
    with tempfile.TemporaryFile() as said:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(command, stdin=DEVNULL, stdout=DEVNULL, stderr=said, timeout=REACH).returncode
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if status is None and any(line.startswith(IN) for line in lines):
        return f"{SLOW} {REACH:.0f} s: what it starts with, such as ~/.bashrc, takes too long"
    if status is None:
        return f"does not answer within {REACH:.0f} s"
    errors = [line for line in lines if not line.startswith((IN, *REST))]
    return f"cannot be reached: {errors[-1] if errors else f'exit code {status}'}" if status else ""


def _loopback(host: str) -> str | None:
    """The loopback address that a name leads to, if it does."""
    try:
        addresses = {item[4][0] for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None  # the agent may know the name; if not, it says so
    return next((str(a) for a in addresses if str(a).startswith("127.") or a == "::1"), None)
