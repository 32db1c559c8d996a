"""mount(2) for process 1 of a namespace.

Invariant: called only inside a private mount namespace, so nothing of it is ever seen outside, and all of it is gone
when the last process of the namespace is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path | str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """One mount.  OSError with the target if the kernel refuses."""
    arguments = [
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    ]
    if _libc.mount(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {kind or source}: {os.strerror(error)}", str(target))


def bind(source: Path | str, target: Path | str) -> None:
    """Show `source` (with what is mounted below it) at `target`, which must exist."""
    mount(str(source), target, flags=MS_BIND | MS_REC)


def private(directory: str, mode: str, visible: Iterable[Path]) -> None:
    """An empty tmpfs over `directory`, in which only the paths of `visible` below it are still to be seen, as they
    were."""
    # a parent covers its children
    kept: list[Path] = []
    for path in sorted(visible):
        if path.is_relative_to(directory) and not any(path.is_relative_to(above) for above in kept):
            kept.append(path)
    opened = [(path, os.open(path, os.O_PATH)) for path in kept]
    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")
    for path, handle in opened:
        path.mkdir(parents=True)
        bind(f"/proc/self/fd/{handle}", path)
        os.close(handle)


def fresh_sys() -> None:
    """/sys of this network namespace, so that /sys/class/net shows its interfaces; the cgroups below it stay as they
    are."""
    cgroups = Path("/sys/fs/cgroup")
    handle = os.open(cgroups, os.O_PATH)
    try:
        mount("sysfs", "/sys", "sysfs")
        bind(f"/proc/self/fd/{handle}", cgroups)
    except PermissionError:  # in a user namespace the kernel may refuse; then /sys is the machine's
        return
    finally:
        os.close(handle)
