"""What a process that a test has started says, waited for no longer than a test may take.

Invariant: no test waits for ever for a line: one that does not come is an error, and its process is ended.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from typing import AnyStr

SECONDS = 120.0


def read_line(process: subprocess.Popen[AnyStr], seconds: float = SECONDS) -> AnyStr:
    """The next line of its standard output; empty if there will be none.

    Raises:
        AssertionError: after `seconds`.
    """
    assert process.stdout is not None
    found: queue.Queue[AnyStr] = queue.Queue()
    read = process.stdout.readline
    threading.Thread(target=lambda: found.put(read()), daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except queue.Empty:
        process.kill()
        raise AssertionError(f"process {process.pid} wrote no line within {seconds:g} s: {process.args}") from None
