"""Hosts as network namespaces on one bridge, each with a link that is held to a fixed rate in both directions.

    switch()                              # once, in a process of its own: leaves this machine's network for one with a bridge
    hosts = [Host(i, rate) for i in range(6)]
    hosts[2].enter()                      # in a forked process: from now on its connections are those of host 2

Root, `ip` and `tc` are needed.  Invariant: nothing is named in this machine's own namespaces, so that nothing is left
behind when the processes end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

NEWNET = 0x40000000
BRIDGE = "10.78.0.254"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def switch() -> None:
    """A network of its own for this process, with a bridge in it."""
    _call("unshare", NEWNET)
    for command in (
        "link set lo up",
        "link add br0 type bridge forward_delay 0 stp_state 0",
        f"addr add {BRIDGE}/24 dev br0",
    ):
        _do(f"ip {command}")
    _do("ip link set br0 up")


class Host:
    """One host; rate: of its link, in Mbit/s."""

    def __init__(self, number: int, rate: int) -> None:
        self.address = f"10.78.0.{number + 1}"
        ready, told = os.pipe()
        self.holder = os.fork()
        if self.holder == 0:  # keeps the namespace until its parent has gone
            os.close(ready)
            _libc.prctl(1, 9)
            _call("unshare", NEWNET)
            os.write(told, b"x")
            while True:
                time.sleep(3600)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        _do(f"ip link add v{number} type veth peer name eth0 netns {self.holder}")
        _do(f"ip link set v{number} master br0 up")
        inside = f"nsenter --net=/proc/{self.holder}/ns/net "
        for command in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _do(f"{inside}ip {command}")
        limit = f"root tbf rate {rate}mbit burst 128kb limit 8mb"
        _do(f"tc qdisc add dev v{number} {limit}")  # what comes to the host
        _do(f"{inside}tc qdisc add dev eth0 {limit}")  # what it sends

    def enter(self) -> None:
        """Move this process there."""
        fd = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY)
        _call("setns", fd, NEWNET)
        os.close(fd)
