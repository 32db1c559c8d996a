"""Whether hosts run a command for us, by ssh or whatever else mpirun uses for that.

Invariant: every host is asked at once, and none for longer than REACH.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.errors import UsageError

REACH = 20.0  #: seconds that a host may take to answer


def reach(hosts: Sequence[str], agent: list[str]) -> None:
    """UsageError unless every host runs a command for us within REACH seconds, none of them through the loopback."""
    if len(hosts) > 1:
        for host in hosts:
            if (address := _loopback(host)) is not None:
                raise UsageError(
                    f"host {host} is {address} here, which other hosts cannot reach",
                    "write its address on the machines' network into the hostfile",
                )
    for host, why in silent(hosts, agent).items():
        raise UsageError(f"host {host} {why}", f"try: {shlex.join(agent)} {host} true")


def silent(hosts: Sequence[str], agent: list[str]) -> dict[str, str]:
    """host -> what is wrong, of those that do not run a command for us within REACH seconds."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH / 2:.0f}"] if Path(agent[0]).name == "ssh" else []
    asked = {
        host: subprocess.Popen(
            [*agent, *options, host, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in dict.fromkeys(hosts)
    }
    deadline, found = time.monotonic() + REACH, {}
    try:
        while any(p.poll() is None for p in asked.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for host, process in asked.items():
            if process.poll() is None:
                found[host] = f"does not answer within {REACH:.0f} s"
            elif process.returncode:
                said = (process.stderr.read() if process.stderr else "").strip().splitlines()
                found[host] = f"cannot be reached: {said[-1] if said else f'exit code {process.returncode}'}"
    finally:
        for process in asked.values():
            if process.poll() is None:
                process.kill()
    return found


def _loopback(host: str) -> str | None:
    """The loopback address that a name leads to, if it does."""
    try:
        addresses = {item[4][0] for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None  # the agent may know the name; if not, it says so
    return next((str(a) for a in addresses if str(a).startswith("127.") or a == "::1"), None)
