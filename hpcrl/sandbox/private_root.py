"""A root directory of a process's own: system directories and what it is to see, read-only; one bounded /tmp.

Invariant: what is not named here or in the `View` is not there: no home, no /run, no /sys, no socket, no device but
those that hold nothing.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hpcrl.sandbox.system_calls import (
    BIND,
    NO_DEVICES,
    NO_EXEC,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    bind,
    mount,
    pivot_root,
)

#: where programs and libraries lie
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/gnu/store",
)
#: what programs and libraries read of the system's settings
SETTINGS = (
    "alternatives",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
)
DEVICES = ("full", "null", "random", "urandom", "zero")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
#: an existing directory that the new root is put together in; nothing outside of this process sees that
_PLACES = ("/sys", "/mnt", "/media", "/srv")
TMP = 64 << 20  #: bytes of /tmp
_TMPFS = "size={bytes},nr_inodes={inodes},mode={mode}"


class View(NamedTuple):
    """What a confined process sees besides the system's directories.

    Attributes:
        shown: (path inside, file or directory outside), read-only.
        results: a directory outside; inside it is /results, empty, and can be written to.
        tmp: bytes that may lie in /tmp, which is memory.
    """

    shown: tuple[tuple[str, str], ...] = ()
    results: str = ""
    tmp: int = TMP


RESULTS = "/results"  #: where View.results is inside


def in_system(path: str) -> bool:
    """Whether a file lies where every confined process sees it."""
    real = os.path.realpath(path)
    return any(real.startswith(f"{folder}/") for folder in map(os.path.realpath, SYSTEM))


def make_tmpfs(folder: str, most: int, mode: str, inodes: int = 16384) -> None:
    """Mount an empty file system in memory, of at most `most` bytes."""
    mount("tmpfs", folder, "tmpfs", NO_SUID | NO_DEVICES, _TMPFS.format(bytes=most, inodes=inodes, mode=mode))


def nameless_files(count: int, most: int) -> list[int]:
    """Empty files in memory that are in no directory, of `most` bytes together; this process sees where they would be
    no more."""
    folder = place()
    make_tmpfs(folder, most, "700")
    return [os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600) for _ in range(count)]


def place() -> str:
    """An existing directory to put a new root together in."""
    return next(folder for folder in _PLACES if os.path.isdir(folder))


def enter(view: View, own_pids: bool) -> None:
    """Change to a root of this process's own; its mount namespace must be its own, and it may mount there.

    Standard input is empty from then on.

    Args:
        own_pids: it is in a PID namespace of its own, and gets a /proc, which shows that alone.
    """
    root = place()
    mount(None, "/", None, RECURSIVE | PRIVATE)
    make_tmpfs(root, 4 << 20, "755")
    show_system(root)
    show_devices(root)
    for name in ("proc", "tmp", "run", "home", "var"):
        os.mkdir(f"{root}/{name}")
    os.symlink("/tmp", f"{root}/var/tmp")
    make_tmpfs(f"{root}/tmp", view.tmp, "1777")
    for inside, outside in sorted(view.shown):
        show(root, inside, outside)
    if view.results:
        os.mkdir(root + RESULTS)
        mount(view.results, root + RESULTS, None, BIND)
    if own_pids:
        mount_proc(root)
    pivot_root(root)
    make_root_read_only()
    empty_standard_input()


def show_system(root: str) -> None:
    """Show the machine's programs, libraries, and what these read of its settings, read-only."""
    for folder in SYSTEM:
        if os.path.islink(folder):  # such as /bin, which leads to usr/bin
            os.makedirs(os.path.dirname(root + folder), exist_ok=True)
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder):
            show(root, folder, folder)
    for name in SETTINGS:
        if os.path.exists(f"/etc/{name}"):
            show(root, f"/etc/{name}", os.path.realpath(f"/etc/{name}"))


def show_devices(root: str) -> None:
    """Show the devices that hold nothing, and the links that programs expect next to them."""
    for name in DEVICES:
        show(root, f"/dev/{name}", f"/dev/{name}", READ_ONLY | NO_SUID | NO_EXEC)
    for name, target in LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")


def mount_proc(root: str) -> None:
    """Mount what shows the PID namespace that this process is the first of."""
    # user 0 of the machine could change the kernel's settings there without any capability
    mount("proc", f"{root}/proc", "proc", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)


def make_root_read_only() -> None:
    """Let nothing write to the root's own file system any more; what is mounted in it keeps its own rights."""
    mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)


def empty_standard_input() -> None:
    """/dev/null from outside, as it was open, is one whose mode user 0 could change."""
    number = os.open("/dev/null", os.O_RDONLY)
    if number != 0:
        os.dup2(number, 0)
        os.close(number)


def show(root: str, inside: str, outside: str, flags: int = READ_ONLY | NO_SUID | NO_DEVICES) -> None:
    """Show a file or directory; its place is made unless what is shown there already has one."""
    target = root + inside
    if not os.path.exists(target):
        if os.path.isdir(outside):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o644))
    bind(outside, target, flags)
