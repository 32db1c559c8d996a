"""The first process of a box, where its watcher ends between two of its looks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, socket
from hpcrl.sandbox.inside.first import BoxInit
watcher, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
gone.close()
init = BoxInit(socket.socketpair()[0], watcher, {resource.RLIMIT_CPU: 9}, 0)
head = {"do": "run", "n": 1, "command": ["true"], "env": {}, "cwd": "/", "lasting": False, "output": 9, "seconds": 9}
init._do((head, b""))
assert not init._unsent, bytes(init._unsent)
"""


def test_a_command_whose_watcher_is_gone() -> None:
    """Broken pipe is no answer to a command: the box is lost, and its user makes the call again in another."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
