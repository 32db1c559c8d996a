"""Memory that is used again for every batch.

A batch is some ten megabytes in blocks of half a megabyte and more: sent, encrypted, received, decrypted, joined. glibc
gives such blocks back to the kernel as soon as they are free, and the kernel has to clear every page of the next ones:
a third of all that the queue costs (bench/queue.py).

Invariant: no more than KEPT bytes stay with the process that it does not use; larger blocks than BLOCK go back at once.
"""

from __future__ import annotations

import ctypes

#: bytes at the heap's end that are not given back; bytes of a block that is not part of the heap
KEPT, BLOCK = 2**27, 2**25
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Have this process keep what it frees, where its C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT)
        mallopt(_MMAP_THRESHOLD, BLOCK)
