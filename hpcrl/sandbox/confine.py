"""`confine`: this process gives up what it has of the machine, but for a view of files.

Invariant: all of it or nothing: where one part cannot be had, the process ends or the caller is told before anything
that is not trusted runs.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from hpcrl.sandbox import private_root, seccomp
from hpcrl.sandbox.private_root import View, in_system
from hpcrl.sandbox.system_calls import (
    NEW_CGROUP,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_USER,
    NEW_UTS,
    drop_capabilities,
    unshare,
    write_kernel,
)

OWN = NEW_MOUNTS | NEW_NETWORK | NEW_IPC | NEW_UTS | NEW_CGROUP


class NotBegun(OSError):
    """The first step was refused: the process is as it was before."""


def become_own_user(more: int) -> None:
    """Enter a user namespace, and others with it; the process must have one thread.

    Inside, the user keeps its number, and no other number exists.

    Args:
        more: the other namespaces, of `system_calls`.

    Raises:
        NotBegun: if there are no such namespaces for this user.
        OSError: if they cannot be set up: they cannot be left either.
    """
    uid = os.getuid()
    gid = os.getgid()
    try:
        unshare(NEW_USER | more)  # all of them or none
    except OSError as error:
        raise NotBegun(error.errno, error.strerror) from error
    write_kernel("/proc/self/setgroups", "deny")
    write_kernel("/proc/self/uid_map", f"{uid} {uid} 1")
    write_kernel("/proc/self/gid_map", f"{gid} {gid} 1")


def confine(view: View, programs: bool = False) -> None:
    """Confine this process, and all that it starts, for good.

    What it has open it keeps, but for standard input: sockets and pipes to its parent, and files outside too.  It keeps
    its process id, and can signal no process, not even itself.  To be called before the process has a second thread;
    memory and time are the caller's to limit.

    Args:
        programs: it may start processes, which may outlive it.

    Raises:
        NotBegun: if the kernel does not let this user do so, or there is a second thread; nothing was done.
        OSError: if it does so in part: the process is then half confined, and should end.
    """
    become_own_user(OWN)
    private_root.enter(view, own_pids=False)
    drop_capabilities()
    seccomp.refuse_calls(own_pids=False, programs=programs)


def view_of_python() -> View:
    """What this interpreter needs to import what it has not imported yet: its libraries, its packages, and this one.

    Of sys.path a home directory and what is above one, the current directory and what everybody may write to are left
    out, since other things lie there.
    """
    apart = {os.path.realpath(place) for place in (os.environ.get("HOME", "/"), os.getcwd())}
    places = [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)] + sys.path
    wanted = {
        place: real
        for place in filter(os.path.isabs, places)
        if os.path.exists(real := os.path.realpath(place))
        and not os.stat(real).st_mode & stat.S_IWOTH
        and not any(f"{one}/".startswith(f"{real.rstrip('/')}/") for one in apart)
    }
    package = str(Path(__file__).parents[1])
    wanted[package] = os.path.realpath(package)
    shown = {inside: real for place, real in wanted.items() for inside in (place, real)}
    outside = {inside: real for inside, real in shown.items() if not in_system(f"{inside}/")}
    inner = {one for one in outside for other in outside if one.startswith(f"{other}/")}
    return View(tuple((inside, real) for inside, real in outside.items() if inside not in inner))


def confine_first_process(view: View) -> None:
    """The same for the first process of a PID namespace, whose user namespace is its own already."""
    unshare(OWN)
    private_root.enter(view, own_pids=True)
    drop_capabilities()
    seccomp.refuse_calls(own_pids=True)
