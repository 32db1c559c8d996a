"""Boxes that Apptainer makes (or Singularity): where users may make no namespaces, but it is installed set-user-ID, or
where a site wants every container to be one of it.

/work, /tmp and whatever else can be written to are one file system in memory, of the site's `sessiondir max size`
(64 MiB unless apptainer.conf says otherwise), which is a box's disk if that is smaller than its limit.

Invariant: nothing of the caller's environment, home directory, configuration or current directory is in the container.
"""

from __future__ import annotations

import errno
import os

from hpcrl.sandbox.kinds.container_kind import ContainerKind
from hpcrl.sandbox.kinds.inside import INSIDE, system_binds
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.system_calls import read_kernel

PROGRAMS = ("apptainer", "singularity")
_FLAGS = ("--contain", "--cleanenv", "--no-home", "--no-privs", "--no-eval", "--no-init")
_NAMESPACES = ("--pid", "--ipc", "--uts", "--net", "--network", "none")
_UNWANTED = "sys,hostfs,bind-paths,cwd,devpts,home"


def is_sized(program: str) -> bool:
    """The site's setting is what bounds it."""
    return False


def start_words(kind: ContainerKind, image: str, limits: BoxLimits, command: list[str]) -> list[str]:
    """See `KindModule`."""
    binds = [(kind.runtime, INSIDE), *(() if image else _with_mounts_below(system_binds()))]
    words = [kind.program, "--silent", "exec", *_FLAGS, *_NAMESPACES, "--no-mount", _UNWANTED]
    for outside, inside in binds:
        if set(outside + inside) & set(":,\\"):
            raise OSError(errno.EINVAL, f"Apptainer takes no path with one of : , and \\ in it: {outside}")
        words += ["--bind", f"{outside}:{inside}:ro"]
    return [*words, "--scratch", "/work", "--pwd", "/work", image or kind.system, *command]


def _with_mounts_below(binds: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """And each mount below one of these: Apptainer makes the upper one read-only alone."""
    folders = [f"{outside}/" for outside, inside in binds if outside == inside]
    found = list(binds)
    for line in read_kernel("/proc/self/mountinfo").splitlines():
        place = line.split(" ")[4].encode().decode("unicode_escape")
        if place.startswith(tuple(folders)) and os.path.exists(place):
            found.append((place, place))
    return found
