"""Attacks of a stranger on the node where a process of the run listens: a run survives them all, and nothing that was
sent is executed.

Invariant: the stranger has what any user of the node has: its network and the numbers of its ports, and no key.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.faults.beds import Bed, Missed, Process
from tests.support.faults.kinds import Kind, Struck

STRANGER = Path(__file__).with_name("stranger.py")


def ports_of(process: Process) -> list[str]:
    """HOST:PORT of everything on which a process listens."""
    try:
        found = psutil.Process(process.pid).net_connections("tcp")
    except psutil.Error:
        return []
    return sorted({f"{one.laddr.ip}:{one.laddr.port}" for one in found if one.status == psutil.CONN_LISTEN})


def attack(how: str) -> Callable[[Bed, random.Random], Struck]:
    def strike(bed: Bed, chance: random.Random) -> Struck:
        listening = [(process, ports) for process in bed.processes() if (ports := ports_of(process))]
        if not listening:
            raise Missed("nobody listens")
        host = chance.choice(sorted({process.host for process, _ in listening}))
        ports = sorted({port for process, some in listening if process.host == host for port in some})
        inside = next(process.pid for process, _ in listening if process.host == host)
        mark = bed.folder / "executed"
        command = ["nsenter", f"--net=/proc/{inside}/ns/net", sys.executable, "-I", "-S", str(STRANGER), how]
        command += [str(chance.random()), *ports]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | {"MARK": str(mark)}
        )
        if done.returncode:
            raise Missed(done.stderr[-300:])
        if done.stdout.strip() == "0":
            raise Missed("no port took a connection")
        assert not mark.exists(), f"something that came over {', '.join(ports)} was unpickled"
        return Struck(f"{len(ports)} ports on {host}, {done.stdout.strip()} connections")

    return strike


def attack_kinds() -> list[Kind]:
    """Attacks that need the network alone."""
    return [
        Kind("a crowd of silent connections", attack("crowd"), ends=False),
        Kind("garbage on every port", attack("garbage"), ends=False),
    ]
