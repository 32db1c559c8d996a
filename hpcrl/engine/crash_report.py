"""What is left of a server that died: the line of its output that says why, and its files in shared memory.

Invariant: the output passes through to our own, line by line and unchanged, whether or not anybody asks.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import psutil

KEPT = 1000  #: lines that are kept to look for a reason
RECENT = 5.0  #: seconds before the last good health check in which a reason may already have been written

#: what vLLM puts before a message: "(EngineCore pid=7) ERROR 11-21 07:11:41 [core.py:123] "
_PREFIX = re.compile(r"^(\([^)]*\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: plain causes, most telling first; then any exception
_CAUSES = (
    re.compile(
        r"out of memory|OutOfMemory|Cannot allocate memory|MemoryError|can't allocate memory|less than desired|No available memory|larger than the available KV cache",
        re.IGNORECASE,
    ),
    re.compile(r"^Value error, "),  # pydantic: what is wrong stands below the exception's own line
    re.compile(r"No space left on device", re.IGNORECASE),
    re.compile(r"Address already in use", re.IGNORECASE),
    re.compile(
        r"(not a valid model identifier|Cannot find any model weights|safetensors.*(not found|invalid)|architectures .* not supported)",
        re.IGNORECASE,
    ),
)
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt): \S")
#: lines that only say that something else went wrong
_EMPTY = re.compile(
    r"Engine core initialization failed|EngineDeadError|See root cause|Call to \w+ method failed|CancelledError|KeyboardInterrupt|resource_tracker"
)
_DEATH = re.compile(r"died unexpectedly|Failed core proc")

#: files in /dev/shm that vLLM, torch and multiprocessing make for their own workers
_OURS = re.compile(r"^(vllm|sem\.|psm_|torch_|nccl-|cuda\.shm)")


class ServerLog:
    """Passes a server's output on and remembers the last lines, and when they came."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.lines: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self.healthy = 0.0
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def note_health(self) -> None:
        """The server is well: what it said some time before is no reason for its death."""
        self.healthy = time.monotonic()

    def finish(self, seconds: float) -> None:
        """Wait for the end of the output, at most that long."""
        self.thread.join(seconds)

    def last_line(self) -> str:
        return next((bare(line) for _, line in reversed(list(self.lines)) if line.strip()), "nothing")

    def explain(self) -> str:
        """The line that says why, as well as that can be told."""
        recent = [line for when, line in list(self.lines) if when > self.healthy - RECENT]
        return reason(recent) or "its log does not say why"


def bare(line: str) -> str:
    """A line of output without colours and logging prefix."""
    return _PREFIX.sub("", _COLOUR.sub("", line).strip(), count=1).strip()


def reason(lines: list[str]) -> str:
    """The most telling line: a known cause, else the last exception, else a note of a death; "" if there is none."""
    plain = [text for text in map(bare, lines) if text and not _EMPTY.search(text)]
    for pattern in (*_CAUSES, _EXCEPTION):
        if found := next((text for text in reversed(plain) if pattern.search(text)), None):
            return found
    return next((bare(line) for line in reversed(lines) if _DEATH.search(line)), "")


def leftovers(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped and that would outlive them if they were killed."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found |= {Path(region.path) for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
    return {path for path in found if _OURS.match(path.name) and path.exists()}
