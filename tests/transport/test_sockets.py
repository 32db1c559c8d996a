"""Memory of batches that is used again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcrl.transport import sockets

PROGRAM = """
import resource, sys
if sys.argv[1] == "keep":
    from hpcrl.transport.sockets import keep_freed_memory
    keep_freed_memory()
for _ in range(10):
    blocks = [b"x" * 3_000_000 for _ in range(10)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def test_pages_are_used_again() -> None:
    """Blocks that are freed and asked for again are not fetched from the kernel page by page every time."""
    keep, give_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60).stdout)
        for how in ("keep", "give back")
    )
    assert give_back - keep > 20_000  # of some 73,000 pages, nine tenths were there before


def test_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library without mallopt is left as it is."""
    monkeypatch.setattr(sockets.ctypes, "CDLL", lambda _: object())
    sockets.keep_freed_memory()
